"""Real workers of two and of three one-thread "GPUs": jobs that span them have the bytes of `tlora train`, whatever becomes of ranks,
workers and controllers.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

import tlora
from tests.cluster.profiled import submitted_at_once
from tests.engine.conftest import save_base
from tests.engine.tiny_runs import job, rows, run_spec, same_bytes, sha256, steps_taken, write_rows
from tests.process_hooks import REPORT_EACH_STEP, let_hold, slow_down
from tlora.cluster.controller import run
from tlora.cluster.event_log import EventLog
from tlora.cluster.listeners import TlsListener
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.cluster.reconciler import LocalJob
from tlora.json_file import read_object
from tlora.live.cluster_run import submit_all
from tlora.planning.job_profile import ProfiledJob, profile_jobs
from tlora.protocol import (
    Action,
    ChangeGroup,
    Event,
    GroupFound,
    GroupLost,
    GroupReady,
    JobFinished,
    JobGroup,
    JobSubmitted,
    ParallelPlan,
    StartGroup,
    StepsDone,
)
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.shape.cost import CostModel
from tlora.shape.predicted_constants import live_constants


@dataclass(frozen=True)
class World:
    """A base, orders, and the run of `tlora.train` that they are measured by."""

    base: Path
    orders: list[dict[str, Any]]
    whole: Path
    device: Literal["cpu", "cuda"] = "cpu"

    def same_bytes(self, out: Path) -> None:
        same_bytes(out / "jobs", self.whole, [order["name"] for order in self.orders])


def make_world(directory: Path, device: Literal["cpu", "cuda"], times: int) -> World:
    """A job of two replicas with dropout and batches that are smaller at an epoch's end, one of two with evaluations, and one of one; with
    `times` as many steps as a CPU needs to be disturbed at.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 160} if device == "cpu" else {"hidden_size": 256, "intermediate_size": 512}
    base = save_base(directory / "base", num_hidden_layers=1, **sizes)
    for number, (name, count) in enumerate({"a": 26, "b": 9, "c": 24}.items()):
        write_rows(directory / f"{name}.jsonl", count, number, high=20)
    saves = {"two": 5, "evaluated": 10, "narrow": 10}
    orders = [
        job("two", str(directory / "a.jsonl"), gpus=2, lora_dropout=0.1, max_steps=60 * times, batch_size=6, logging_steps=3 * times),
        job("evaluated", str(directory / "c.jsonl"), gpus=2, max_steps=40 * times, r=7, seed=3, eval_size=4, eval_steps=5 * times),
        job("narrow", str(directory / "b.jsonl"), max_steps=50 * times),
    ]
    orders = [order | {"save_steps": saves[order["name"]] * times} for order in orders]
    tlora.train(run_spec(base, directory / "whole", orders, deterministic=True), device=device)
    return World(base, orders, directory / "whole", device)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("wide")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TLORA_CACHE", str(directory / "cache"))
        let_hold(monkeypatch, directory, REPORT_EACH_STEP)
        yield make_world(directory, "cpu", 1)


@dataclass
class Script:
    """All jobs in one group, on GPUs that `act` may change: it sees each event and says on which the group shall be from then on."""

    gpus: tuple[int, ...]
    act: Callable[[Event, Script], tuple[int, ...]]
    backend: LocalBackend | None = None
    jobs: list[str] = field(default_factory=list[str])
    count: int = 0
    told: list[Event] = field(default_factory=list[Event])

    def group(self) -> JobGroup:
        names = tuple(self.jobs)
        return JobGroup(f"g{self.count}", "tiny", self.gpus, ParallelPlan(len(self.gpus), 64 * len(self.gpus)), names, (1.0,) * len(names))

    def handle(self, event: Event, now: float) -> list[Action]:
        self.told.append(event)
        match event:
            case JobSubmitted(name):
                self.jobs.append(name)
                return [StartGroup(self.group())] if len(self.jobs) == 1 else [ChangeGroup(self.group())]
            case JobFinished(name):
                self.jobs.remove(name)
            case GroupLost():
                self.count += 1
                return [StartGroup(self.group())]
            case _:
                pass
        before, self.gpus = self.gpus, self.act(event, self)
        return [ChangeGroup(self.group())] if self.gpus != before else []

    def steps(self, name: str) -> list[int]:
        return [int(event.steps) for event in self.told if isinstance(event, StepsDone) and event.job_id == name]


