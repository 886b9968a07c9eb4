"""Every container gives the same rows; everything that can be wrong with its bytes is told with file and place."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.data import rows
from tlora.data.rows import read_rows
from tlora.errors import DataError

ROWS: list[dict[str, Any]] = [{"prompt": f'Grüße {i} 你好 🙂, "quoted"\nnew line', "completion": str(i)} for i in range(300)]


def write_jsonl(path: Path, values: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in values), encoding="utf-8")
    return path


def write_array(path: Path, values: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=1), encoding="utf-8")
    return path


def write_csv(path: Path, values: list[dict[str, Any]] = ROWS) -> Path:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(values[0]))
        writer.writeheader()
        writer.writerows(values)
    return path


def write_parquet(path: Path, values: list[dict[str, Any]] = ROWS) -> Path:
    pq.write_table(pa.Table.from_pylist(values), path, row_group_size=70)
    return path


def save_set(path: Path, values: list[dict[str, Any]] = ROWS) -> Path:
    datasets.Dataset.from_list(values).save_to_disk(str(path), num_shards=3)
    return path


def save_splits(path: Path, values: list[dict[str, Any]] = ROWS) -> Path:
    parts = {"test": datasets.Dataset.from_list(values[:2]), "train": datasets.Dataset.from_list(values)}
    datasets.DatasetDict(parts).save_to_disk(str(path))
    return path


def write_tsv(path: Path) -> Path:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["prompt", "completion"], delimiter="\t")
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def compressed(write: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """What `write` writes, in two streams one after the other, as `cat a.gz b.gz` leaves them."""

    def write_compressed(path: Path) -> Path:
        plain = write(path.with_suffix("")).read_bytes()
        path.with_suffix("").unlink()
        compression = {".gz": "gzip", ".zst": "zstd"}[path.suffix.lower()]
        with path.open("wb") as file:
            for part in (plain[:1000], plain[1000:]):
                packed = pa.BufferOutputStream()
                with pa.CompressedOutputStream(packed, compression) as stream:
                    stream.write(part)
                file.write(packed.getvalue())
        return path

    return write_compressed


def fill_directory(path: Path, values: list[dict[str, Any]] = ROWS) -> Path:
    path.mkdir()
    write_parquet(path / "b.parquet", values[100:200])
    write_jsonl(path / "a.jsonl", values[:100])
    write_csv(path / "c.csv", values[200:])
    (path / "README.md").write_text("not data")
    (path / ".hidden.jsonl").write_text("not data")
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "x.jsonl": write_jsonl,
    "x.ndjson": write_jsonl,
    "x.json": write_array,
    "lines.json": write_jsonl,
    "x.csv": write_csv,
    "x.tsv": write_tsv,
    "x.jsonl.gz": compressed(write_jsonl),
    "x.JSON.GZ": compressed(write_array),
    "x.csv.zst": compressed(write_csv),
    "x.jsonl.zst": compressed(write_jsonl),
    "x.parquet": write_parquet,
    "saved": save_set,
    "splits": save_splits,
    "directory": fill_directory,
}


def values_of(path: Path) -> list[dict[str, object]]:
    return [row.value for row in read_rows(path)]


def refused(path: Path, pattern: str) -> None:
    with pytest.raises(DataError, match=pattern) as caught:
        values_of(path)
    assert str(caught.value).startswith(str(path.parent))


@pytest.mark.parametrize("name", WRITERS)
def test_every_container_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    found = list(read_rows(WRITERS[name](tmp_path / name)))
    assert [row.value for row in found] == ROWS
    shares = [row.share for row in found]
    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1


@pytest.mark.parametrize(
    ("name", "place"),
    [("x.jsonl", "x.jsonl, line 3"), ("x.json", "x.json, row 3"), ("x.parquet", "x.parquet, row 3"), ("x.csv", "x.csv, line 7")],
)
def test_a_row_knows_where_it_stands(name: str, place: str, tmp_path: Path) -> None:
    assert [*read_rows(WRITERS[name](tmp_path / name))][2].place == str(tmp_path / place)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(
    values=st.lists(st.dictionaries(st.text(), JSON_VALUES, max_size=3), min_size=1, max_size=6),
    chunk=st.integers(1, 9),
    escaped=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_array_cut_into_chunks_anywhere(
    values: Any, chunk: int, escaped: bool, indent: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "x.json"
    path.write_bytes(json.dumps(values, ensure_ascii=escaped, indent=indent).encode("utf-8", "surrogatepass" if escaped else "replace"))
    whole = json.loads(path.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "CHUNK_BYTES", chunk)
        assert values_of(path) == whole


@given(values=st.lists(st.dictionaries(st.text(min_size=1), JSON_VALUES, min_size=1, max_size=2), min_size=2, max_size=4), data=st.data())
def test_damaged_array_is_refused_and_never_read_as_something_else(
    values: Any, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cut anywhere, the file is refused; the rows before the cut are those of the whole file."""
    text = json.dumps(values).encode()
    path = tmp_path_factory.mktemp("cut") / "x.json"
    path.write_bytes(text[: data.draw(st.integers(1, len(text) - 1))])
    found: list[object] = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DataError, match=r"x\.json"):
        patch.setattr(rows, "CHUNK_BYTES", 7)
        for row in read_rows(path):
            found.append(row.value)
    assert found == values[: len(found)]


