"""What a queue needs of an engine's hosts, and a controller that has no GPUs of its own."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.test_listeners import TcpStation, wait_for
from tests.cluster.test_worker_pool import HELLO
from tests.scheduler.test_hosts_that_may_come import TOO_LARGE, host
from tests.scheduler.test_unequal_gpus import costs, small
from tlora.cluster.engine_hosts import TELL_SECONDS, Demand, EngineHosts, QueueDemand
from tlora.cluster.leased_process import LeasedProcess
from tlora.cluster.remote_hosts import ProvenEnd
from tlora.cluster.worker_pool import WorkerPool
from tlora.link.versions import versions
from tlora.protocol import (
    ChangeGroup,
    Event,
    GpusAsked,
    GroupFound,
    GroupLost,
    JobFinished,
    JobGroup,
    JobProfile,
    JobRequest,
    JobSubmitted,
    NodeAdded,
    ParallelPlan,
    RejectJob,
    StartGroup,
    StopGroup,
    Tick,
)
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.shape.cost import CostModel
from tlora.shape.predicted_constants import live_constants
from tlora.worker_protocol import Device, HostLabels


def job(name: str, gpus: int = 1) -> JobSubmitted:
    return JobSubmitted(name, "base", gpus, JobProfile(100.0, 10, 64, 10_000))


def group(*jobs: str, gpus: tuple[int, ...] = (1000,)) -> JobGroup:
    return JobGroup("g", "base", gpus, ParallelPlan(len(gpus), 1024), jobs, (1.0,) * len(jobs))


def total(waiting: Mapping[int, int]) -> int:
    """GPUs."""
    return sum(gpus * count for gpus, count in waiting.items())


def test_demand_is_what_waits_and_is_not_held() -> None:
    demand = QueueDemand()
    told: list[tuple[Event | StartGroup | ChangeGroup | StopGroup | RejectJob, int, set[int]]] = [
        (job("a", 2), 2, set()),
        (job("b"), 3, set()),
        (StartGroup(group("a", gpus=(1000, 1001))), 1, {1000, 1001}),
        (JobRequest("b", "hold"), 0, {1000, 1001}),
        (JobRequest("b", "release"), 1, {1000, 1001}),
        (ChangeGroup(group("a", "b")), 0, {1000}),
        (GroupLost("g", "its host"), 3, set()),
        (GroupFound(group("a", "b"), (job("a"), job("b"))), 0, {1000}),
        (JobFinished("a"), 0, {1000}),
        (StopGroup("g"), 1, set()),
        (JobRequest("b", "hold"), 0, set()),
        (JobRequest("b", "cancel"), 0, set()),
        (GpusAsked("b", 2), 0, set()),
        (job("b"), 1, set()),
        (GpusAsked("b", 2), 2, set()),
        (RejectJob("b", "too large"), 0, set()),
    ]
    for item, waiting, busy in told:
        demand.see(item)
        assert (total(demand.waiting()), demand.busy) == (waiting, busy), item


def test_jobs_wait_for_the_first_host_and_are_judged_by_it() -> None:
    scheduler = Scheduler(LIVE_POLICIES["residual_capacity"](), CostModel({"base": live_constants(1e9)}))
    assert scheduler.handle(NodeAdded("local", ()), 0.0) == []
    assert scheduler.handle(job("narrow"), 1.0) == scheduler.handle(job("wide", 4), 2.0) == []
    actions = scheduler.handle(NodeAdded("host", (1000, 1001)), 3.0)
    assert [action.group.job_ids for action in actions if isinstance(action, StartGroup)] == [("narrow",)]
    assert [action for action in scheduler.handle(job("late", 4), 4.0) if isinstance(action, RejectJob)], "now it is known"


def test_a_job_that_waits_for_another_kind_of_gpu_is_no_demand_for_more_of_the_same() -> None:
    """As the scheduler says of the jobs that it has put aside: one takes more GPUs, one more memory, and one both."""
    scheduler = Scheduler(LIVE_POLICIES["residual_capacity"](), costs(), on_wait=lambda _name, _why: None)
    demand = QueueDemand()
    jobs = [small("fits"), small("wide", gpus=2, least_gpus=2), small("large", **TOO_LARGE), small("both", gpus=2, **TOO_LARGE)]
    for event in (*host("a", 0), *jobs):
        for item in (event, *scheduler.handle(event, 1.0)):
            demand.see(item)
    lacks = scheduler.state.parked
    assert {name: lack.more_would_do for name, lack in lacks.items()} == {"wide": True, "large": False, "both": False}
    hopeless = [name for name, lack in lacks.items() if not lack.more_would_do]
    assert demand.waiting(hopeless) == {2: 1} and demand.lacks_another(lacks)
    for name in hopeless:
        demand.see(JobRequest(name, "hold"))
    assert not demand.lacks_another(lacks), "nobody waits for it"


def test_a_job_that_asks_for_fewer_gpus_starts_with_the_next_tick() -> None:
    """As when an engine cannot bring the host for which it waited."""
    scheduler = Scheduler(LIVE_POLICIES["residual_capacity"](), costs(), on_wait=lambda _name, _why: None)
    scheduler.handle(NodeAdded("a", (1000, 1001)), 1.0)
    assert scheduler.handle(small("wide", gpus=4), 1.0) == [] and "wide" in scheduler.state.parked
    assert scheduler.handle(GpusAsked("wide", 2), 2.0) == []
    assert [action.group.gpus for action in scheduler.handle(Tick(), 3.0) if isinstance(action, StartGroup)] == [(1000, 1001)]


@pytest.fixture
def station(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TcpStation:
    """Of a controller that has no GPUs."""
    opened = WorkerPool.__init__

    def open_without(self: WorkerPool, directory: Path, epoch: int, loads: object, gpus: tuple[int, ...], *rest: object) -> None:
        opened(self, directory, epoch, loads, (), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(WorkerPool, "__init__", open_without)
    return TcpStation(tmp_path)


def test_all_workers_of_a_controller_without_gpus_are_hosts_and_end_by_an_engines_word(station: TcpStation) -> None:
    """Though their processes are on this machine."""
    try:
        pool = station.worker_pool
        lines = {}
        for name in ("one", "other"):
            hello = replace(
                HELLO, incarnation=name, gpus=(0,), jobs=(), versions=versions(), host=HostLabels(name, devices=(Device("cpu", 1 << 30),))
            )
            lines[name], answer = station.say_hello(hello)
            assert b'"ack"' in answer or b'"desiredstate"' in answer, answer
        one, other = sorted(pool.workers.values(), key=lambda worker: worker.gpu)
        assert (one.gpus, other.gpus) == ((1000,), (2000,))
        process = one.process
        assert isinstance(process, LeasedProcess) and isinstance(other.process, LeasedProcess)
        pool.inbox.put(ProvenEnd("one", None, "is on a host that Ray has lost"))
        pool.inbox.put(ProvenEnd("other", 1, "ended with exit status 1"))  # another process of that host
        pool.inbox.put(ProvenEnd("other", os.getpid(), "ended with exit status 1"))
        assert other.process.wait(60) and other.process.how_it_ended() == "ended with exit status 1"
        assert not process.wait(0), "its line stands: the host is not dead"
        lines["one"].close()
        wait_for(lambda: not one.connected)
        pool.inbox.put(ProvenEnd("one", None, "is on a host that Ray has lost"))
        assert process.wait(60) and process.how_it_ended() == "is on a host that Ray has lost"
        lines["other"].close()
    finally:
        station.close()


def test_a_keeper_hears_of_the_last_change_soon_and_not_of_each(tmp_path: Path) -> None:
    heard: list[Demand] = []

    class Listener:
        most_gpus = 0
        want = staticmethod(heard.append)

        def start(self) -> None: ...
        def drain(self) -> None: ...
        def close(self) -> None: ...

    station = TcpStation(tmp_path)
    try:
        hosts = EngineHosts(station.worker_pool, lambda _: Listener())
        hosts.tell()
        assert [total(demand.waiting) for demand in heard] == [0] and hosts.due_in_seconds == math.inf
        for count in range(1, 100):
            hosts.see(job(f"{count}"))
            hosts.tell()
        assert hosts.due_in_seconds <= TELL_SECONDS and len(heard) < 20, "a look at all workers is not for each"
        wait_for(lambda: hosts.due_in_seconds <= 0)
        hosts.tell()
        assert [total(demand.waiting) for demand in heard][-1:] == [99] and hosts.due_in_seconds == math.inf
    finally:
        station.close()