def run_script(
    world: World,
    out: Path,
    script: Script,
    gpus: tuple[int, ...] = (0, 1),
    note: Callable[[str], None] = print,
    listener: TlsListener | None = None,
    **machine: Any,
) -> None:
    """`machine`: fields of `LocalMachine`. `listener`: for hosts to come."""
    spec = run_spec(world.base, out, world.orders)
    jobs, arrivals = submitted_at_once(spec)
    place = LocalMachine(gpus, world.device, {"tiny": str(world.base)}, out, deterministic=True, **machine)
    with LocalBackend(place, note, listener) as backend, closing(EventLog(out / "events.jsonl")) as log:
        script.backend = backend
        submit_all(backend, jobs, arrivals)
        run(script, backend, log.write)
    assert {event.job_id for event in script.told if isinstance(event, JobFinished)} == set(jobs)


@pytest.mark.slow
def test_a_wide_group_has_the_bytes_of_a_run(world: World, tmp_path: Path) -> None:
    script = Script((0, 1), lambda event, script: script.gpus)
    run_script(world, tmp_path, script)
    world.same_bytes(tmp_path)
    assert not any(isinstance(event, GroupLost) for event in script.told)
    assert sum(isinstance(event, GroupReady) for event in script.told) >= 1


@pytest.mark.slow
def test_a_base_that_does_not_fit_on_a_gpu_lies_in_parts_on_those_of_a_group(world: World, tmp_path: Path) -> None:
    """Each of its two ranks has half of every layer, and trains a job to the bytes of a run over a whole base, beside which the limit
    leaves no room for either.
    """
    base = save_base(tmp_path / "base", hidden_size=512, intermediate_size=1024, num_hidden_layers=16)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"input_ids": {[5 + row, 6, 7, 8, 9 + row]}}}\n' for row in range(24)))
    data, base_bytes = str(tmp_path / "a.jsonl"), sum(file.stat().st_size for file in base.glob("*.safetensors"))
    orders = [
        job("left", data, lora_dropout=0.1, max_steps=6, batch_size=2, target_modules=["q_proj"]),
        job("right", data, gpus=2, max_steps=6, batch_size=2, seed=3, target_modules=["v_proj"]),
    ]
    tlora.train(run_spec(base, tmp_path / "whole", orders, deterministic=True), device=world.device)
    script, out = Script((0, 1), lambda event, script: script.gpus), tmp_path / "out"
    run_script(World(base, orders, tmp_path / "whole", world.device), out, script, memory_limit=int(1.17 * base_bytes))
    same_bytes(out / "jobs", tmp_path / "whole", ["left", "right"])
    assert not any(isinstance(event, GroupLost) for event in script.told)


def home(out: Path, name: str) -> int:
    """The process that writes the job."""
    return int((out / "jobs" / ".claims" / name).read_text().split()[1])


def worker_pid(script: Script) -> int:
    assert script.backend is not None
    return script.backend.reconciler.workers[script.gpus[0]].process.pid


@pytest.mark.slow
def test_jobs_go_on_on_other_gpus(world: World, tmp_path: Path) -> None:
    """From one GPU to two, to the second of them, and back to both, in one worker that loads its base once."""
    stops = [(0, 1), (1,), (0, 1)]
    ready: list[tuple[int, ...]] = []  # where the group was, while the first job trained

    def act(event: Event, script: Script) -> tuple[int, ...]:
        if isinstance(event, GroupReady) and "two" in script.jobs:
            ready.append(script.gpus)
            if not stops:
                go_on()
        if isinstance(event, StepsDone) and event.job_id == "two" and stops and ready[-1:] == [script.gpus]:
            return stops.pop(0)
        return script.gpus

    script = Script((0,), act)
    with slow_down(world.orders[0]["max_steps"]) as go_on:
        run_script(world, tmp_path, script)
    world.same_bytes(tmp_path)
    moves = [gpus for gpus, before in zip(ready, [(), *ready], strict=False) if gpus != before]
    assert moves == [(0,), (0, 1), (1,), (0, 1)] and not any(isinstance(event, GroupLost) for event in script.told)
    logs = {path.name for path in (tmp_path / "workers").glob("*.log")}
    assert logs == {"gpu0.log"}


