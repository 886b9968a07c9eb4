"""A disk that fills up while a run goes on: what it still must write has a place, nothing of value goes, and it is said once."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny_runs import job, sha256, train
from tests.small_disks import mounted
from tlora import durable
from tlora.engine.watcher import RunProgress, Watcher
from tlora.errors import CheckpointError
from tlora.store import full_disk as reserve
from tlora.store.full_disk import Backoff, DiskReserve

FULL = CheckpointError("cannot write there: No space left on device. Remedy: free some")


def reserved(directory: Path) -> list[int]:
    return [path.stat().st_size for path in directory.iterdir() if durable.is_leftover(path)]


def test_the_reserve_is_what_the_jobs_left_will_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = DiskReserve(tmp_path, {"a": 30_000, "b": 50_000, "c": 20_000}, print)
    (path,) = tmp_path.iterdir()
    assert reserved(tmp_path) == [100_000] and path.stat().st_blocks * 512 >= 100_000  # not a hole
    kept.ended("a")
    assert reserved(tmp_path) == [70_000]
    assert kept.release("b", 45_000) and reserved(tmp_path) == [25_000]
    kept.ended("b")
    assert reserved(tmp_path) == [20_000]
    assert kept.release("c", 45_000) and reserved(tmp_path) == []
    assert not kept.release("c", 1)
    kept.close()
    monkeypatch.setattr(reserve, "_MOST_BYTES", 60_000)
    for needs, size in (({"a": 50_000, "b": 50_000}, 60_000), ({"a": 90_000, "b": 50_000}, 90_000)):  # the cap, or the largest job's
        kept = DiskReserve(tmp_path, needs, print)
        assert reserved(tmp_path) == [size]
        kept.close()
        assert reserved(tmp_path) == []


def test_a_disk_without_room_has_no_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(tmp_path / "disk", "size=200k") as disk:
        kept = DiskReserve(disk, {"a": 1_000_000}, print)
        assert reserved(disk) == [100 << 10]  # half of what is free
        kept.close()

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    kept = DiskReserve(tmp_path, {"a": 1000}, print)
    assert reserved(tmp_path) == [] and not kept.release("a", 10)
    kept.ended("a")


def test_a_full_disk_is_said_once_until_it_is_not_full(tmp_path: Path) -> None:
    notes: list[str] = []
    kept = DiskReserve(tmp_path, {"a": 3 << 20}, notes.append)
    kept.full(FULL)
    kept.full(FULL)
    assert len(notes) == 1 and "No space left on device" in notes[0] and "3.0 MiB are kept back" in notes[0]
    kept.saved()
    kept.full(FULL)
    assert len(notes) == 2
    kept.close()


def wait_for_writes() -> None:
    for thread in threading.enumerate():
        if thread.name == "writer":
            thread.join()


class Ballast:
    """Somebody else's file, which takes all the space that there is."""

    def __init__(self, disk: Path) -> None:
        self._path = disk / "ballast"

    def grow(self, leave: int = 0) -> None:
        wait_for_writes()  # what one in between leaves behind, or removes, would be space again
        with self._path.open("ab", buffering=0) as file:
            for size in (1 << 16, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
            file.truncate(file.seek(0, os.SEEK_END) - leave)

    def remove(self) -> None:
        wait_for_writes()
        self._path.unlink()


def full_from(step: int, then: Callable[[], None]) -> Callable[[RunProgress], None]:
    """Calls `then` once, when a job has taken `step` steps."""
    left = [then]

    def look(state: RunProgress) -> None:
        if left and any(seen.step >= step for seen in state.jobs):
            left.pop()()

    return look


def look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlora.engine.run_monitor._SHOW_SECONDS", 0.0)


@pytest.fixture
def orders(data: Path) -> list[dict[str, Any]]:
    """Saves at every step; one hands over its last step, one its best."""
    own = {"path": str(data / "a.jsonl"), "eval_path": str(data / "held-out.jsonl")}
    best = {"eval_steps": 1, "load_best_model_at_end": True}
    return [
        job("last", str(data / "a.jsonl"), r=64, save_steps=1, max_steps=8),
        job("best", own, r=16, save_steps=1, max_steps=8, learning_rate=1e-3, **best),
    ]


def test_the_last_save_has_a_place_on_a_full_disk(
    base: Path, orders: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(base, tmp_path / "whole", orders, deterministic=True)
    look_always(monkeypatch)
    with mounted(tmp_path / "disk", "size=40m") as disk:
        ballast, notes, out = Ballast(disk), list[str](), disk / "out"
        watcher = Watcher(full_from(3, ballast.grow), notes.append)
        results = train(base, out, orders, deterministic=True, watcher=watcher)
        assert [(r.status, r.reason) for r in results.values()] == [("done", "")] * 2, results
        for name in results:
            assert sha256(out / name) == sha256(tmp_path / "whole" / name)
            assert all(durable.verify(kept) is None for kept in (out / name).glob("checkpoint-*"))
        assert sorted(path.name for path in (out / "last").glob("checkpoint-*"))[-1] == "checkpoint-8"
        assert sum("are kept back for the jobs' last ones" in note for note in notes) >= 1
        assert sum("goes where room was kept for it" in note for note in notes) >= 2
        assert not reserved(out)


@pytest.fixture
def three(data: Path) -> list[dict[str, Any]]:
    """Adapters of 0.5 MB, checkpoints of 1.4 MB."""
    return [job(name, str(data / f"{name}.jsonl"), r=64, save_steps=1, max_steps=5) for name in ("a", "c", "d")]


@pytest.mark.slow
def test_older_checkpoints_go_before_an_adapter_does(base: Path, three: list[dict[str, Any]], tmp_path: Path) -> None:
    """The two checkpoints of each of three jobs have no room on this disk. What a resume needs stays to the end."""
    train(base, tmp_path / "whole", three, deterministic=True)
    notes: list[str] = []
    with mounted(tmp_path / "disk", "size=8m") as disk:
        results = train(base, disk / "out", three, deterministic=True, watcher=Watcher(None, notes.append))
        assert [(r.status, r.reason) for r in results.values()] == [("done", "")] * 3, (results, notes)
        for name in results:
            assert sha256(disk / "out" / name) == sha256(tmp_path / "whole" / name)
            assert all(durable.verify(kept) is None for kept in (disk / "out" / name).glob("checkpoint-*"))


def test_what_may_go_and_in_which_order(tmp_path: Path) -> None:
    kept = DiskReserve(tmp_path, {}, print)
    for name in ("going on", "done", "unknown"):
        for step in (1, 2, 3, 4):
            durable.make_directory(tmp_path / name)
            durable.write_directory(tmp_path / name / f"checkpoint-{step}", lambda d: (d / "weights").write_bytes(b"w") and None)
    kept.keep(tmp_path / "going on", {"checkpoint-2", "checkpoint-4"})
    kept.keep(tmp_path / "done", {"checkpoint-4"}, ended=True)

    def left() -> dict[str, list[str]]:
        return {path.name: sorted(each.name[-1] for each in path.iterdir()) for path in sorted(tmp_path.iterdir())}

    assert "no resume needs" in kept.remove_older()
    assert left() == {"done": ["4"], "going on": ["2", "4"], "unknown": ["1", "2", "3", "4"]}
    assert "jobs that are done" in kept.remove_older()
    assert left() == {"done": [], "going on": ["2", "4"], "unknown": ["1", "2", "3", "4"]}
    assert kept.remove_older() == ""
    kept.keep(tmp_path / "going on", {"checkpoint-4"})
    kept.forget(tmp_path / "going on")  # another process may have it
    assert kept.remove_older() == "" and left()["going on"] == ["2", "4"]


def test_a_save_that_needs_kept_room_is_alone(tmp_path: Path) -> None:
    kept, order = DiskReserve(tmp_path, {}, print), list[str]()
    begun, go = threading.Event(), threading.Event()

    def save() -> None:
        with kept.saving():
            begun.set()
            assert go.wait(600)
            order.append("saved")

    def save_alone() -> None:
        with kept.saving_alone():
            order.append("saved alone")

    threads = [threading.Thread(target=action) for action in (save, save_alone)]
    threads[0].start()
    assert begun.wait(600)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join(600)
    assert order == ["saved", "saved alone"]


@pytest.mark.slow
def test_an_adapter_is_saved_where_its_last_checkpoint_has_no_room(
    base: Path, three: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_always(monkeypatch)
    monkeypatch.setattr(DiskReserve, "_allocate", lambda self, wanted: 0)
    order = {**three[0], "save_total_limit": 1, "max_steps": 8}
    train(base, tmp_path / "whole", [order], deterministic=True)
    with mounted(tmp_path / "disk", "size=40m") as disk:
        ballast, notes = Ballast(disk), list[str]()
        watcher = Watcher(full_from(3, lambda: ballast.grow(leave=400_000)), notes.append)
        result = train(base, disk / "out", [order], deterministic=True, watcher=watcher)["a"]
        assert (result.status, result.reason) == ("done", "")
        assert sha256(disk / "out" / "a") == sha256(tmp_path / "whole" / "a")
        (left,) = (disk / "out" / "a").glob("checkpoint-*")
        durable.verify(left)
        assert left.name != "checkpoint-8" and sum("its adapter is saved, its last checkpoint is not" in note for note in notes) == 1
        assert not [path for path in (disk / "out" / "a").iterdir() if durable.is_leftover(path)]
        ballast.remove()
        again = train(base, disk / "out", [order], deterministic=True, resume=True)["a"]
        assert again == result and sha256(disk / "out" / "a") == sha256(tmp_path / "whole" / "a"), "and stays done"
        longer = [{**order, "max_steps": 10}]
        whole = train(base, tmp_path / "longer", longer, deterministic=True)["a"]
        again = train(base, disk / "out", longer, deterministic=True, resume=True)["a"]
        assert again.steps == whole.steps == 10 and (disk / "out" / "a" / "checkpoint-10").is_dir(), "from the checkpoint before"


def test_a_checkpoint_is_tried_again_when_the_next_is_due(
    base: Path, orders: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full at step 2, free again at step 5: the steps between go without, said once, and resume would go on from the last."""
    look_always(monkeypatch)
    with mounted(tmp_path / "disk", "size=40m") as disk:
        ballast, notes, saved = Ballast(disk), list[str](), dict[int, list[str]]()
        fill, free = full_from(2, ballast.grow), full_from(5, ballast.remove)

        def look(state: RunProgress) -> None:
            fill(state)
            free(state)
            wait_for_writes()
            saved[state.jobs[0].step] = sorted(path.name for path in (disk / "out" / "last").glob("checkpoint-*"))

        patient = {**orders[0], "save_total_limit": None}
        results = train(base, disk / "out", [patient], watcher=Watcher(look, notes.append))
        assert results["last"].status == "done"
        assert saved[5] == ["checkpoint-1", "checkpoint-2"] and saved[8] == [f"checkpoint-{step}" for step in (1, 2, 6, 7, 8)]
        assert sum("No space left on device" in note and "checkpoint-3" in note for note in notes) == 1
        assert not any("checkpoint-4" in note or "room was kept" in note for note in notes)


def test_a_killed_run_leaves_no_reserve_behind(base: Path, data: Path, tmp_path: Path) -> None:
    """The next run takes it away, also where it is the only thing there."""
    (tmp_path / "out").mkdir()
    left = durable.scratch_path(tmp_path / "out")
    left.write_bytes(bytes(1000))
    results = train(base, tmp_path / "out", [job("a", str(data / "b.jsonl"))])
    assert results["a"].status == "done" and not reserved(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "done"


def test_a_wait_for_room_is_told_each_time_and_noted_now_and_then_with_what_an_operator_can_do(tmp_path: Path) -> None:
    """Nobody can choose another `output_dir` of a server."""
    notes, told, ending = list[str](), list[str](), threading.Event()
    ending.set()
    wait = Backoff(lambda: None, ending, notes.append, told.append)
    assert not wait("a", FULL) and notes == [] and told == ["a"], "not where all ends"
    ending = threading.Event()
    wait = Backoff(ending.set, ending, notes.append, told.append)
    for _ in range(2):
        wait("a", FULL)
    assert notes == [f"a: {FULL}. It waits until there is room, and then goes on by itself"] and told == ["a"] * 3
