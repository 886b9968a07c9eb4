"""Four jobs in a real worker, one of which kills its process: it alone fails, and the others end with the bytes that they have alone."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.cluster.profiled import submitted_at_once
from tests.engine.conftest import save_base
from tests.engine.tiny_runs import TWO_LINEARS, job, run_spec, sha256, steps_taken, train, write_rows
from tlora.cluster.controller import run
from tlora.cluster.crash_attribution import MOST_DEATHS
from tlora.cluster.event_log import EventLog
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.live.cluster_run import submit_all
from tlora.protocol import Action, Event, GroupLost, JobFailed, JobFinished, JobGroup, JobSubmitted, ParallelPlan, StartGroup, StepsDone

# Runs in each rank's process before anything else does: the batch of one job, and of no other, kills it, as a broken kernel would.
HOOK = """
import os, signal, sys
if "tlora.engine.ranks.rank" in sys.orig_argv:
    from tlora.group.job_run import JobRun
    batch_row = JobRun.batch_row
    def deadly(run, row):
        if run.spec.name == "culprit" and run.progress.step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch_row(run, row)
    JobRun.batch_row = deadly
"""


class OneGroup:
    """All jobs that have not ended, in one group on one GPU, again after each loss."""

    def __init__(self, names: list[str]) -> None:
        self.waiting, self.living, self.groups = set(names), list(names), 0

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case JobSubmitted(name):
                self.waiting.discard(name)
                return [] if self.waiting else [self.start()]
            case GroupLost():
                return [self.start()] if self.living else []
            case JobFinished(name) | JobFailed(name):
                self.living.remove(name)
                return []
            case _:
                return []

    def start(self) -> StartGroup:
        self.groups += 1
        jobs = tuple(self.living)
        return StartGroup(JobGroup(f"g{self.groups}", "tiny", (0,), ParallelPlan(1, 256), jobs, tuple(1.0 for _ in jobs)))


def test_the_culprit_fails_by_itself_and_all_others_are_as_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    base, data = save_base(tmp_path / "base"), str(write_rows(tmp_path / "rows.jsonl", 20))
    names = ["a", "b", "culprit", "c"]
    few = {"max_steps": 8, "save_steps": 2, "batch_size": 2, "target_modules": TWO_LINEARS}
    orders = [job(name, data, seed=seed, r=1 + seed, **few) for seed, name in enumerate(names)]
    for order in orders:
        if order["name"] != "culprit":
            train(base, tmp_path / "alone" / order["name"], [order], deterministic=True)
    spec = run_spec(base, tmp_path / "out", orders)
    jobs, arrivals = submitted_at_once(spec)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hook"))
    machine = LocalMachine((0,), "cpu", {"tiny": str(base)}, tmp_path / "out", deterministic=True)
    told: list[Event | Action] = []
    with LocalBackend(machine) as backend, closing(EventLog(tmp_path / "events.jsonl")) as log:
        submit_all(backend, jobs, arrivals)

        def record(seconds: float, item: Event | Action) -> None:
            told.append(item)
            log.write(seconds, item)

        run(OneGroup(names), backend, record)
    stepped = [isinstance(item, StepsDone) and item.job_id == "culprit" for item in told]
    news = stepped.index(True) if True in stepped else 0  # its first step, which is reported before its worker dies, or not
    assert sum(isinstance(item, GroupLost) for item in told[news:]) == MOST_DEATHS, "without a new step"
    (failed,) = [item for item in told if isinstance(item, JobFailed)]
    assert failed.job_id == "culprit" and "was killed by signal 9" in failed.reason
    assert {item.job_id for item in told if isinstance(item, JobFinished)} == {*names} - {"culprit"}
    for name in {*names} - {"culprit"}:
        ours, alone = tmp_path / "out" / "jobs" / name, tmp_path / "alone" / name / name
        assert sha256(ours) == sha256(alone), name
        assert steps_taken(ours) == steps_taken(alone) == list(range(1, 9)), name
