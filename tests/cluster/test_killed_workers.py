"""One of two workers is killed again and again, by signal, for lack of memory, by SIGSTOP: its jobs go on from their checkpoints and end
with the bytes that they have alone, and the other worker and its job notice nothing.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.memory_group import MemoryGroup, memory_group
from tests.cluster.profiled import submitted_at_once
from tests.engine.conftest import save_base
from tests.engine.tiny_runs import job, run_spec, sha256, steps_taken, train, write_rows
from tests.process_hooks import REPORT_EACH_STEP, let_hold, slow_down
from tlora.cluster.controller import run
from tlora.cluster.crash_attribution import MOST_DEATHS
from tlora.cluster.event_log import EventLog
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.cluster.worker_pool import Limits
from tlora.live.cluster_run import submit_all
from tlora.protocol import (
    Action,
    Event,
    GroupLost,
    JobFailed,
    JobFinished,
    JobGroup,
    JobSubmitted,
    ParallelPlan,
    StartGroup,
    StepsDone,
)

VICTIMS, OTHER = ("dropout", "plain", "ranked"), "other"
KINDS = ("killed", "starved", "stopped")
MOST_STEPS = 25  # reports between two kills


class Killer:
    """Gives the victims a worker again after each loss, and kills that after so many reports of steps, or before the first.

    A job fails whose worker dies three times in a row without a new step of it: where the next death would be the third, it waits.
    """

    def __init__(self, backend: LocalBackend, starving: MemoryGroup, kills: int, go_on: Callable[[], None]) -> None:
        self.backend, self.starving = backend, starving
        self.random = random.Random(kills)
        self.kinds = [KINDS[number % len(KINDS)] for number in range(kills)]
        self.random.shuffle(self.kinds)
        self.waiting, self.living = {*VICTIMS, OTHER}, list(VICTIMS)
        self.killed: Counter[str] = Counter()
        self.early = self.groups = self.reports = 0
        self.dying = False
        self.left = self._draw()
        self.others: set[int] = set()  # processes that trained the other job
        self.go_on = go_on  # all jobs to their ends

    def _draw(self) -> int:
        """Reports until the next kill; 0: before the worker has taken anybody in."""
        return 0 if self.random.random() < 0.25 else self.random.randint(1, MOST_STEPS)

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case JobSubmitted(name):
                self.waiting.discard(name)
                return [] if self.waiting else [self.group("other", 1, (OTHER,)), self.start()]
            case GroupLost(name):
                assert name != "other", event.reason
                assert self.dying, event.reason
                self.dying, self.left = False, self._draw()
                return [self.start()] if self.living else []
            case JobFailed():
                raise AssertionError(event)
            case JobFinished(name) if name in self.living:
                self.living.remove(name)
            case StepsDone("other"):
                self.others.add(self.backend.reconciler.workers[1].process.pid)
            case StepsDone():
                self.left -= 1
            case _:
                pass
        self.kill_if_due()
        return []

    def start(self) -> StartGroup:
        self.groups += 1
        return self.group(f"g{self.groups}", 0, tuple(self.living))

    def group(self, name: str, gpu: int, jobs: tuple[str, ...]) -> StartGroup:
        return StartGroup(JobGroup(name, "tiny", (gpu,), ParallelPlan(1, 256), jobs, tuple(1.0 for _ in jobs)))

    def kill_if_due(self) -> None:
        reconciler = self.backend.reconciler
        worker = reconciler.workers.get(0)
        if self.dying or not self.kinds or worker is None or not worker.jobs or self.left > 0:
            return
        if any(suspect.deaths >= MOST_DEATHS - 1 for name, suspect in reconciler.crash_attribution.of.items() if name in self.living):
            return  # nor one that may join before the process is dead
        self.early += not worker.residents
        kind, self.dying = self.kinds.pop(), True
        self.killed[kind] += 1
        if not self.kinds:
            self.go_on()
        if kind == "killed":
            os.kill(worker.process.pid, self.random.choice((signal.SIGKILL, signal.SIGSEGV)))
        elif kind == "stopped":
            os.kill(worker.process.pid, signal.SIGSTOP)
        else:
            self.starving.starve(*[rank.pid for rank in psutil.Process(worker.process.pid).children()], worker.process.pid)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.soak)])
@pytest.mark.slow
def test_a_worker_that_is_killed_again_and_again_costs_no_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int) -> None:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    base, data = save_base(tmp_path / "base"), str(write_rows(tmp_path / "rows.jsonl", 20))
    steps = 30 + 10 * kills  # of each victim: three times what the reports between all kills take
    orders: list[dict[str, Any]] = [
        job("dropout", data, max_steps=steps, save_steps=3, lora_dropout=0.1),
        job("plain", data, max_steps=steps, save_steps=4, seed=1),
        job("ranked", data, max_steps=steps, save_steps=5, seed=2, r=7),
        job("other", data, max_steps=2 * steps, seed=3),
    ]
    train(base, tmp_path / "alone", orders, deterministic=True)
    spec = run_spec(base, tmp_path / "out", orders)
    jobs, arrivals = submitted_at_once(spec)
    let_hold(monkeypatch, tmp_path, REPORT_EACH_STEP)
    machine = LocalMachine((0, 1), "cpu", {"tiny": str(base)}, tmp_path / "out", True, 0.5, limits=Limits(stopped=0.5))
    told: list[Event | Action] = []
    with memory_group() as starving, LocalBackend(machine) as backend, closing(EventLog(tmp_path / "events.jsonl")) as log:
        submit_all(backend, jobs, arrivals)
        with slow_down(steps) as go_on:
            killer = Killer(backend, starving, kills, go_on)
            run(killer, backend, lambda seconds, item: (told.append(item), log.write(seconds, item)))
    assert killer.killed.total() == kills and set(killer.killed) == set(KINDS), killer.killed
    assert sum(isinstance(item, GroupLost) for item in told) == kills
    assert Counter(item.job_id for item in told if isinstance(item, JobFinished)) == Counter([*VICTIMS, OTHER])
    assert len(killer.others) == 1, "the other worker was never touched"
    for name in (*VICTIMS, OTHER):
        ours, alone = tmp_path / "out" / "jobs" / name, tmp_path / "alone" / name
        assert sha256(ours) == sha256(alone), name
        assert steps_taken(ours) == steps_taken(alone), name
    lost = [item.reason for item in told if isinstance(item, GroupLost)]
    assert sum("was stopped for" in reason for reason in lost) == killer.killed["stopped"]
    assert not starving.is_real or sum("signal 9" in reason for reason in lost) >= killer.killed["starved"] + killer.killed["stopped"]