def test_byte_order_mark_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    for name, text in (
        ("a.jsonl", '\n{"text": "a"}\n \n{"text": "b"}\n'),
        ("b.json", ' \n[{"text": "a"}, {"text": "b"}]\n'),
        ("c.csv", "text\na\n\nb\n"),
    ):
        path = tmp_path / name
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert values_of(path) == [{"text": "a"}, {"text": "b"}]


# --- files that are not there, or not what they seem ---


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "polite.jsonl")
    refused(tmp_path / "polit.jsonl", "no such file or directory; did you mean 'polite.jsonl'")
    refused(tmp_path / "zzz" / "x.jsonl", "no such file or directory; give a file or directory that exists")


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.parquet", "x.arrow"])
def test_empty_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    refused(tmp_path / name, "the file is empty; at least one row is needed")


@pytest.mark.parametrize(("name", "text"), [("x.jsonl", "\n \n"), ("x.json", " [ ] "), ("x.csv", "prompt,completion\n")])
def test_file_without_rows(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    refused(tmp_path / name, "the file is empty; at least one row is needed")


def test_unknown_type_and_directory_without_data(tmp_path: Path) -> None:
    (tmp_path / "x.xlsx").write_bytes(b"PK")
    refused(tmp_path / "x.xlsx", "unknown file type '.xlsx'; rename or convert it to one of .jsonl")
    refused(tmp_path, "the directory holds no data file; put files there")
    (tmp_path / "rows").write_bytes(b"{}")
    refused(tmp_path / "rows", "its name has no ending that says what it holds; rename or convert it to one of .jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    refused(tmp_path / "pipe.jsonl", "pipe.jsonl: is neither a file nor a directory but a pipe, .*; write what it holds to a file first")


@pytest.mark.parametrize(("name", "kind"), [("x.jsonl.gz", "gzip"), ("x.jsonl.zst", "zstd")])
def test_a_compressed_file_that_is_broken(name: str, kind: str, tmp_path: Path) -> None:
    """One that is cut off is no shorter file."""
    path = WRITERS[name](tmp_path / name)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    refused(path, f"not a readable {kind} stream .*; fetch or compress the file again")
    path.write_bytes(b"no compressed stream at all")
    refused(path, f"not a readable {kind} stream")
    (tmp_path / f"x.parquet{path.suffix}").write_bytes(whole)
    refused(tmp_path / f"x.parquet{path.suffix}", "unknown file type")


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt", "x.parquet", "x.arrow", "x.jsonl.gz"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LFS, "a Git LFS pointer, not the data that it stands for; run `git lfs pull`"),
        ("\ufeff\n<!DOCTYPE html>\n<html lang='en'>\n<head>", r"a web page \(HTML\), not data; download the file itself"),
        ("<HTML><body>Sign in</body></HTML>", r"a web page \(HTML\)"),
    ],
)
def test_what_stands_in_for_data_is_called_what_it_is(name: str, text: str, said: str, tmp_path: Path) -> None:
    def write(path: Path) -> Path:
        path.write_text(text)
        return path

    refused((compressed(write) if name.endswith(".gz") else write)(tmp_path / name), f"{name}: {said}")


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt", "x.jsonl.gz"])
def test_utf_16_is_called_what_it_is(name: str, tmp_path: Path) -> None:
    """Once, and not as so many rows of broken JSON."""

    def write(path: Path) -> Path:
        path.write_bytes('{"text": "a"}\n'.encode("utf-16"))
        return path

    refused((compressed(write) if name.endswith(".gz") else write)(tmp_path / name), f"{name}: UTF-16, .*; convert it: `iconv -f UTF-16")


