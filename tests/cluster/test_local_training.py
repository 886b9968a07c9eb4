"""Real workers on two one-thread "GPUs": jobs arrive, join, move and lose their worker, and end with the bytes of never having moved."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import save_base
from tests.engine.tiny_runs import job, run_spec, sha256, steps_taken, train, write_rows
from tlora.cluster.controller import run
from tlora.cluster.event_log import EventLog
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.cluster.reconciler import LocalJob
from tlora.live.cluster_run import submit_all
from tlora.planning.job_profile import ProfiledJob, profile_jobs
from tlora.protocol import (
    Action,
    ChangeGroup,
    Event,
    GroupLost,
    GroupReady,
    JobFinished,
    JobGroup,
    JobSubmitted,
    ParallelPlan,
    StartGroup,
    StepsDone,
    StopGroup,
)
from tlora.sim.trace import read_event_log


@dataclass(frozen=True)
class World:
    """A base, four orders, and the run of `tlora.train` that they are measured by."""

    base: Path
    orders: list[dict[str, Any]]
    whole: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("world")
    base = save_base(directory / "base", hidden_size=256, intermediate_size=320, num_hidden_layers=1)
    for number, (name, count) in enumerate({"a": 40, "b": 9, "c": 24}.items()):
        write_rows(directory / f"{name}.jsonl", count, number, high=20)
    orders = [
        job("mover", str(directory / "a.jsonl"), lora_dropout=0.1, max_steps=75, batch_size=6, logging_steps=10, save_steps=20),
        job("brief", str(directory / "b.jsonl"), max_steps=10),
        job("stays", str(directory / "c.jsonl"), max_steps=120, r=7, save_steps=5),
        job("late", str(directory / "c.jsonl"), max_steps=25, seed=3),
    ]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TLORA_CACHE", str(directory / "cache"))
        train(base, directory / "whole", orders, deterministic=True)
        yield World(base, orders, directory / "whole")


class Script:
    """The first group takes two jobs and the second two. When the brief one is done the mover moves over, which ends the first group, and
    soon after its new worker is killed. In the group that follows all are on one GPU, and one parts for the other.
    """

    def __init__(self, backend: LocalBackend) -> None:
        self.backend, self.ended, self.members = backend, list[str](), dict[str, list[str]]()
        self.ready = set[str]()
        self.moved = self.killed = self.parted = False

    def group(self, name: str, gpu: int) -> JobGroup:
        jobs = tuple(self.members[name])
        return JobGroup(name, "tiny", (gpu,), ParallelPlan(1, 128), jobs, tuple(100.0 for _ in jobs))

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case JobSubmitted("brief"):
                self.members["g0"] = ["mover", "brief"]
                return [StartGroup(self.group("g0", 0))]
            case JobSubmitted("late"):
                self.members["g1"] = ["stays", "late"]
                return [StartGroup(self.group("g1", 1))]
            case GroupReady(name):
                self.ready.add(name)
                return []
            case StepsDone("mover", "g0") if "g1" in self.ready and "brief" in self.ended and not self.moved:
                self.moved = True
                self.members["g1"].append("mover")
                return [StopGroup("g0"), ChangeGroup(self.group("g1", 1))]
            case StepsDone("mover", "g1") if not self.killed:
                self.killed = True
                os.kill(self.backend.reconciler.workers[1].process.pid, signal.SIGKILL)
                return []
            case GroupLost("g1"):
                self.members["g2"] = [name for name in self.members.pop("g1") if name not in self.ended]
                return [StartGroup(self.group("g2", 0))]
            case StepsDone("stays", "g2") if not self.parted and len(self.members["g2"]) > 1:
                self.parted = True
                self.members["g2"].remove("stays")
                self.members["g3"] = ["stays"]
                return [ChangeGroup(self.group("g2", 0)), StartGroup(self.group("g3", 1))]
            case JobFinished(name):
                self.ended.append(name)
                return []
            case _:
                return []


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_jobs_that_move_and_lose_their_worker_end_as_if_alone(world: World, tmp_path: Path) -> None:
    spec = run_spec(world.base, tmp_path, world.orders)
    made = profile_jobs(spec)
    arrivals: list[tuple[float, JobSubmitted]] = []
    jobs: dict[str, LocalJob] = {}
    for number, order in enumerate(spec.jobs):
        profiled = made[order.name]
        assert isinstance(profiled, ProfiledJob)
        arrivals.append((0.1 * number, JobSubmitted(order.name, "tiny", 1, profiled.profile)))
        jobs[order.name] = LocalJob(order, profiled.train_set, profiled.eval_set)
    machine = LocalMachine((0, 1), "cpu", {"tiny": str(world.base)}, tmp_path, deterministic=True)
    with LocalBackend(machine) as backend, closing(EventLog(tmp_path / "events.jsonl")) as log:
        submit_all(backend, jobs, arrivals)
        script = Script(backend)
        run(script, backend, log.write)
    assert script.moved and script.killed
    assert script.parted or script.members["g2"] == ["stays"], "the others have ended before"
    told = [item for _, item in read_event_log(tmp_path / "events.jsonl")]
    assert {item.job_id for item in told if isinstance(item, JobFinished)} == set(jobs)
    ready = [item.group_id for item in told if isinstance(item, GroupReady)]
    assert sorted(ready[:2]) == ["g0", "g1"] and ready[2] == "g1" and {*ready[3:]} == {"g2"} | ({"g3"} if script.parted else set())
    after = [item.steps for item in told if isinstance(item, StepsDone) and (item.job_id, item.group_id) == ("stays", "g2")]
    assert after[0] > 5, "its last checkpoint was not taken up"
    for name in jobs:
        assert sha256(tmp_path / "jobs" / name) == sha256(world.whole / name), name
        assert steps_taken(tmp_path / "jobs" / name) == steps_taken(world.whole / name)
