"""Tokenizing on several cores: the same bytes as on one, and a process that is killed costs its job alone."""

from __future__ import annotations

import json
import os
import signal
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML

from tlora.data import encoded_blocks
from tlora.data.build import SetSpec, build, hash_file
from tlora.data.encode import open_encoder
from tlora.data.sources import Source, list_files
from tlora.errors import DataError


def chat(number: int, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": answer}]


KINDS: dict[str, tuple[str, Any]] = {
    "chats": ("samples", lambda i, text: {"messages": chat(i, text), "note": i}),
    "text": ("samples", lambda i, text: {"text": f"{i} {text}"}),
    "token ids": ("samples", lambda i, text: {"input_ids": [5, 6, i % 90 + 7]}),
    "pairs": ("pairs", lambda i, text: {"prompt": f"What is {i}?", "chosen": text, "rejected": f"{i}" if i % 3 else text}),
    "labelled": ("labelled", lambda i, text: {"prompt": f"What is {i}?", "completion": text, "label": i % 2 == 0}),
}


@pytest.fixture
def three_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded_blocks, "num_cores", lambda: 3)
    monkeypatch.setattr(encoded_blocks, "BYTES_A_PROCESS", 1)


def make(path: Path, tokenizer: Any, cache: str, rows: Any = "samples", drop: bool = False) -> dict[str, bytes]:
    """The files of the set that is made of `path`."""
    order = SetSpec((Source(str(path), tuple(list_files(path))),), "auto", 24, path.parent / cache, rows, None, drop)
    beats: list[int] = []
    encoder = open_encoder(tokenizer, None, False, 1000)
    directory, _ = build(order, encoder, lambda file: hash_file(file, lambda *_: None), lambda count, _: beats.append(count))
    assert beats == sorted(beats) and len(beats) > 1 and not active_children()
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bytes_as_on_one_core(
    kind: str, tmp_path: Path, tokenizers: Any, chatter: Any, three_processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bad rows between the good ones, some that cannot be read and some that cannot be encoded."""
    rows, row = KINDS[kind]
    lines = [json.dumps(row(i, chatter(i))) for i in range(700)]
    for place in (0, 130, 131, 600):
        lines[place] = '{"broken": ' if place % 2 else '{"other": 3}'
    path = tmp_path / "x.jsonl"
    path.write_text("\n\n".join(lines))
    pools: list[int] = []
    submit = encoded_blocks.open_pool

    def noted(*arguments: Any) -> Any:
        pools.append(arguments[0])
        return submit(*arguments)

    monkeypatch.setattr(encoded_blocks, "open_pool", noted)
    many = make(path, tokenizers(CHATML), "many", rows, drop=True)
    with pytest.raises(DataError) as listed:
        make(path, tokenizers(CHATML), "many", rows)
    assert pools == [3, 3]
    monkeypatch.setattr(encoded_blocks, "num_cores", lambda: 1)
    assert make(path, tokenizers(CHATML), "one", rows, drop=True) == many
    with pytest.raises(DataError) as alone:
        make(path, tokenizers(CHATML), "one", rows)
    assert str(alone.value) == str(listed.value) and "4 of 700 rows are bad" in str(alone.value)
    assert pools == [3, 3]


def test_a_killed_process_is_told_and_the_next_set_is_made(
    tmp_path: Path, tokenizers: Any, three_processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, encode = tmp_path / "x.jsonl", encoded_blocks.encode_block
    path.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(700)))

    def die(recipe: encoded_blocks.Recipe, task: encoded_blocks.Task) -> encoded_blocks.EncodedBlock:
        if task.block.before == 384:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(recipe, task)

    with monkeypatch.context() as patch:
        patch.setattr(encoded_blocks, "encode_block", die)
        with pytest.raises(DataError, match=r"x.jsonl: one of 3 processes that tokenize was killed by signal 9.*taskset"):
            make(path, tokenizers(CHATML), "cache")
    assert not active_children()
    assert make(path, tokenizers(CHATML), "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_panic_of_the_tokenizer_is_the_jobs_error(
    tmp_path: Path, tokenizers: Any, three_processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no Exception, and its class cannot be sent to another process."""

    def panic(*_: object) -> None:
        raise type("PanicException", (BaseException,), {})("index out of bounds")

    monkeypatch.setattr(encoded_blocks, "encode_block", panic)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n' * 400)
    with pytest.raises(DataError, match=r"x.jsonl: PanicException: index out of bounds"):
        make(tmp_path / "x.jsonl", tokenizers(CHATML), "cache")


def test_small_data_takes_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded_blocks, "num_cores", lambda: 4)
    size = encoded_blocks.BYTES_A_PROCESS
    assert [encoded_blocks.num_processes(size * n) for n in (0, 1, 3, 90)] == [1, 1, 3, 4]
