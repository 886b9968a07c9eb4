"""Bases that fit on no GPU of the hosts alone, under a controller that has none: jobs ask for as many GPUs as these are large."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.fake_workers import STARTED, FakeProcess, FakeWorker, local_backend
from tests.cluster.test_local import job
from tests.scheduler.mirror import made_cost
from tests.scheduler.test_hosts_that_may_come import host
from tests.scheduler.test_unequal_gpus import GB, MEMORY
from tlora.cluster.hosts import STRIDE
from tlora.cluster.local import LocalBackend
from tlora.cluster.remote_worker import RemoteWorker
from tlora.protocol import JobGroup, JobProfile, JobSubmitted, MemoryFound, ParallelPlan, StartGroup
from tlora.scheduler.gpu_memory import GpuMemory
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.shape.cost import CostModel
from tlora.shape.memory import BaseMemory
from tlora.worker_protocol import Device, HostLabels


def costs(memory: BaseMemory = MEMORY) -> CostModel:
    """16 GB of base on one GPU, 9 on each of two, 7 of three, 6 of four."""
    cost = made_cost()
    cost.constants = {"base": next(iter(cost.constants.values()))}
    cost = CostModel(cost.constants)
    cost.memory = {"base": memory}
    return cost


def order(name: str, gpus: int = 1, least: int = 1, parameters: int = 10**7) -> JobSubmitted:
    return JobSubmitted(name, "base", gpus, JobProfile(8000.0, 100, 512, parameters), least_gpus=least)


class Controlled:
    """`told`: jobs that were said to wait, and why; `placed`: the groups that were started."""

    def __init__(self, backend: LocalBackend, policy: str, memory: BaseMemory) -> None:
        self.backend, self.told, self.placed = backend, list[tuple[str, str]](), list[JobGroup]()
        self.scheduler = Scheduler(LIVE_POLICIES[policy](), costs(memory), on_wait=lambda *said: self.told.append(said))
        backend.follow(self.scheduler.state)

    def come(self, name: str, *gpus: int, room: int) -> None:
        labels = HostLabels(name, devices=(Device("cpu", room),) * len(gpus))
        for gpu in gpus:
            remote = RemoteWorker((gpu,), None, FakeProcess(), 1, 180.0, labels, gpu // STRIDE * STRIDE)
            remote.reached_at = "10.0.0.1"
            self.backend.worker_pool.workers[gpu] = remote
            FakeWorker(remote, self.backend.worker_pool.inbox)  # type: ignore[arg-type]
        self.backend.worker_pool.remote_hosts.events += host(name, *gpus, room=room)
        self.pass_on()

    def submit(self, *jobs: JobSubmitted) -> None:
        for each in jobs:
            self.backend.submit(each, job(each.job_id))
        self.pass_on()

    def pass_on(self) -> None:
        """All events that there are by now, and what follows from them."""
        self.backend.worker_pool.wake()
        self.backend.advance()
        while self.backend._events:
            for event in self.backend.poll():
                for action in self.scheduler.handle(event, self.backend.now()):
                    self.backend.execute(action)
                    if isinstance(action, StartGroup):
                        self.placed.append(self.backend.reconciler.groups[action.group.group_id])

    @property
    def parked(self) -> set[str]:
        return set(self.scheduler.state.parked)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LocalBackend]:
    with local_backend(tmp_path, gpus=()) as made:
        made._hosts_may_come = made._wide._hosts_may_come = True
        yield made


@pytest.mark.parametrize("policy", LIVE_POLICIES)
@pytest.mark.parametrize("first", ["host", "job"])
@pytest.mark.parametrize("in_stages", [False, True])
def test_a_job_waits_for_as_many_gpus_as_hold_its_base(backend: LocalBackend, policy: str, first: str, in_stages: bool) -> None:
    """It asked for one, and waited for ever: "Cut its samples or its rank"."""
    memory = MEMORY.cut(MEMORY.bytes_by_gpus[1:]) if in_stages else MEMORY
    controlled = Controlled(backend, policy, memory)
    if first == "job":
        controlled.submit(order("large"))
    controlled.come("a", STRIDE, room=12 * GB)
    if first == "host":
        controlled.submit(order("large"))
    assert controlled.parked == {"large"} and not controlled.placed
    assert controlled.told == [("large", "its base takes 2 GPUs and the cluster has 1. Train it over a smaller base, or add GPUs")]
    assert controlled.scheduler.state.parked["large"].more_would_do, "an engine is asked for more of the same"
    controlled.come("b", 2 * STRIDE, room=12 * GB)
    (group,) = controlled.placed
    assert not controlled.parked and group.job_ids == ("large",) and group.gpus == (STRIDE, 2 * STRIDE)
    leader = next(worker for worker in STARTED if worker.remote.load is not None)
    assert leader.load.stages == 2, "no host of one GPU holds it"


def test_gpus_of_one_host_hold_it_in_parts(backend: LocalBackend) -> None:
    controlled = Controlled(backend, "residual_capacity", MEMORY)
    controlled.submit(order("large"))
    controlled.come("a", STRIDE, STRIDE + 1, room=12 * GB)
    (group,) = controlled.placed
    assert group.gpus == (STRIDE, STRIDE + 1) and backend._wide.stages(group) == 0


def test_a_larger_gpu_that_comes_holds_it_alone(backend: LocalBackend) -> None:
    controlled = Controlled(backend, "residual_capacity", MEMORY)
    controlled.submit(order("large"))
    controlled.come("a", STRIDE, room=12 * GB)
    assert controlled.parked == {"large"}
    controlled.come("b", 2 * STRIDE, room=24 * GB)
    assert not controlled.parked and controlled.scheduler.state.jobs["large"].spec.least_gpus == 1
    assert controlled.placed[0].gpus == (2 * STRIDE,)


def test_a_job_of_several_replicas_asks_for_no_fewer_than_its_base_takes(backend: LocalBackend) -> None:
    controlled = Controlled(backend, "fifo", MEMORY)
    controlled.submit(order("wide", gpus=3), order("narrow"))
    controlled.come("a", STRIDE, room=12 * GB)
    specs = {name: found.spec for name, found in controlled.scheduler.state.jobs.items()}
    assert {(spec.gpus, spec.least_gpus) for spec in specs.values()} == {(2, 2)}
    controlled.come("b", 2 * STRIDE, 2 * STRIDE + 1, room=12 * GB)
    assert controlled.scheduler.state.jobs["wide"].spec.gpus == 3


def test_less_memory_than_the_driver_says_takes_more_gpus(backend: LocalBackend) -> None:
    """As a worker finds while the job waits."""
    controlled = Controlled(backend, "fifo", MEMORY)
    controlled.submit(order("large"))
    controlled.come("a", STRIDE, room=12 * GB)
    assert controlled.scheduler.state.jobs["large"].spec.gpus == 2
    backend.reconciler.events.append(MemoryFound((STRIDE,), (9 * GB,)))
    controlled.pass_on()
    assert controlled.scheduler.state.jobs["large"].spec.gpus == 3


def test_a_job_that_fits_on_one_gpu_asks_for_what_it_orders(backend: LocalBackend) -> None:
    """Also where its base is streamed there, or leaves little beside it: what trained goes on so."""
    for memory, room in ((MEMORY, 24 * GB), (MEMORY, 17 * GB), (replace(MEMORY, streamed_bytes=4 * GB), 12 * GB)):
        gpus = GpuMemory()
        gpus.find((0, 1, 2, 3), (room,) * 4)
        assert gpus.least_gpus(costs(memory), order("a")) == 1
        assert gpus.least_gpus(costs(memory), order("a", gpus=3, least=3)) == 3
    assert GpuMemory().least_gpus(costs(), order("a")) == 1, "nothing is known of any GPU"
    unknown = costs()
    unknown.memory = {}
    assert gpus.least_gpus(unknown, order("a")) == 1, "nor of the base"


def test_the_number_is_of_the_largest_gpus_of_which_there_are_enough() -> None:
    gpus = GpuMemory()
    gpus.find((0, 1, 2, 3), (12 * GB, 9 * GB, 9 * GB, 9 * GB))
    assert gpus.least_gpus(costs(), order("a")) == 3, "two of 12 GB are not there, three of 9 are"
    gpus.find((4,), (12 * GB,))
    assert gpus.least_gpus(costs(), order("a")) == 2
    assert gpus.least_gpus(costs(), order("a", parameters=15 * 10**7)) == 3, "beside its adapter"
    assert gpus.least_gpus(costs(), order("a", parameters=10**9)) == 1, "no number of them holds its adapter"
    whole = replace(MEMORY, bytes_by_gpus=(16 * GB,) * 4)
    assert gpus.least_gpus(costs(whole), order("a")) == 1
    reason = gpus.why_too_large(costs(whole), order("a"), 5)
    assert reason is not None and reason.endswith("Train it over a smaller base, or add larger GPUs")


def test_a_group_whose_base_takes_it_all_is_kept(backend: LocalBackend) -> None:
    """Though the job orders one GPU, and after it has asked for fewer too: it may have got these before that was heard."""
    controlled = Controlled(backend, "fifo", MEMORY)
    controlled.submit(order("large"))
    controlled.come("a", STRIDE, room=12 * GB)
    group = JobGroup("g", "base", (STRIDE, 2 * STRIDE), ParallelPlan(2, 1024), ("large",), (1.0,))
    assert backend._wide.keep(group, [1]) == (group, None) and backend._wide.stages(group) == 2 and backend._wide.cuts
    controlled.come("b", 3 * STRIDE, room=24 * GB)
    assert backend._wide.keep(group, [1]) == (group, None)


def test_one_that_trained_fits_on_what_it_had(backend: LocalBackend) -> None:
    controlled = Controlled(backend, "fifo", MEMORY)
    controlled.come("a", STRIDE, room=12 * GB)
    assert backend._wide.admit(order("a"), 1) == order("a")
    assert backend._wide.admit(order("b"), 2) == order("b", gpus=2, least=2)
