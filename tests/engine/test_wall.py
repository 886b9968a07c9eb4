"""Whatever a step of one job raises is its failure: each step is made to raise for one of three jobs, and the others end as alone."""

from __future__ import annotations

import errno
import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.tiny_runs import job, sha256, train
from tlora import durable
from tlora.adapters.bank import AdapterBank
from tlora.adapters.state import AdapterState
from tlora.engine import job_opening as admission
from tlora.engine.watcher import Watcher
from tlora.errors import CapacityError, CheckpointError, DataError
from tlora.group.isolation import Failure, is_out_of_memory, try_call
from tlora.planning import job_plan, start
from tlora.store import checkpoint
from tlora.store import recorder as recorder_room
from tlora.store.recorder import Recorder
from tlora.supermodel.supermodel import SuperModel


def test_what_a_step_gives_or_why_it_does_not() -> None:
    assert try_call(divmod, 7, 2) == (3, 1)
    failed = try_call(divmod, 7, 0)
    assert isinstance(failed, Failure) and failed.reason.startswith("ZeroDivisionError: ")
    assert Failure(DataError("row 3 is empty")).reason == "row 3 is empty"
    assert Failure(MemoryError()).reason == "MemoryError"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_failure(error: type[BaseException]) -> None:
    def step() -> None:
        raise error

    with pytest.raises(error):
        try_call(step)


class Panic(BaseException):
    """As a library in Rust raises it."""


def test_a_panic_is_a_failure_and_nothing_that_the_step_held_lives_on() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        activations = torch.zeros(10)
        held.append(weakref.ref(activations))
        raise Panic("index out of bounds")

    failed = try_call(step)
    gc.collect()
    assert isinstance(failed, Failure) and failed.reason == "Panic: index out of bounds"
    assert held[0]() is None


def test_what_is_out_of_memory() -> None:
    for take in (lambda: torch.empty(1 << 60), lambda: np.empty(1 << 56), lambda: bytearray(1 << 60)):
        failed = try_call(take)
        assert isinstance(failed, Failure) and is_out_of_memory(failed.error), failed
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")) and is_out_of_memory(OSError(12, "Cannot allocate memory"))
    for error in (
        RuntimeError("shapes do not match"),
        OSError(28, "No space left"),
        CapacityError("needs 9 GiB"),
        ValueError("out of memory"),
    ):
        assert not is_out_of_memory(error), error


def raise_for_victim(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, is_victim: Callable[..., bool], error: BaseException) -> None:
    real = getattr(place, name)

    def step(*args: Any, **kwargs: Any) -> Any:
        if is_victim(*args):
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(place, name, step)


BUG, NO_MEMORY = TypeError("a bug"), MemoryError("no memory")
STEPS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "planning": (SuperModel, "layout", lambda _, spec: getattr(spec, "name", "") == "victim"),
    "length": (job_plan, "_check_length", lambda job, _: job.spec.name == "victim"),
    "directory": (durable, "make_directory", lambda path: path.name == "victim"),
    "job.json": (admission, "write_job_file", lambda directory, _: directory.name == "victim"),
    "start": (start, "init_state", lambda layout, *_: layout.largest_rank == 5),
    "recorder": (Recorder, "__init__", lambda _, run, *__: run.spec.name == "victim"),
    "join": (SuperModel, "join", lambda _, name, *__: name == "victim"),
    "end": (checkpoint, "save", lambda path, *_: path.parent.name == "victim"),
    "export": (checkpoint, "export", lambda _, path: path.name == "victim"),
    "leaving": (AdapterState, "on_host", lambda state: state.layout.largest_rank == 5 and state.step > 0),
    "download": (recorder_room.Snapshot, "on_host", lambda moment: moment.state.layout.largest_rank == 5),
}


def steps_and_errors() -> Iterator[Any]:
    """Each step with one of the errors, in turns; with the others in the full matrix."""
    for number, step in enumerate(STEPS):
        for other, (kind, error) in enumerate({"bug": BUG, "memory": NO_MEMORY, "panic": Panic("out of bounds")}.items()):
            marks = [pytest.mark.soak] if (number + other) % 3 else [pytest.mark.slow] if number % 3 else []
            yield pytest.param(step, error, id=f"{step}-{kind}", marks=marks)


