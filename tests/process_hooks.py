"""Code that each process of a test runs before anything else: there it counts or waits for the test, so that no test needs a clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

REPORT_EACH_STEP = """
import sys
if "tlora.engine.ranks.rank" in sys.orig_argv:
    import tlora.engine.trainer
    tlora.engine.trainer.REPORT_SECONDS = 0.0
"""
"""A rank of a worker reports each step at once: else a job may be done before its first ones are told."""

LET_GO_TO_SAVE = """
import os, sys
if "tlora.engine.ranks.rank" not in sys.orig_argv:
    from tlora.engine.worker_reconciler import WorkerReconciler
    stop = WorkerReconciler.stop
    def stop_and_let_go(reconciler, reason):
        stop(reconciler, reason)
        if os.path.exists(os.environ["HELD"]):
            os.unlink(os.environ["HELD"])
    WorkerReconciler.stop = stop_and_let_go
"""
"""What is held by `hold` goes on when its worker is told to save its jobs and end: a rank saves between two steps."""

_HOLD = """
import os, sys, time
if {"tlora.engine.ranks.rank", "train"} & set(sys.orig_argv):
    from tlora.group.job_run import JobRun
    batch_row = JobRun.batch_row
    calls = 0
    def most_steps():
        try:
            with open(os.environ["HELD"]) as file:
                return int(file.read())
        except FileNotFoundError:
            return float("inf")
    def signal_itself():
        global calls
        calls += 1
        try:
            with open(os.environ["HELD"] + ".signal") as file:
                process, at, number = map(int, file.read().split())
        except FileNotFoundError:
            return
        if process == os.getpid() and calls >= at:
            os.unlink(os.environ["HELD"] + ".signal")
            os.kill(process, number)
    def slowed(step):
        try:
            with open(os.environ["HELD"] + ".slow") as file:
                left = max(1, int(file.read()) - step)
        except FileNotFoundError:
            return
        for _ in range(6000 // left**2):
            if not os.path.exists(os.environ["HELD"] + ".slow"):
                return
            time.sleep(0.01)
    def held(run, row):
        signal_itself()
        while run.progress.step >= most_steps():
            time.sleep(0.01)
        slowed(run.progress.step)
        return batch_row(run, row)
    JobRun.batch_row = held
"""

_HOLD_ROWS = """
import itertools, os, sys, time
if "tlora.data.worker" in sys.orig_argv:
    from tlora.data.scratch import Scratch
    time.monotonic = itertools.count().__next__
    write_progress, begun = Scratch.write_progress, set()
    def write_once(scratch, *arguments):
        while scratch.path in begun and os.path.exists(os.environ["HELD_ROWS"]):
            time.sleep(0.01)
        write_progress(scratch, *arguments)
        begun.add(scratch.path)
    Scratch.write_progress = write_once
"""


def hold_rows(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Callable[[], None]:
    """A process that tokenizes saves and tells what it has done as often as it can. Of each set it saves some rows, and no more before the
    function that is returned is called.
    """
    run_in_each_process(monkeypatch, directory, _HOLD_ROWS)
    monkeypatch.setenv("HELD_ROWS", str(directory / "held-rows"))
    (directory / "held-rows").touch()
    return partial((directory / "held-rows").unlink, missing_ok=True)


def run_in_each_process(monkeypatch: pytest.MonkeyPatch, directory: Path, code: str) -> None:
    """In all that are started from now on, also in those that are forked. It is kept in `directory`."""
    (directory / "hook").mkdir()
    (directory / "hook" / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(directory / "hook"), prepend=os.pathsep)


def let_hold(monkeypatch: pytest.MonkeyPatch, directory: Path, code: str) -> None:
    """As `run_in_each_process`, and `hold`, `slow_down` and `signal_at` work for ranks, and for `tlora train` on one GPU."""
    run_in_each_process(monkeypatch, directory, code + _HOLD)
    monkeypatch.setenv("HELD", str(directory / "held"))


@contextmanager
def hold(step: int) -> Iterator[Callable[[], None]]:
    """No rank trains a job beyond that step before the given function is called, or the block ends: what a test does meanwhile finds it
    open, however fast the machine is.
    """
    with _kept(Path(os.environ["HELD"]), step) as go_on:
        yield go_on


@contextmanager
def slow_down(step: int) -> Iterator[Callable[[], None]]:
    """Likewise, but a job comes ever more slowly to that step, and a rank hears what it is told on the way: a row takes 60 s, divided by
    the square of the steps that are left. Of 60 steps the first 50 take some seconds for each row of a batch, the last ones minutes.
    """
    with _kept(Path(os.environ["HELD"] + ".slow"), step) as go_on:
        yield go_on


def signal_at(process: int, calls: int, number: int) -> None:
    """The rank with this pid gets the signal `number` from itself, once, in the midst of its work: as it takes the row number `calls`."""
    _write(Path(os.environ["HELD"] + ".signal"), f"{process} {calls} {number}")


def was_signalled() -> bool:
    """Whether the last `signal_at` has come about."""
    return not Path(os.environ["HELD"] + ".signal").exists()


@contextmanager
def _kept(file: Path, step: int) -> Iterator[Callable[[], None]]:
    _write(file, str(step))
    try:
        yield partial(file.unlink, missing_ok=True)
    finally:
        file.unlink(missing_ok=True)


def _write(file: Path, text: str) -> None:
    """At once, for those that read it meanwhile."""
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").replace(file)
