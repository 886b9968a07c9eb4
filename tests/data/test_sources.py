"""Which files a source stands for: local ones, directories in the layout of a hub data set, and data sets of a hub."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_hub import SmallHub, small_hub

from tlora.data.rows import read_files, read_rows
from tlora.data.sources import SUFFIXES, list_files, open_source, shown_files
from tlora.errors import DataError
from tlora.job import DATA_SUFFIXES, DataSource, may_be_hub_data

CARD = """---
configs:
- config_name: default
  data_files:
  - {split: train, path: "data/train-*"}
  - {split: test, path: "data/test-*"}
- config_name: small
  data_files:
  - {split: validation, path: "data/test-*"}
- config_name: packed
  data_files: more.zip
---
"""
FILES = {
    "README.md": CARD,
    "data/train-0.jsonl": '{"text": "a", "n": 1}\n{"text": "2024-01-01", "n": 1.5}\n',
    "data/train-1.jsonl": '{"text": "c"}\n',
    "data/test-0.jsonl": '{"text": "d"}\n',
    "more.zip": "PK",
}
TRAIN = [{"text": "a", "n": 1}, {"text": "2024-01-01", "n": 1.5}, {"text": "c"}]


TABLE = {"README.md": '---\nconfigs: [{config_name: semicolons, sep: ";", data_files: a.csv}]\n---\n', "a.csv": "text;n\na;1\n"}


def lay_out(directory: Path, files: dict[str, str] = FILES) -> Path:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def rows(directory: Path, **source: Any) -> list[dict[str, object]]:
    found = open_source(DataSource.model_validate(source), directory, directory / "cache")
    return [row.value for row in read_files(found.files, found.display_name)]


def test_a_text_file_is_a_row_for_each_line_that_is_not_empty(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    file.write_bytes(b"\xef\xbb\xbfOne line.\n\n  indented\r\n\xe2\x80\xa8still the third\nlast, without an end")
    found = list(read_rows(file))
    assert [row.value for row in found] == [
        {"text": text} for text in ("One line.", "  indented", "\u2028still the third", "last, without an end")
    ]
    assert found[1].place == f"{file}, line 3" and found[-1].share == 1


def test_text_files_of_a_directory_are_read_where_there_is_no_other_data(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("About the rows.\n")
    assert [file.name for file in list_files(tmp_path)] == ["notes.txt"]
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert [file.name for file in list_files(tmp_path)] == ["a.jsonl"]


def test_a_path_is_a_data_set_of_the_hub_only_without_a_data_suffix() -> None:
    assert tuple(SUFFIXES) == DATA_SUFFIXES
    assert not any(map(may_be_hub_data, ("data/x.jsonl.gz", "data/x.tsv", "data/x.csv.zst")))
    assert all(map(may_be_hub_data, ("tatsu-lab/alpaca", "openai/gsm8k", "a/b.v2")))
    assert not any(map(may_be_hub_data, ("alpaca", "data/x.jsonl", "data/X.TXT", "/data/x", "./x", "../x", "~/x", "a/b/c", "a//b")))


@pytest.mark.parametrize(
    ("source", "expected"),
    [({"split": "train"}, TRAIN), ({"split": "test"}, [{"text": "d"}]), ({"name": "small"}, [{"text": "d"}])],
)
def test_a_directory_in_the_layout_of_a_hub_data_set(source: dict[str, str], expected: list[object], tmp_path: Path) -> None:
    """Rows are as in the files: `datasets` itself would give n = 1.0, and a time for the date."""
    lay_out(tmp_path / "toy")
    assert rows(tmp_path, path="toy", **source) == expected
    assert shown_files([DataSource.model_validate({"path": "toy", **source})], tmp_path) == [DataSource(path="toy", **source).display_name]


LAYOUTS: dict[str, tuple[str, ...]] = {
    "files by split": ("train.jsonl", "test.jsonl"),
    "words in names": ("chat_train.jsonl", "chat-eval-2.jsonl", "other.jsonl"),
    "directories by split": ("train/a.jsonl", "train/b.jsonl", "dev/a.jsonl"),
    "shards": ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/other-00000-of-00001.jsonl"),
    "all below": ("one/a.jsonl", "two/b.jsonl"),
    "one split": ("validation.jsonl",),
    "no split": ("constraint.jsonl", "latest.jsonl"),
    "compressed": ("train.jsonl.gz", "test.jsonl.gz"),
    "in a hidden place": ("a.jsonl", ".cache/train.jsonl"),
}


def one_row_each(directory: Path, names: tuple[str, ...]) -> Path:
    lay_out(directory, {name: json.dumps({"text": name}) + "\n" for name in names})
    for file in directory.rglob("*.gz"):
        file.write_bytes(gzip.compress(file.read_bytes()))
    return directory


def test_tables_with_tabs_in_the_layout_of_a_hub_data_set(tmp_path: Path) -> None:
    lay_out(tmp_path / "set", {f"{name}.tsv": f"text\tnumber\n{name}, 1\t2\n" for name in ("train", "test")})
    assert rows(tmp_path, path="set", split="test") == [{"text": "test, 1", "number": "2"}]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_directory_is_read_as_the_hub_would(layout: str, tmp_path: Path) -> None:
    """`datasets` reads the same rows of it."""
    from datasets import load_dataset

    one_row_each(tmp_path / "set", LAYOUTS[layout])
    splits = load_dataset(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"))
    expected = splits.get("train") or next(iter(splits.values()))
    assert [row["text"] for row in rows(tmp_path, path="set")] == expected["text"]
    for split, part in splits.items():
        assert [row["text"] for row in rows(tmp_path, path="set", split=str(split))] == part["text"]
    every = [name for name in LAYOUTS[layout] if name[0] != "."]
    assert sorted(str(row["text"]) for row in rows(tmp_path, path="set", split="all")) == sorted(every)


def test_what_of_a_directory_is_not_read_is_said(tmp_path: Path) -> None:
    one_row_each(tmp_path / "set", ("train.jsonl", "test.jsonl", "notes.csv"))
    found = open_source(DataSource(path="set"), tmp_path, tmp_path)
    (note,) = found.notes
    assert note.startswith(f"{tmp_path / 'set'}: split train is read, as of a data set of the hub, and not notes.csv, test.jsonl; `split`")
    for split in ("test", "all"):
        assert open_source(DataSource(path="set", split=split), tmp_path, tmp_path).notes == ()
    one_row_each(tmp_path / "plain", ("a.jsonl", "b.jsonl"))
    assert open_source(DataSource(path="plain"), tmp_path, tmp_path).notes == ()


def test_a_directory_of_several_splits_without_train_wants_one_named(tmp_path: Path) -> None:
    one_row_each(tmp_path / "set", ("validation.jsonl", "test.jsonl"))
    with pytest.raises(DataError, match=r"set: its splits are validation, test; name one of them: `split: validation`"):
        rows(tmp_path, path="set")
    assert rows(tmp_path, path="set", split="validation") == [{"text": "validation.jsonl"}]


def test_a_card_that_defines_splits_decides(tmp_path: Path) -> None:
    lay_out(tmp_path / "toy")
    assert rows(tmp_path, path="toy") == TRAIN
    lay_out(tmp_path / "named", {"README.md": "---\nconfigs: [{config_name: default, data_files: a.jsonl}]\n---\n"})
    one_row_each(tmp_path / "named", ("a.jsonl", "b.jsonl"))
    assert rows(tmp_path, path="named") == [{"text": "a.jsonl"}]


@pytest.mark.parametrize(
    ("link", "target", "said"),
    [
        ("a.jsonl", "b.jsonl", "a symbolic link to 'b.jsonl', which does not exist; correct the link, or remove it"),
        ("a.jsonl", "a.jsonl", "its symbolic links lead in a circle; link it to the file that is meant, or remove it"),
    ],
)
def test_a_link_that_leads_nowhere_is_an_error(link: str, target: str, said: str, tmp_path: Path) -> None:
    """In a directory too: without its file it would be trained with fewer rows."""
    one_row_each(tmp_path / "set", ("z.jsonl",))
    (tmp_path / "set" / link).symlink_to(target)
    for path in ("set", f"set/{link}"):
        with pytest.raises(DataError) as refused:
            rows(tmp_path, path=path)
        assert str(refused.value) == f"{tmp_path / 'set' / link}: {said}"


def test_links_between_directories_do_not_lead_in_circles(tmp_path: Path) -> None:
    one_row_each(tmp_path / "set", ("train/a.jsonl", "test/a.jsonl"))
    for name in ("again", "more"):
        (tmp_path / "set" / "train" / name).symlink_to("..")
    assert rows(tmp_path, path="set") == [{"text": "train/a.jsonl"}]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"split": "train[:1%]"}, r"'train\[:1%\]' is no split of it, its splits are train, test; name one of them: `split: train`"),
        ({"name": "large"}, "it cannot be seen which files belong to it .*'large' not found.*; check `name` and `split`"),
        ({"path": "table", "name": "semicolons"}, "it is to be read with sep: ';', which is not supported; load it with datasets, save it"),
        ({"name": "packed"}, "more.zip is none of .jsonl, .*; load it with datasets, save it"),
        ({"revision": "main"}, "revision 'main' has no meaning for a local directory; remove revision"),
        ({"path": "toy/data/test-0.jsonl", "split": "test"}, "split 'test' has no meaning for a file; remove split"),
    ],
)
def test_what_a_local_source_cannot_be(source: dict[str, str], said: str, tmp_path: Path) -> None:
    lay_out(tmp_path / "toy")
    lay_out(tmp_path / "table", TABLE)
    with pytest.raises(DataError, match=said):
        rows(tmp_path, **{"path": "toy", **source})


def test_a_saved_set_takes_a_split_and_no_name(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    parts = {name: Dataset.from_list([{"text": name}]) for name in ("one", "two")}
    DatasetDict(parts).save_to_disk(tmp_path / "saved")
    assert rows(tmp_path, path="saved", split="two") == [{"text": "two"}]
    with pytest.raises(DataError, match="saved: .*one, two.*`split: one`"):
        rows(tmp_path, path="saved")
    with pytest.raises(DataError, match="name 'x'.*save_to_disk"):
        rows(tmp_path, path="saved", name="x", split="two")
    with pytest.raises(DataError, match="split 'two'.*save_to_disk"):
        rows(tmp_path, path="saved/two", split="two")


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Of each source, `open_source` and the rows, in a process of its own: the hub's clients read their settings when they are imported."""
    code = (
        "import json, sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from tlora.data.rows import read_files\n"
        "from tlora.data.sources import open_source\n"
        "from tlora.errors import DataError\n"
        "from tlora.job import DataSource\n"
        "here, said = Path(sys.argv[1]), []\n"
        "for source in map(DataSource.model_validate, json.loads(sys.argv[2])):\n"
        "    try:\n"
        "        found = open_source(source, here, here / 'cache')\n"
        "        said.append([[row.value for row in read_files(found.files, found.display_name)], found.commit])\n"
        "    except DataError as error:\n"
        "        said.append(str(error))\n"
        "assert sys.modules['torch'] is None\n"
        "print(json.dumps(said))\n"
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")

    def run(endpoint: str, *sources: dict[str, str]) -> list[Any]:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        command = [sys.executable, "-P", "-c", code, str(tmp_path), json.dumps(sources)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        said: list[Any] = json.loads(found.stdout)
        return said

    return run


@pytest.mark.slow
def test_a_data_set_of_the_hub(fetched: Callable[..., list[Any]]) -> None:
    toy = {"path": "org/toy"}
    with small_hub() as hub:
        first = hub.add("org/toy", FILES)
        assert fetched(hub.endpoint, toy, {**toy, "name": "small"}) == [[TRAIN, first], [[{"text": "d"}], first]]
        second = hub.add("org/toy", FILES | {"data/train-1.jsonl": '{"text": "new"}\n'})
        found = fetched(hub.endpoint, {**toy, "split": "train"}, {**toy, "revision": first})
        assert found == [[[*TRAIN[:2], {"text": "new"}], second], [TRAIN, first]]
        gone = hub.endpoint
    before, said = fetched(gone, {**toy, "revision": first}, toy)
    assert before == [TRAIN, first], "a commit that was read before needs no network"
    assert "org/toy: no such file or directory, and the hub cannot be asked for a data set of this name (" in said
    assert f"or write `revision: {first}`, which was fetched before" in said
    assert "did you mean" not in said, "no directory org is here"


@pytest.mark.parametrize(
    ("path", "hint"), [("data/polit", "did you mean '{}/data/polite.chat.jsonl'?"), ("data/zzz", "the directory '{}/data' holds no 'zzz'")]
)
def test_a_missing_path_that_reads_like_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, hint: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "polite.chat.jsonl").write_text('{"text": "a"}\n')
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: 1 / 0)
    with pytest.raises(DataError) as refused:
        open_source(DataSource(path=path), tmp_path, tmp_path / "cache")
    assert hint.format(tmp_path) in str(refused.value)


