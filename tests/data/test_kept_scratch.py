"""A launch that ends while it tokenizes leaves what is done to the next one, whose set has the bytes of one that was made in one go."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import CHATML

from tlora.data import build as build_module
from tlora.data import dataset as dataset_module
from tlora.data import encoded_blocks, scratch
from tlora.data.build import SetSpec, build, hash_file
from tlora.data.encode import open_encoder
from tlora.data.encoded_blocks import EncodedBlock, Recipe, Task
from tlora.data.sources import Source
from tlora.errors import DataError

ROWS = 1000  # of each source, in eight blocks of lines


@pytest.fixture(autouse=True)
def save_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "SAVE_SECONDS", 0.0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The blocks that are tokenized: file and rows before."""
    blocks: list[str] = []
    encode = build_module.encode_blocks

    def noted(recipe: Recipe, tasks: Iterator[Task], processes: int) -> Iterator[EncodedBlock]:
        def note() -> Iterator[Task]:
            for task in tasks:
                blocks.append(f"{task.block.file.stem} {task.block.before}")
                yield task

        return encode(recipe, note(), processes)

    monkeypatch.setattr(build_module, "encode_blocks", noted)
    return blocks


@pytest.fixture
def order(tmp_path: Path, chatter: Callable[[int], str]) -> SetSpec:
    """Of two sources, with bad rows of both kinds in each, some of them in the first blocks."""
    for name in ("x", "y"):
        lines = [json.dumps({"text": f"{name} {i} {chatter(i)}", "note": i}) for i in range(ROWS)]
        for place in (3, 4, 300, 900):
            lines[place] = '{"broken": ' if place % 2 else '{"text": 3}'
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    sources = tuple(Source(name, (tmp_path / name,)) for name in ("x.jsonl", "y.jsonl"))
    return SetSpec(sources, "auto", 12, tmp_path / "cache", drop_bad_rows=True)


def make(order: SetSpec, tokenizer: Any, until: int | None = None) -> dict[str, bytes]:
    """The files of the set; Ctrl-C comes once `until` rows are read."""

    def beat(rows: int, _share: float) -> None:
        if until is not None and rows >= until:
            raise KeyboardInterrupt

    directory, _ = build(order, open_encoder(tokenizer, None, False, 1000), lambda file: hash_file(file, lambda *_: None), beat)
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def interrupt(order: SetSpec, tokenizer: Any, rows: int) -> Path:
    """The directory that is kept."""
    with pytest.raises(KeyboardInterrupt):
        make(order, tokenizer, rows)
    (kept,) = order.cache_dir.iterdir()
    return kept


def in_one_go(order: SetSpec, tokenizer: Any) -> dict[str, bytes]:
    return make(replace(order, cache_dir=order.cache_dir.with_name("whole")), tokenizer)


