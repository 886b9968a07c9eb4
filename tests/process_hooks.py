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
if "tlora.engine.ranks.rank" in sys.orig_argv:
    from tlora.group.job_run import JobRun
    batch_row = JobRun.batch_row
    def most_steps():
        try:
            with open(os.environ["HELD"]) as file:
                return int(file.read())
        except FileNotFoundError:
            return float("inf")
    def held(run, row):
        while run.progress.step >= most_steps():
            time.sleep(0.01)
        try:
            with open(os.environ["HELD"] + ".slow") as file:
                time.sleep(2.0 / max(1, int(file.read()) - run.progress.step))
        except FileNotFoundError:
            pass
        return batch_row(run, row)
    JobRun.batch_row = held
"""


def run_in_each_process(monkeypatch: pytest.MonkeyPatch, directory: Path, code: str) -> None:
    """In all that are started from now on, also in those that are forked. It is kept in `directory`."""
    (directory / "hook").mkdir()
    (directory / "hook" / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(directory / "hook"), prepend=os.pathsep)


def let_hold(monkeypatch: pytest.MonkeyPatch, directory: Path, code: str) -> None:
    """As `run_in_each_process`, and `hold` and `slow_down` work for ranks."""
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
    """Likewise, but a job comes ever more slowly to that step, and a rank hears what it is told on the way: the sum of its waits has no
    bound that a machine could be too slow for.
    """
    with _kept(Path(os.environ["HELD"] + ".slow"), step) as go_on:
        yield go_on


@contextmanager
def _kept(file: Path, step: int) -> Iterator[Callable[[], None]]:
    file.with_suffix(".new").write_text(str(step))
    file.with_suffix(".new").replace(file)
    try:
        yield partial(file.unlink, missing_ok=True)
    finally:
        file.unlink(missing_ok=True)