def test_an_arrow_file_is_told_from_a_stream_and_how_to_convert_it(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"text": "a"}, {"text": "b"}])
    feather.write_feather(table, tmp_path / "x.arrow", compression="uncompressed")
    refused(tmp_path / "x.arrow", r"an Arrow file \(Feather\), .*pyarrow.parquet.write_table")
    pq.write_table(feather.read_table(tmp_path / "x.arrow"), tmp_path / "y.parquet")
    assert [row.value for row in read_rows(tmp_path / "y.parquet")] == table.to_pylist()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl").chmod(0)
    refused(tmp_path / "x.jsonl", "cannot be read .*check the file and its permissions")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").mkdir()  # a directory of that name
    refused(tmp_path / "x.jsonl", "the directory holds no data file")
    path = write_jsonl(tmp_path / "y.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_blocks_of_lines", lambda file: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
        refused(path, r"cannot be read \(Permission denied\); check the file")


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_not_arrow(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"PAR1 this is no such file, but long enough to be looked at PAR1")
    refused(tmp_path / name, "not a readable (Parquet file|Arrow stream)")


def test_truncated_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet")
    path.write_bytes(path.read_bytes()[:-40])
    refused(path, "not a readable Parquet file .*write it again")


def test_saved_set_with_missing_or_broken_parts(tmp_path: Path) -> None:
    path = save_set(tmp_path / "saved")
    next(path.glob("*.arrow")).unlink()
    refused(path, "a saved set without .*arrow")
    (path / "state.json").write_text("{")
    refused(path, "state.json: broken JSON")
    splits = tmp_path / "two"
    splits.mkdir()
    (splits / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    refused(splits, "its splits are a, b; name one of them")


def test_saved_set_does_not_lead_out_of_its_directory(tmp_path: Path) -> None:
    save_set(tmp_path / "other")
    (tmp_path / "saved").mkdir()
    name = next((tmp_path / "other").glob("*.arrow")).name
    (tmp_path / "saved" / "state.json").write_text(json.dumps({"_data_files": [{"filename": f"../other/{name}"}]}))
    refused(tmp_path / "saved", f"a saved set without .'{name}'")


# --- broken contents ---


@pytest.mark.parametrize(
    ("name", "text", "pattern"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"text": }\n', r"x.jsonl, line 2: broken JSON \(Expecting value.*expected one JSON object a line"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "b"', "x.jsonl, line 2: broken JSON"),
        ("x.jsonl", b'{"text": "a"}\n42\n', r"x.jsonl, line 2: 42 is no JSON object; expected a row"),
        ("x.jsonl", b"[" * 100_000 + b"\n", r"x.jsonl, row 1: JSON nested too deeply"),
        ("x.jsonl", b'{"a":' * 100_000 + b"\n", "x.jsonl, line 1: JSON nested too deeply"),
        ("x.json", b'{\n "text": "a"\n}\n', "x.json, line 1: an object over several lines; .*or one array of objects"),
        ("x.json", b'[{"text": "a"}, {"text": }]', r"x.json, row 2: broken JSON \(Expecting value"),
        ("x.json", b'[{"text": "a"}, {"text": }' + b' {"text": "b"},' * 10_000 + b"]", "x.json, row 2: broken JSON"),
        ("x.json", b'[{"text": "a"} {"text": "b"}]', r"after row 1: broken JSON, '\{' where ',' or '\]' is expected"),
        ("x.json", b'[{"text": "a"}', r"after row 1: broken JSON, the end of the file where ',' or '\]' is expected; is the file cut off"),
        ("x.json", b'[{"text": "a"}, ', "x.json, row 2: broken JSON"),
        ("x.json", b'[{"text": "a"}, {"text": "b', "x.json, row 2: broken JSON .*Unterminated string"),
        ("x.json", b'[{"text": "a"}] x', "after row 1: 'x' follows the array's end; expected one JSON array"),
        (
            "x.jsonl",
            b'{"text": "a"}\n{"text": "a", "text": "b"}\n',
            r"x.jsonl, line 2: the key 'text' stands twice in one object; keep one",
        ),
        ("x.json", b'[{"text": "a"}, {"text": "a", "b": 1, "text": "b"}]', "x.json, row 2: the key 'text' stands twice in one object"),
        ("x.jsonl", b'{"messages": [{"role": "user", "content": "a", "role": "user"}]}\n', "x.jsonl, line 1: the key 'role' stands twice"),
        ("x.json", b'[{"chosen": [{"role": "user", "content": "a", "content": ""}]}]', "x.json, row 1: the key 'content' stands twice"),
        ("x.json", b'["a", "b"]', "x.json, row 1: 'a' is no JSON object"),
        ("x.json", b"[12]", "x.json, row 1: 12 is no JSON object"),
        ("x.csv", b"prompt;completion\n1;2\n", "'prompt;completion' is one column, for commas separate cells here, and not semicolons"),
        ("x.csv", b"a\tb\n1\t2\n", "and not tabs. Save it with commas, or name it .tsv"),
        ("x.tsv", b"a,b\n1,2\n", "for tabs separate cells here, and not commas. Save it with tabs"),
        ("x.csv", b"a,b\n1,2\n1,2,3\n", "x.csv, line 3: 3 cells where the header has 2; quote cells that hold commas"),
        ("x.csv", b'a,b\n1,"2"x\n', "x.csv, line 2: broken CSV"),
        ("x.csv", b'a,b\n1,"2\n', "x.csv, line 2: broken CSV"),
        ("x.csv", b"a,a\n1,2\n", "line 1: the header .* needs a different name for every column"),
    ],
)
def test_broken_text(name: str, text: bytes, pattern: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text)
    refused(tmp_path / name, pattern)