@pytest.mark.parametrize("rank", [pytest.param("killed", marks=pytest.mark.slow), pytest.param("stopped", marks=pytest.mark.soak)])
def test_a_rank_or_the_worker_is_lost(world: World, tmp_path: Path, rank: str) -> None:
    """With a rank all of its worker is lost, as with the worker's own process; of neither a process is left, and all goes on."""
    ended: list[int] = []

    def act(event: Event, script: Script) -> tuple[int, ...]:
        if isinstance(event, StepsDone) and event.job_id == "two" and event.steps >= 8 + 20 * script.count and len(ended) == script.count:
            if script.count == 0:
                ended.append(home(tmp_path, "evaluated"))
                os.kill(ended[-1], signal.SIGKILL if rank == "killed" else signal.SIGSTOP)
            elif script.count == 1:
                ended.append(worker_pid(script))
                ranks.extend(home(tmp_path, name) for name in ("two", "evaluated"))
                os.kill(ended[-1], signal.SIGKILL)
                go_on()
        if isinstance(event, GroupLost):
            gone.append(not any(Path(f"/proc/{pid}").exists() for pid in ranks))
        return script.gpus

    ranks: list[int] = []
    gone: list[bool] = []
    script = Script((0, 1), act)
    with slow_down(world.orders[1]["max_steps"]) as go_on:
        run_script(world, tmp_path, script)
    world.same_bytes(tmp_path)
    lost = [event.reason for event in script.told if isinstance(event, GroupLost)]
    assert len(lost) == 2 and "is lost: was " + rank in lost[0] and "was killed by signal 9" in lost[1], lost
    assert all(gone), "a rank has outlived its worker"


@pytest.mark.slow
def test_the_next_controller_finds_a_wide_worker(world: World, tmp_path: Path) -> None:
    """Its jobs train on while there is none: no step is taken twice."""

    class KilledError(Exception):
        pass

    spec = run_spec(world.base, tmp_path, world.orders[:1])
    profiled = profile_jobs(spec)["two"]
    assert isinstance(profiled, ProfiledJob)
    submitted = JobSubmitted("two", "tiny", 2, profiled.profile)
    machine = LocalMachine((0, 1), world.device, {"tiny": str(world.base)}, tmp_path, deterministic=True)
    script = Script((0, 1), lambda _, script: script.gpus)

    def until_killed(_: float, item: Event | Action) -> None:
        if isinstance(item, StepsDone) and item.steps >= 5:
            raise KilledError

    first = LocalBackend(machine)
    submit_all(first, {"two": LocalJob(spec.jobs[0], profiled.train_set, profiled.eval_set)}, [(0.0, submitted)])
    found: list[Event] = []
    with slow_down(world.orders[0]["max_steps"]) as go_on:
        with pytest.raises(KilledError):
            run(script, first, until_killed)
        script.backend = first
        pid = worker_pid(script)
        first.abandon()
        second = LocalBackend(machine)
        go_on()
    with second:
        second.submit(submitted, LocalJob(spec.jobs[0], profiled.train_set, profiled.eval_set), at_seconds=-1.0)
        second.seal()
        while events := second.poll():
            found += events
        groups = [event.group.gpus for event in found if isinstance(event, GroupFound)]
    assert groups == [(0, 1)] and not any(isinstance(event, GroupLost) for event in found)
    assert sha256(tmp_path / "jobs" / "two") == sha256(world.whole / "two")
    assert steps_taken(tmp_path / "jobs" / "two") == steps_taken(world.whole / "two")
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_idle_gpus_are_lent(world: World, tmp_path: Path) -> None:
    """A job that asks for one GPU, of which the scheduler hears that its steps are long, gets both."""
    spec = run_spec(world.base, tmp_path, world.orders[2:])
    profiled = profile_jobs(spec)["narrow"]
    assert isinstance(profiled, ProfiledJob)
    submitted = JobSubmitted("narrow", "tiny", 1, replace(profiled.profile, tokens_per_step=2e5))
    policy = LIVE_POLICIES["residual_capacity-growth"]()
    scheduler, told = Scheduler(policy, CostModel({"tiny": live_constants(1e6)}), print), list[Event | Action]()
    with LocalBackend(LocalMachine((0, 1), world.device, {"tiny": str(world.base)}, tmp_path)) as backend:
        jobs = {"narrow": LocalJob(spec.jobs[0], profiled.train_set, profiled.eval_set)}
        submit_all(backend, jobs, [(0.0, submitted)])
        run(scheduler, backend, lambda _, item: told.append(item))
    started = [item.group for item in told if isinstance(item, StartGroup)]
    assert [group.gpus for group in started] == [(0, 1)] and JobFinished("narrow") in told
    assert steps_taken(tmp_path / "jobs" / "narrow") == steps_taken(world.whole / "narrow")
    outs = [out / "narrow" for out in (tmp_path / "jobs", world.whole)]
    losses = [[rows(out / "metrics.jsonl")[0]["loss"], read_object(out / "result.json")["train_loss"]] for out in outs]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=0.01), "another sum of the same gradients"
    if world.device == "cpu":  # on a GPU ten times as many steps bring the loss to where roundings decide about it
        assert losses[0][1] == pytest.approx(losses[1][1], rel=0.01)
