"""A job's directory has one writer: by a lock as long as it lives, by a number from then on."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_worker import Orders, of, when, work
from tests.engine.test_worker import report_each_step as report_each_step
from tests.engine.tiny_runs import sha256
from tlora import durable
from tlora.engine import trainer as trainer_room
from tlora.engine.messages import Leave, Stop
from tlora.errors import CheckpointError
from tlora.link.job_lease import CLAIMS, HeldError, take_claim
from tlora.store import checkpoint
from tlora.worker_protocol import Finished, Join, Joined, Left, Refused, Stepped


def test_attempts_only_rise(tmp_path: Path) -> None:
    take_claim(tmp_path, "a", 3, 0.0).release()
    with pytest.raises(HeldError, match="attempt 3 has begun, and this is 2"):
        take_claim(tmp_path, "a", 2, 0.0)
    claim = take_claim(tmp_path, "a", 4, 0.0)
    claim.check()
    claim.release()
    claim.release()


def test_no_directory_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / CLAIMS).write_text("a file")
    with pytest.raises(CheckpointError):
        take_claim(tmp_path, "a", 1, 0.0)


def test_a_claim_that_a_full_disk_has_no_room_for_says_where_and_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*/\.claims/a: No space left on device\. Remedy: free some space") as raised:
        take_claim(tmp_path, "a", 1, 0.0)
    assert durable.is_full(raised.value)


def hold(jobs: str, told: Any) -> None:
    claim = take_claim(Path(jobs), "a", 1, 0.0)
    told.send(os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
    claim.check()
    durable.write_file(Path(jobs) / "result", "old")
    claim.release()


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_a_stopped_holder_keeps_others_out_until_it_goes_on_or_ends(tmp_path: Path, end: signal.Signals) -> None:
    """So what the later attempt has put in place is never written over by the earlier one."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    holder = context.Process(target=hold, args=(str(tmp_path), theirs))
    holder.start()
    assert holder.pid == ours.recv()
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(HeldError, match=f"held by process {holder.pid}"):
        take_claim(tmp_path, "a", 2, 0.1)
    os.kill(holder.pid, end)
    claim = take_claim(tmp_path, "a", 2, 60.0)
    durable.write_file(tmp_path / "result", "new")
    holder.join()
    claim.check()
    assert (tmp_path / "result").read_text() == "new"


POINTS = ("checkpoint", "prune", "export", "result.json", "metrics")


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.slow
def test_where_the_lock_does_not_reach_the_number_keeps_an_old_attempt_from_writing(
    made: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """As on a file system that does not pass locks on to other hosts: just before a rename a later attempt takes the job over, and ends
    it. What it has put in place stays as it is.
    """
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    before: list[dict[str, tuple[int, int]]] = []

    def take_over(directory: Path) -> None:
        if before:
            return
        before.append({})
        work(made.load(tmp_path), [Join(made.join("mover").job, attempt=2)])
        before[0].update(inodes(directory))

    replace_file, save, prune = durable.link_file, checkpoint.save, durable.prune
    directory = tmp_path / "mover"
    monkeypatch.setattr(checkpoint, "save", lambda path, *args: (point == "checkpoint" and take_over(directory), save(path, *args)))
    monkeypatch.setattr(durable, "prune", lambda path, *args, **kw: (point == "prune" and take_over(directory), prune(path, *args, **kw)))
    monkeypatch.setattr(durable, "link_file", lambda *args, **kw: (point == "export" and take_over(directory), replace_file(*args, **kw)))

    def answer(report: Any) -> list[Any]:
        if point == "metrics" and isinstance(report, Stepped) and report.steps >= 3:
            take_over(directory)
        return []

    if point == "result.json":
        write = durable.write_file

        def written(path: Path, *args: Any, **kw: Any) -> None:
            if path.name == "result.json":
                take_over(directory)
            write(path, *args, **kw)

        monkeypatch.setattr(durable, "write_file", written)
    told = work(made.load(tmp_path), [Join(made.join("mover").job, attempt=1)], answer)
    assert before and not of(told, Left, "mover")
    assert inodes(directory) == before[0], "what the later attempt had put in place was touched"
    assert sha256(directory) == made.shas["mover"] and '"done"' in (directory / "result.json").read_text()


def inodes(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(path.relative_to(directory)): (path.stat().st_ino, path.stat().st_size) for path in sorted(directory.rglob("*"))}


@pytest.mark.slow
def test_a_job_whose_directory_is_held_is_refused_for_now(made: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And joins when it is free; its neighbour trains on."""
    monkeypatch.setattr(trainer_room, "CLAIM_SECONDS", 0.1)
    claim = take_claim(tmp_path, "short", 0, 0.0)

    def answer(report: Any) -> list[Any]:
        if isinstance(report, Refused):
            assert "held by process" in report.reason
            claim.release()
            return [made.join("short")]
        return []

    told = work(made.load(tmp_path), [made.join("short"), made.join("stays")], answer)
    assert of(told, Refused, "short") and of(told, Finished, "short") and of(told, Finished, "stays")
    assert sha256(tmp_path / "short") == made.shas["short"]


def test_a_job_that_has_left_is_free(made: Orders, tmp_path: Path) -> None:
    free: list[bool] = []

    def answer(report: Any) -> list[Any]:
        if isinstance(report, Left):
            take_claim(tmp_path, "stays", 9, 0.0).release()
            free.append(True)
        return []

    leave = when(Stepped, "stays", 2, Leave("stays"))
    told = work(made.load(tmp_path), [made.join("stays")], lambda report: leave(report) + answer(report))
    assert free and of(told, Joined, "stays") and Stop() is not None