REFUSED = [
    ({"path": "org/none"}, "org/none: no such file or directory, and no such data set on the hub; correct the path, or set HF_TOKEN"),
    ({"revision": "old"}, "org/toy: the data set has no revision 'old'; give a branch, tag or commit that it has"),
    ({"split": "dev"}, "org/toy, split dev: 'dev' is no split of it, its splits are train, test; name one of them"),
    ({"name": "packed"}, "org/toy, name packed: more.zip is none of .jsonl"),
    ({"path": "org/code"}, "org/code: it cannot be seen which files belong to it (Dataset scripts are no longer supported"),
]


def test_what_the_hub_cannot_give(fetched: Callable[..., list[Any]]) -> None:
    with small_hub() as hub:
        hub.add("org/toy", FILES)
        hub.add("org/code", FILES | {"code.py": "raise SystemExit('this must not run')"})
        for (_, said), found in zip(REFUSED, fetched(hub.endpoint, *({"path": "org/toy", **source} for source, _ in REFUSED)), strict=True):
            assert isinstance(found, str) and found.startswith(said), found


def test_the_small_hub_knows_revisions() -> None:
    """What the other tests lean on: `main` moves, commits stay."""
    hub = SmallHub()
    first, second = hub.add("a/b", {"x": "1"}), hub.add("a/b", {"x": "2"})
    assert hub.find("a/b", "main") == (second, {"x": b"2"}) and hub.find("a/b", first) == (first, {"x": b"1"})