@pytest.mark.parametrize(
    ("after", "processes"),
    [
        pytest.param([1], 1, marks=pytest.mark.slow),
        ([128, 900], 3),
        ([1000], 1),
        pytest.param([1001, 1002, 1900], 1, marks=pytest.mark.slow),
        pytest.param([1001, 1002, 1900], 3, marks=pytest.mark.slow),
        pytest.param([2000], 1, marks=pytest.mark.slow),
    ],
)
def test_the_same_bytes_as_without_an_interruption(
    after: list[int], processes: int, order: SetSpec, tokenizers: Any, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the first block, between, at the end of a source and of all; twice and three times."""
    monkeypatch.setattr(build_module, "num_processes", lambda _: processes)
    whole, blocks = in_one_go(order, tokenizers(CHATML)), list(made)
    report = json.loads(whole["meta.json"])["report"]
    assert report["dropped"] == 8 and len(report["bad_rows"]) == 8 and len(blocks) == 16
    for rows in after:
        interrupt(order, tokenizers(CHATML), rows)
    made.clear()
    assert make(order, tokenizers(CHATML)) == whole
    first = sum(min(ROWS, after[-1] - before) > place for before in (0, ROWS) for place in range(0, ROWS, 128))
    assert made == blocks[first:]
    assert [path.name for path in order.cache_dir.iterdir()] == [path.name for path in order.cache_dir.with_name("whole").iterdir()]


def test_bad_rows_are_listed_as_without_an_interruption(order: SetSpec, tokenizers: Any) -> None:
    order = replace(order, drop_bad_rows=False)
    with pytest.raises(DataError) as whole:
        in_one_go(order, tokenizers(CHATML))
    interrupt(order, tokenizers(CHATML), 1500)
    with pytest.raises(DataError) as found:
        make(order, tokenizers(CHATML))
    assert str(found.value) == str(whole.value) and "8 of 2,000 rows are bad" in str(found.value)
    assert list(order.cache_dir.iterdir()) == [], "the rows have to be mended: nothing of it is used again"


@pytest.mark.parametrize("name", ["x.json", "x.csv", "x.parquet", "pairs.jsonl"])
def test_other_files(name: str, tmp_path: Path, tokenizers: Any, chatter: Callable[[int], str]) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"What is {i}?", "completion": chatter(i)} for i in range(500)]
    path = tmp_path / name
    if name == "pairs.jsonl":
        pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": str(i)} for i, row in enumerate(rows)]
        path.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    elif name.endswith("json"):
        path.write_text(json.dumps(rows))
    elif name.endswith("csv"):
        path.write_text("prompt,completion\n" + "".join(f'"{row["prompt"]}","{row["completion"]}"\n' for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    kind = "pairs" if name == "pairs.jsonl" else "samples"
    order = SetSpec((Source(name, (path,)),), "auto", 24, tmp_path / "cache", kind)  # type: ignore[arg-type]
    whole = in_one_go(order, tokenizers(CHATML))
    assert ("sequence_ends.npy" in whole) == (kind == "pairs")
    interrupt(order, tokenizers(CHATML), 200)
    assert make(order, tokenizers(CHATML)) == whole


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_file(name: str, change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda kept: change(kept / name)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "tokens": damage_file("tokens.bin", flip),
    "weights": damage_file("weights.bin", flip),
    "lengths": damage_file("lengths.bin", flip),
    "sums": damage_file("trained.bin", flip),
    "cut": damage_file("tokens.bin", lambda path: os.truncate(path, path.stat().st_size - 4)),
    "gone": damage_file("weights.bin", Path.unlink),
    "progress": damage_file("progress.json", flip),
    "half a progress": damage_file("progress.json", lambda path: os.truncate(path, path.stat().st_size // 2)),
    "an empty progress": damage_file("progress.json", lambda path: os.truncate(path, 0)),
    "a directory": lambda kept: ((kept / "tokens.bin").unlink(), (kept / "tokens.bin").mkdir()),
    "another launch's": lambda kept: (kept / "tokens.bin").write_bytes((kept / "weights.bin").read_bytes()),
}


IN_EVERY_RUN = ("tokens", "half a progress")


@pytest.mark.parametrize("damage", [pytest.param(each, marks=() if each in IN_EVERY_RUN else pytest.mark.slow) for each in DAMAGE])
def test_what_is_damaged_is_made_again(damage: str, order: SetSpec, tokenizers: Any, made: list[str]) -> None:
    whole, blocks = in_one_go(order, tokenizers(CHATML)), list(made)
    DAMAGE[damage](interrupt(order, tokenizers(CHATML), 700))
    made.clear()
    assert make(order, tokenizers(CHATML)) == whole and made == blocks


def touch(order: SetSpec, _: pytest.MonkeyPatch) -> SetSpec:
    os.utime(order.files[0], ns=(1, 1))
    return order


def rename(order: SetSpec, _: pytest.MonkeyPatch) -> SetSpec:
    """Messages about rows name the file."""
    moved = order.files[0].rename(order.files[0].with_name("z.jsonl"))
    return replace(order, sources=(Source("z.jsonl", (moved,)), order.sources[1]))


def edit(order: SetSpec, _: pytest.MonkeyPatch) -> SetSpec:
    text = order.files[0].read_text()
    order.files[0].write_text(text.replace("x 0", "x 7"))
    return order


def update(order: SetSpec, monkeypatch: pytest.MonkeyPatch) -> SetSpec:
    monkeypatch.setattr(build_module, "version", lambda name: version(name) + ".1")
    return order


@pytest.mark.parametrize("change", [edit, *(pytest.param(each, marks=pytest.mark.slow) for each in (touch, rename, update))])
def test_what_has_changed_is_made_anew(
    change: Callable[[SetSpec, pytest.MonkeyPatch], SetSpec],
    order: SetSpec,
    tokenizers: Any,
    made: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupt(order, tokenizers(CHATML), 700)
    order = change(order, monkeypatch)
    made.clear()
    found = make(order, tokenizers(CHATML))
    assert len(made) == 16 and found == in_one_go(order, tokenizers(CHATML))


HOLD = """
import sys
from pathlib import Path
from tlora.data.scratch import Scratch
held = Scratch(Path(sys.argv[1]), keep=True)
print(held.path.name, flush=True)
sys.stdin.read()
"""


def test_two_at_a_time_do_not_share_a_directory(order: SetSpec, tokenizers: Any, made: list[str]) -> None:
    whole, blocks = in_one_go(order, tokenizers(CHATML)), list(made)
    kept = interrupt(order, tokenizers(CHATML), 700)
    before = {path.name: path.read_bytes() for path in kept.iterdir() if path.name != "lock"}
    final = order.cache_dir / kept.name.removeprefix("tmp-set-")
    command = [sys.executable, "-c", HOLD, str(final)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline().strip() == kept.name
        made.clear()
        assert make(order, tokenizers(CHATML)) == whole and made == blocks
        age(kept, 2 * scratch.KEPT_SECONDS)
        scratch.remove_old(order.cache_dir)
        assert {path.name: path.read_bytes() for path in kept.iterdir() if path.name != "lock"} == before
        other.kill()
    (order.cache_dir / final.name).rename(order.cache_dir.with_name("away"))
    made.clear()
    assert make(order, tokenizers(CHATML)) == whole and made == blocks[6:]
    assert [path.name for path in order.cache_dir.iterdir()] == [final.name]


def age(path: Path, seconds: float) -> None:
    past = path.stat().st_mtime - seconds
    os.utime(path, (past, past))


def test_what_no_launch_comes_back_for_is_removed_after_a_week(order: SetSpec, tokenizers: Any, made: list[str]) -> None:
    kept = interrupt(order, tokenizers(CHATML), 700)
    age(kept, 2 * scratch.STALE_SECONDS)
    scratch.remove_old(order.cache_dir)
    assert kept.exists()
    age(kept, scratch.KEPT_SECONDS)
    scratch.remove_old(order.cache_dir)
    assert list(order.cache_dir.iterdir()) == []


def test_a_killed_process_of_the_pool_keeps_what_is_done(
    order: SetSpec, tokenizers: Any, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "num_processes", lambda _: 3)
    whole, encode = in_one_go(order, tokenizers(CHATML)), encoded_blocks.encode_block

    def die(recipe: Recipe, task: Task) -> EncodedBlock:
        if task.block.file.stem == "y" and task.block.before == 896:
            os._exit(3)
        return encode(recipe, task)

    with monkeypatch.context() as patch:
        patch.setattr(encoded_blocks, "encode_block", die)
        with pytest.raises(DataError, match=r"y.jsonl: one of 3 processes that tokenize ended with exit status 3"):
            make(order, tokenizers(CHATML))
    made.clear()
    assert make(order, tokenizers(CHATML)) == whole
    assert 1 <= len(made) <= 8 and all(block.startswith("y ") for block in made)


def test_another_program_that_writes_meanwhile_is_an_error(order: SetSpec, tokenizers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another host may, on a file system whose locks hold on one host only."""
    fill = build_module._fill

    def spoil(*arguments: Any) -> Any:
        report = fill(*arguments)
        (kept,) = order.cache_dir.iterdir()
        arguments[0].save(dict)
        flip(kept / "weights.bin")
        return report

    monkeypatch.setattr(build_module, "_fill", spoil)
    with pytest.raises(DataError, match=r"tmp-set-.*: another program has written to these files while they were made; start again"):
        make(order, tokenizers(CHATML))
    assert list(order.cache_dir.iterdir()) == []


@pytest.mark.slow
def test_another_number_of_processes_continues(order: SetSpec, tokenizers: Any, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, blocks = in_one_go(order, tokenizers(CHATML)), list(made)
    for processes, rows in ((3, 300), (1, 1200), (2, 1500)):
        monkeypatch.setattr(build_module, "num_processes", lambda _, processes=processes: processes)
        interrupt(order, tokenizers(CHATML), rows)
    made.clear()
    assert make(order, tokenizers(CHATML)) == whole and made == blocks[12:]


def test_a_directory_of_another_user_is_left_alone(order: SetSpec, tokenizers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cache that several share. The tests may run as root, which may open everything."""
    whole = in_one_go(order, tokenizers(CHATML))
    kept = interrupt(order, tokenizers(CHATML), 700)
    age(kept, 2 * scratch.KEPT_SECONDS)
    real = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path) == kept / "lock":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    scratch.remove_old(order.cache_dir)
    assert make(order, tokenizers(CHATML)) == whole
    assert (kept / "progress.json").exists() and len(list(order.cache_dir.iterdir())) == 2
