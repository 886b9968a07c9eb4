"""A warm cache needs no data worker, and whatever decides about tokens makes it needed again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML

from tlora import file_identity
from tlora.data import prepare as prepare_module
from tlora.data.prepare import Prepared, prepare
from tlora.data.request import PrepareRequest
from tlora.job import DataConfig

pytestmark = pytest.mark.usefixtures("forked_children")
DATA = {"path": ["a.jsonl", "b.txt"], "eval_path": "eval.jsonl", "chat_template": "own.jinja"}


@pytest.fixture
def place(tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(file_identity, "_SETTLED_SECONDS", 0.0)
    for name, text in (("a", "Hello there!"), ("eval", "Is it so?")):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{i}?", "completion": text}) + "\n" for i in range(9)))
    (tmp_path / "b.txt").write_text("Some text?\nMore of it.\n")
    (tmp_path / "own.jinja").write_text(CHATML)
    shutil.copytree(tokenizer_path, tmp_path / "tokenizer")
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of workers started so far, as the list's length."""
    begun, start = list[int](), prepare_module.start_worker

    def counted() -> Any:
        begun.append(1)
        return start()

    monkeypatch.setattr(prepare_module, "start_worker", counted)
    return begun


def ask(place: Path, data: dict[str, Any] | None = None, **fields: Any) -> Prepared:
    request = PrepareRequest("job", DataConfig.model_validate(DATA | (data or {})), str(place / "tokenizer"), 1000, place / "cache", place)
    found = prepare([prepare_module.replace(request, **fields)])["job"]
    assert isinstance(found, Prepared), found
    return found


def facts(found: Prepared) -> object:
    return found.train.directory, found.eval and found.eval.directory, found.report, found.eval_report, found.data, found.remade


def test_what_is_known_needs_no_worker(place: Path, started: list[int]) -> None:
    first = ask(place)
    assert len(started) == 1 and facts(ask(place)) == facts(first) and len(started) == 1
    weighted = ask(place, {"path": [{"path": "a.jsonl", "weight": 1}, {"path": "b.txt", "weight": 1}], "eval_seed": 9})
    assert len(started) == 1 and weighted.train.directory == first.train.directory and weighted.train.epoch != first.train.epoch


def rewrite(path: Path) -> None:
    """Other content of the same size, with the modification time put back."""
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"?", b"!"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns


CHANGES: dict[str, Callable[[Path], None]] = {
    "rows": lambda place: rewrite(place / "a.jsonl"),
    "rows of the second source": lambda place: rewrite(place / "b.txt"),
    "rows of the evaluation": lambda place: rewrite(place / "eval.jsonl"),
    "template": lambda place: (place / "own.jinja").write_text(CHATML + "\n") and None,
    "tokenizer": lambda place: os.utime(place / "tokenizer" / "tokenizer.json"),
    "a new file beside the tokenizer": lambda place: (place / "tokenizer" / "chat_template.jinja").touch(),
    "a damaged set": lambda place: rewrite(next((place / "cache").glob("*/meta.json"))),
    "a lost set": lambda place: shutil.rmtree(next((place / "cache").glob("*/meta.json")).parent),
    "a damaged record": lambda place: next((place / "cache" / "known").iterdir()).write_text("[]") and None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_decides_makes_the_worker_needed(change: str, place: Path, started: list[int]) -> None:
    first = ask(place)
    CHANGES[change](place)
    again = ask(place)
    assert len(started) == 2
    same = change.split()[0] not in ("rows", "template")
    assert (facts(again)[:2] == facts(first)[:2]) == same  # type: ignore[index]


@pytest.mark.parametrize("data", [{"max_length": 8}, {"train_on": "all"}, {"format": "prompt_completion", "path": "a.jsonl"}])
def test_other_settings_are_another_request(data: dict[str, Any], place: Path, started: list[int]) -> None:
    first = ask(place)
    other = ask(place, data)
    assert len(started) == 2 and other.train.directory != first.train.directory


def test_files_that_were_just_written_are_not_recorded(place: Path, started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A change within the same tick of the clock would have the same times."""
    monkeypatch.setattr(file_identity, "_SETTLED_SECONDS", 1e9)
    ask(place)
    ask(place)
    assert len(started) == 2 and not (place / "cache" / "known").exists()


@pytest.mark.slow
def test_a_split_of_a_directory_is_asked_for_anew(place: Path, started: list[int]) -> None:
    (place / "splits").mkdir()
    shutil.copy(place / "a.jsonl", place / "splits" / "train.jsonl")
    for _ in range(2):
        ask(place, {"path": "splits", "split": "train"})
    assert len(started) == 2