@pytest.mark.parametrize("chunk", [1, 7, 1 << 16])
@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_rows_after_one_with_a_key_twice_are_read(name: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all bad rows are listed, and can be left out."""
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk)
    lines = ['{"text": "a"}', '{"text": {"x": 1, "x": 1}}', '{"text": "b"}', '{"text": "c", "text": "c"}', '{"text": "d"}']
    (tmp_path / name).write_text("\n".join(lines) if name == "x.jsonl" else f"[{', '.join(lines)}]")
    found = [row for block in rows.read_blocks([tmp_path / name]) for row in rows.rows_of(block)]
    assert [row.value["text"] for row in found if isinstance(row, rows.Row)] == ["a", "b", "d"]
    assert [str(row).split(": ")[1].split(" stands")[0] for row in found if isinstance(row, DataError)] == ["the key 'x'", "the key 'text'"]


@pytest.mark.parametrize(
    ("name", "before", "after", "place"),
    [
        ("x.jsonl", b'{"text": "gr\xc3\xbc"}\n{"text": "', b'"}\n', "x.jsonl, line 2, byte "),
        ("x.csv", b"text\nfine\n", b"\n", "x.csv, line 3, byte "),
        ("x.json", b'[{"text": "gr\xc3\xbc"}, {"text": "', b'"}]', "x.json, row 2, byte "),
        ("x.json", b'[{"text": "gr\xc3\xbc"}', b"]", "x.json, after row 1, byte "),
    ],
)
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3(", b"\xed\xa0\x80"])
@pytest.mark.parametrize("chunk", [1, 5, 1 << 16])
def test_not_utf8(
    name: str, before: bytes, after: bytes, place: str, bad: bytes, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk)
    (tmp_path / name).write_bytes(before + bad + after)
    refused(tmp_path / name, re.escape(f"{place}{len(before)}") + ": not UTF-8 .*convert the file to UTF-8")


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    values = pa.array([b"a"] * 70 + [b"\xff"] + [b"b"] * 9).view(pa.binary())
    text = pa.StringArray.from_buffers(80, values.buffers()[1], values.buffers()[2])
    pq.write_table(pa.table({"text": text}), tmp_path / "x.parquet")
    refused(tmp_path / "x.parquet", "x.parquet, row 71: text that is not UTF-8")


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv"])
def test_a_long_row_is_read_and_one_beyond_the_cap_is_not(name: str, tmp_path: Path) -> None:
    long = [{"text": "word " * 200_000, "other": "b"}] * 2
    assert values_of(WRITERS[name].__call__(tmp_path / name, long)) == long  # type: ignore[call-arg]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "MAX_ROW_BYTES", 500_000)
        refused(tmp_path / name, "longer than|field larger than")


def test_unclosed_quote_in_an_array_stops_at_the_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 100_000)
    (tmp_path / "x.json").write_text('[{"text": "a"}, {"text": "' + "b" * 1_000_000)
    refused(tmp_path / "x.json", "row 2: longer than .*or a quote is never closed")
