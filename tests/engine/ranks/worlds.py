"""A base, orders over it, and what one process makes of them: what runs on real ranks of a CPU are compared with."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import tlora
from tests import forked
from tests.engine.tiny_runs import run_spec, same_bytes, save_base, train
from tests.process_hooks import hold, let_hold, signal_at, was_signalled
from tlora.engine import run_monitor
from tlora.engine.ranks import coordinator, rank_group
from tlora.engine.results import Results
from tlora.engine.watcher import RunProgress, Watcher
from tlora.link.supervisor import SupervisedProcess, start_process
from tlora.store.fingerprint import BaseGuard

SHOW_EACH_STEP = """
import sys

if monitor := sys.modules.get("tlora.engine.run_monitor"):
    monitor._SHOW_SECONDS = 0.0
"""


@dataclass
class World:
    """`whole` is what one process makes of the `orders` over `base`."""

    base: Path
    data: Path
    orders: list[dict[str, Any]]
    whole: Path
    processes: list[SupervisedProcess] = field(default_factory=list[SupervisedProcess])  # of the newest run

    @property
    def names(self) -> list[str]:
        return [order["name"] for order in self.orders]

    def train(self, out: Path, gpus: int, orders: list[dict[str, Any]] | None = None, **options: Any) -> Results:
        self.processes.clear()
        spec = run_spec(self.base, out, orders or self.orders, deterministic=options.pop("deterministic", True))
        return tlora.train(spec, device="cpu", gpus=gpus, **options)

    def train_with_a_lost_rank(self, out: Path, gpus: int, rank: int, number: int, calls: int) -> Told:
        """All jobs to their end, while that rank gets the signal as it takes its row number `calls`: no other moment is so sure to be one
        at which it trains.
        """
        told = Told(0, lambda: signal_at(self.processes[rank].pid, calls, number))
        results = self.train(out, gpus, watcher=told.watcher)
        assert told.acted and was_signalled(), "the rank has had fewer rows"
        assert results.status == "done", told.lines
        self.same_bytes(out)
        return told

    def same_bytes(self, out: Path) -> None:
        same_bytes(out, self.whole, self.names)


@contextmanager
def open_world(directory: Path, make_orders: Callable[[Path], list[dict[str, Any]]], **shape: int) -> Iterator[World]:
    """In `directory`; `make_orders` gets the base, over which it may train, and `shape` is what the base's config has else. Ranks and
    workers are forked, for which a test needs the fixture `fork_servers`.
    """
    base = save_base(directory / "base", **({"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 1} | shape))
    with pytest.MonkeyPatch.context() as monkeypatch:
        fork_children(monkeypatch, directory)
        world = World(base, directory, make_orders(base), directory / "whole")
        train(base, world.whole, world.orders, deterministic=True)
        record_ranks(monkeypatch, world.processes)
        yield world


def fork_children(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """As the fixture `forked_children`, for a fixture of a module, its cache in `directory`. Ranks say each step that they have taken: one
    that waits then, for a verdict or for others, would say the last ones only afterwards. `process_hooks.hold` holds them back.
    """
    let_hold(monkeypatch, directory, SHOW_EACH_STEP)
    monkeypatch.setenv("TLORA_CACHE", str(directory / "cache"))
    monkeypatch.setattr(subprocess, "Popen", forked.ForkingPopen)
    monkeypatch.setattr(coordinator, "_SHOW_SECONDS", 0.01)
    monkeypatch.setattr(run_monitor, "_SHOW_SECONDS", 0.0)  # of a run on one GPU


@contextmanager
def hold_until_ranks_stop(step: int) -> Iterator[None]:
    """`hold`, until ranks are told to save their jobs and end."""
    stop = rank_group.RankGroup.stop
    with hold(step) as release, pytest.MonkeyPatch.context() as monkeypatch:

        def stop_and_release(group: rank_group.RankGroup, first: int = 0) -> None:
            stop(group, first)
            release()

        monkeypatch.setattr(rank_group.RankGroup, "stop", stop_and_release)
        yield


def record_ranks(monkeypatch: pytest.MonkeyPatch, processes: list[SupervisedProcess]) -> None:
    """From now on each rank that is started is added to `processes`."""

    def start(*given: Any, **options: Any) -> SupervisedProcess:
        processes.append(start_process(*given, **options))
        return processes[-1]

    monkeypatch.setattr(rank_group, "start_process", start)


class Told:
    """A watcher that keeps what is said, and acts once when all jobs together have taken so many steps, and `when` holds."""

    def __init__(self, at_steps: int = 0, act: Callable[[], object] | None = None, when: Callable[[], bool] = lambda: True) -> None:
        self.lines: list[str] = []
        self.last: RunProgress | None = None
        self._at, self._act, self._when = at_steps, act, when
        self.watcher = Watcher(self._progress, self.lines.append)

    def _progress(self, progress: RunProgress) -> None:
        self.last = progress
        if self._act is not None and sum(job.step for job in progress.jobs) >= self._at and self._when():
            act, self._act = self._act, None
            act()

    @property
    def acted(self) -> bool:
        return self._act is None

    def before_any_job_ends(self, monkeypatch: pytest.MonkeyPatch) -> Told:
        """It acts while all jobs are open, for none can be saved before the base is known, which it is from then on. `at_steps` is no more
        than the steps after which a first job saves.
        """
        check = BaseGuard.check
        monkeypatch.setattr(BaseGuard, "must_compare", True)
        monkeypatch.setattr(BaseGuard, "check", lambda guard: self.acted and check(guard))
        return self

    def said(self, words: str) -> bool:
        return any(words in line for line in self.lines)