@pytest.mark.parametrize(("step", "error"), list(steps_and_errors()))
def test_a_step_that_raises_fails_its_job_alone(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: dict[str, str], step: str, error: BaseException
) -> None:
    left, right = beside(data)
    victim = job("victim", str(data / "d.jsonl"), r=5, max_steps=2)
    with monkeypatch.context() as patch:
        raise_for_victim(patch, *STEPS[step], error)
        results = train(base, tmp_path / "out", [left, victim, right], deterministic=True)
    assert results["victim"].status == "failed" and str(error) in results["victim"].reason, results["victim"]
    assert {name: sha256(tmp_path / "out" / name) for name in others} == others
    again = train(base, tmp_path / "out", [left, victim, right], deterministic=True, resume=True)
    assert again["victim"].status == "done", again["victim"]


def beside(data: Path) -> list[dict[str, Any]]:
    return [job("left", str(data / "a.jsonl"), max_steps=3), job("right", str(data / "b.jsonl"), max_steps=2)]


@pytest.fixture(scope="module")
def others(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("others")
    train(base, out, beside(data), deterministic=True)
    return {name: sha256(out / name) for name in ("left", "right")}


@pytest.mark.parametrize("step", ["_snapshot", "_write_checkpoint"])
def test_writing_a_failure_may_fail_too(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: dict[str, str], step: str
) -> None:
    """The step raises, then there is no memory to save its state, and then none for its result."""
    left, right = beside(data)
    raise_for_victim(monkeypatch, AdapterBank, "take_grad", lambda _, name: name == "victim", BUG)
    raise_for_victim(monkeypatch, Recorder, step, lambda recorder, *_: recorder._run.spec.name == "victim", NO_MEMORY)
    raise_for_victim(
        monkeypatch, durable, "write_file", lambda path, _: path.parent.name == "victim" and path.name == "result.json", NO_MEMORY
    )
    notes: list[str] = []
    results = train(
        base, tmp_path / "out", [left, job("victim", str(data / "d.jsonl")), right], deterministic=True, watcher=Watcher(note=notes.append)
    )
    assert results["victim"].reason == "TypeError: a bug; its state could not be saved (MemoryError: no memory)"
    assert any("result.json: MemoryError: no memory" in note for note in notes), notes
    assert {name: sha256(tmp_path / "out" / name) for name in others} == others


@pytest.mark.parametrize("step", [1, 3], ids=["a checkpoint that is due", "the last one"])
def test_an_interrupt_while_a_job_is_written_ends_the_run(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """With no thread to write in, the main thread writes: a second Ctrl-C meets it there."""

    def write(_: object, job_name: str, action: Callable[[], object]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)
        return future

    monkeypatch.setattr(recorder_room.Writer, "write", write)
    raise_for_victim(monkeypatch, checkpoint, "save", lambda path, *_: path.name == f"checkpoint-{step}", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train(base, tmp_path / "out", [job("a", str(data / "a.jsonl"), save_steps=1, max_steps=3)])


@pytest.mark.parametrize(
    ("bug", "why"),
    [
        (Panic("out of bounds"), "Panic: out of bounds; its state could not be saved (no space)"),
        (None, "no space; its state could not be saved"),
    ],
)
def test_the_way_out_of_a_full_disk_may_fail_too(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: dict[str, str], bug: Panic | None, why: str
) -> None:
    """The last checkpoint finds no space, and saving its adapter alone meets a bug, or finds none either: then that is said once."""
    left, right = beside(data)
    full = CheckpointError("no space")
    full.errno = errno.ENOSPC
    raise_for_victim(monkeypatch, checkpoint, "save", lambda path, *_: path.parent.name == "victim", full)
    raise_for_victim(monkeypatch, checkpoint, "save_alone", lambda path, *_: path.name == "victim", bug or full)
    results = train(base, tmp_path / "out", [left, job("victim", str(data / "d.jsonl"), max_steps=2), right], deterministic=True)
    assert results["victim"].reason == f"{why}; nothing of victim was saved, --resume begins at step 0"
    assert {name: sha256(tmp_path / "out" / name) for name in others} == others


def test_a_model_card_that_cannot_be_made_costs_a_note(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_for_victim(monkeypatch, recorder_room, "model_card", lambda *_: True, BUG)
    notes: list[str] = []
    results = train(base, tmp_path / "out", [job("a", str(data / "a.jsonl"), max_steps=1)], watcher=Watcher(note=notes.append))
    assert results["a"].status == "done"
    assert f"{tmp_path / 'out' / 'a' / 'README.md'}: TypeError: a bug" in notes
