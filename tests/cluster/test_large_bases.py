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
from tests.shape.made_stages import with_made_stages
from tlora.cluster.hosts import STRIDE
from tlora.cluster.local import LocalBackend
from tlora.cluster.remote_worker import RemoteWorker
from tlora.protocol import GpusLost, JobGroup, JobProfile, JobRequest, JobSubmitted, MemoryFound, ParallelPlan, StartGroup
from tlora.scheduler.gpu_memory import GpuMemory
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.shape.cost import CostModel
from tlora.shape.memory import BaseMemory
from tlora.worker_protocol import Device, HostLabels

STAGED = with_made_stages(MEMORY, *MEMORY.bytes_by_gpus[1:])  # may be cut into stages over hosts


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

    def __init__(self, backend: LocalBackend, policy: str, memory: BaseMemory, *, may_come: bool = True) -> None:
        self.backend, self.told, self.placed = backend, list[tuple[str, str]](), list[JobGroup]()
        on_wait = (lambda *said: self.told.append(said)) if may_come else None
        self.scheduler = Scheduler(LIVE_POLICIES[policy](), costs(memory), on_wait=on_wait)
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
        made._hosts_may_come = True
        yield made


@pytest.mark.parametrize("policy", LIVE_POLICIES)
@pytest.mark.parametrize("first", ["host", "job"])
@pytest.mark.parametrize("in_stages", [False, True])
def test_a_job_waits_for_as_many_gpus_as_hold_its_base(backend: LocalBackend, policy: str, first: str, in_stages: bool) -> None:
    """It asked for one, and waited for ever: "Cut its samples or its rank"."""
    memory = STAGED.cut() if in_stages else STAGED
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
    controlled = Controlled(backend, "residual_capacity", STAGED)
    controlled.submit(order("large"))
    controlled.come("a", STRIDE, STRIDE + 1, room=12 * GB)
    (group,) = controlled.placed
    assert group.gpus == (STRIDE, STRIDE + 1) and backend._wide.stages(group) == 0


def test_a_larger_gpu_that_comes_holds_it_alone(backend: LocalBackend) -> None:
    controlled = Controlled(backend, "residual_capacity", STAGED)
    controlled.submit(order("large"))
    controlled.come("a", STRIDE, room=12 * GB)
    assert controlled.parked == {"large"}
    controlled.come("b", 2 * STRIDE, room=24 * GB)
    assert not controlled.parked and controlled.scheduler.state.jobs["large"].spec.least_gpus == 1
    assert controlled.placed[0].gpus == (2 * STRIDE,)


def test_a_job_of_several_replicas_asks_for_no_fewer_than_its_base_takes(backend: LocalBackend) -> None:
    controlled = Controlled(backend, "fifo", STAGED)
    controlled.submit(order("wide", gpus=3), order("narrow"))
    controlled.come("a", STRIDE, room=12 * GB)
    specs = {name: found.spec for name, found in controlled.scheduler.state.jobs.items()}
    assert {(spec.gpus, spec.least_gpus) for spec in specs.values()} == {(2, 2)}
    controlled.come("b", 2 * STRIDE, 2 * STRIDE + 1, room=12 * GB)
    wide = controlled.scheduler.state.jobs["wide"]
    assert wide.spec.gpus == 2 and wide.spec.on_one_host, "a third would be on another host than those that share the base"
    controlled.come("c", *range(3 * STRIDE, 3 * STRIDE + 3), room=12 * GB)
    controlled.submit(order("later", gpus=3))
    assert controlled.scheduler.state.jobs["later"].spec.gpus == 3


def test_less_memory_than_the_driver_says_takes_more_gpus(backend: LocalBackend) -> None:
    """As a worker finds while the job waits."""
    controlled = Controlled(backend, "fifo", STAGED)
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
        assert least_of(gpus, memory) == 1 and least_of(gpus, memory, gpus=3, least=3) == 3
    assert least_of(GpuMemory(), MEMORY) == 1, "nothing is known of any GPU"
    unknown = costs()
    unknown.memory = {}
    assert gpus.with_parts(unknown, order("a"), lambda _: 1) == order("a"), "nor of the base"


def least_of(known: GpuMemory, memory: BaseMemory = STAGED, **ordered: int) -> int:
    """Of GPUs each of which is on a host of its own."""
    return known.with_parts(costs(memory), order("a", **ordered), lambda _: 1).least_gpus


def test_the_number_is_of_the_largest_gpus_of_which_there_are_enough() -> None:
    gpus = GpuMemory()
    gpus.find((0, 1, 2, 3), (12 * GB, 9 * GB, 9 * GB, 9 * GB))
    assert least_of(gpus) == 3, "two of 12 GB are not there, three of 9 are"
    gpus.find((4,), (12 * GB,))
    assert least_of(gpus) == 2
    assert least_of(gpus, parameters=15 * 10**7) == 3, "beside its adapter"
    assert least_of(gpus, parameters=10**9) == 1, "no number of them holds its adapter"
    whole = replace(MEMORY, bytes_by_gpus=(16 * GB,) * 4)
    assert least_of(gpus, whole) == 1
    reason = gpus.why_too_large(costs(whole), order("a"), 5)
    assert reason is not None and reason.endswith("Train it over a smaller base, or add larger GPUs")


def test_the_number_goes_by_what_the_gpus_of_one_host_hold_and_by_stages_over_several() -> None:
    """It went by what a GPU holds that shares the base with others of its host, also where these are on other hosts."""
    uneven = with_made_stages(MEMORY, 13 * GB, 10 * GB, 6 * GB)  # the fullest of 2, 3, 4
    streams = replace(uneven, streamed_bytes=4 * GB)
    gpus = GpuMemory()
    gpus.find((0, 1, 2, 3), (12 * GB,) * 4)
    cases = [(memory, widest) for memory in (uneven, MEMORY, streams) for widest in (1, 2)]
    fits = [gpus.with_parts(costs(memory), order("a"), lambda _, widest=widest: widest) for memory, widest in cases]
    assert [(job.least_gpus, job.on_one_host) for job in fits] == [(3, False), (2, True), (2, True), (2, True), (1, False), (2, True)]


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_a_base_that_cannot_be_cut_gets_gpus_of_one_host(backend: LocalBackend, policy: str) -> None:
    """It got those of two, on which it cannot be computed, and its jobs failed."""
    controlled = Controlled(backend, policy, MEMORY)
    state = controlled.scheduler.state
    controlled.come("a", STRIDE, room=12 * GB)
    controlled.come("b", 2 * STRIDE, room=12 * GB)
    controlled.submit(order("large", gpus=4))
    assert controlled.parked == {"large"} and not controlled.placed and not state.parked["large"].more_would_do
    why = "its base takes 2 GPUs of one host, as it is not cut into stages, and none has more than 1 with room for it"
    assert controlled.told == [("large", f"{why}. Train it over a smaller base, or add a host with 2")]
    controlled.come("c", 3 * STRIDE, 3 * STRIDE + 1, 3 * STRIDE + 2, room=12 * GB)
    (group,) = controlled.placed
    assert group.gpus == (3 * STRIDE, 3 * STRIDE + 1, 3 * STRIDE + 2) and backend._wide.stages(group) == 0
    controlled.submit(order("second"))
    assert state.jobs["second"].spec.on_one_host and all(len(known.group.gpus) == 3 for known in state.groups.values()), "nor over a and b"


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_parts_that_one_host_shares_are_not_spread_over_the_free_gpus_of_several(backend: LocalBackend, policy: str) -> None:
    """Each host has a GPU that others have filled: the number of those that share it is none of stages."""
    controlled = Controlled(backend, policy, with_made_stages(MEMORY, 13 * GB, 10 * GB, 6 * GB))
    controlled.come("small", 9 * STRIDE, room=5 * GB)
    controlled.come("a", STRIDE, STRIDE + 1, room=12 * GB)
    controlled.come("b", 2 * STRIDE, room=12 * GB)
    controlled.come("c", 3 * STRIDE, room=12 * GB)
    controlled.submit(order("first"), order("second"))
    assert {(job.spec.least_gpus, job.spec.on_one_host) for job in controlled.scheduler.state.jobs.values()} == {(2, True)}
    assert {known.group.gpus for known in controlled.scheduler.state.groups.values()} == {(STRIDE, STRIDE + 1)}


@pytest.mark.parametrize("policy", LIVE_POLICIES)
@pytest.mark.parametrize("drains", [True, False])
def test_jobs_ask_by_the_memory_of_the_hosts_that_are_left(backend: LocalBackend, policy: str, drains: bool) -> None:
    """One that waits and one that trained there asked for one GPU still, which only the host that is gone had room for."""
    controlled = Controlled(backend, policy, STAGED)
    state = controlled.scheduler.state
    controlled.come("large", 9 * STRIDE, room=24 * GB)
    controlled.come("a", STRIDE, STRIDE + 1, room=12 * GB)
    controlled.submit(order("first"), order("second"))
    assert {job.spec.gpus for job in state.jobs.values()} == {1}
    assert [known.group.gpus for known in state.groups.values()] == [(9 * STRIDE,)]
    if drains:
        backend.drain("large")
    else:
        backend.worker_pool.remote_hosts.events.append(GpusLost((9 * STRIDE,)))
    controlled.pass_on()
    assert {(job.spec.gpus, job.spec.least_gpus) for job in state.jobs.values()} == {(2, 2)}
    assert [known.group.gpus for known in state.groups.values()] == [(STRIDE, STRIDE + 1)]
    if drains:
        backend.drain("large", undo=True)
        controlled.pass_on()
        assert {known.group.gpus for known in state.groups.values()} <= {(STRIDE, STRIDE + 1), (9 * STRIDE,)}
        assert {job.spec.gpus for job in state.jobs.values() if job.group_id is None} <= {1}


def test_a_job_that_trains_where_a_host_drains_keeps_its_gpus_until_it_waits(backend: LocalBackend) -> None:
    controlled = Controlled(backend, "fifo", STAGED)
    state = controlled.scheduler.state
    controlled.come("large", 9 * STRIDE, room=24 * GB)
    controlled.come("a", STRIDE, STRIDE + 1, room=12 * GB)
    controlled.submit(order("one"))
    backend.drain("large", finish=True)
    controlled.pass_on()
    assert state.jobs["one"].spec.gpus == 1 and [known.group.gpus for known in state.groups.values()] == [(9 * STRIDE,)]
    assert state.asked_later.keys() == {"one"} and not backend._wide._raised
    backend.ask(JobRequest("one", "hold"))
    controlled.pass_on()
    backend.ask(JobRequest("one", "release"))
    controlled.pass_on()
    assert state.jobs["one"].spec.gpus == 2 and not state.asked_later
    assert [known.group.gpus for known in state.groups.values()] == [(STRIDE, STRIDE + 1)]


def test_gpus_of_which_nothing_is_known_count_as_the_smallest() -> None:
    gpus, large = GpuMemory(), order("a")
    cost = costs(replace(MEMORY, bytes_by_gpus=(11 * GB,)))
    assert gpus.num_with_room(cost, large, 3) == 3
    gpus.find((0, 1), (11 * GB, 24 * GB))
    assert gpus.num_with_room(cost, large, 4) == 1, "the two that are unknown are as the first"
    cost.memory["base"] = replace(MEMORY, bytes_by_gpus=(9 * GB,))
    assert gpus.num_with_room(cost, large, 4) == 4


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_replicas_take_turns_on_the_gpus_that_have_room(backend: LocalBackend, policy: str) -> None:
    """The job asked for all that were there, which it never got, and was told to ask for one."""
    controlled = Controlled(backend, policy, replace(MEMORY, bytes_by_gpus=(16 * GB,)))
    said = list[str]()
    backend._wide._note = said.append
    controlled.come("a", STRIDE, STRIDE + 1, STRIDE + 2, room=12 * GB)
    controlled.come("b", 2 * STRIDE, room=24 * GB)
    controlled.submit(order("wide", gpus=4))
    assert controlled.placed[0].gpus == (2 * STRIDE,) and not controlled.told
    assert said == ["wide: some of its 4 replicas run in turn: 4 GPUs are there as it arrives, of which 3 are too small for it"]
    controlled.come("c", 3 * STRIDE, 3 * STRIDE + 1, room=24 * GB)
    controlled.submit(order("later", gpus=4))
    assert controlled.scheduler.state.jobs["later"].spec.gpus == 3


def test_a_group_whose_base_takes_it_all_is_kept(backend: LocalBackend) -> None:
    """Though the job orders one GPU, and after it has asked for fewer too: it may have got these before that was heard."""
    controlled = Controlled(backend, "fifo", STAGED)
    controlled.submit(order("large"))
    controlled.come("a", STRIDE, room=12 * GB)
    group = JobGroup("g", "base", (STRIDE, 2 * STRIDE), ParallelPlan(2, 1024), ("large",), (1.0,))
    assert backend._wide.keep(group, [1]) == (group, None) and backend._wide.stages(group) == 2 and backend._wide.cuts
    controlled.come("b", 3 * STRIDE, room=24 * GB)
    assert backend._wide.keep(group, [1]) == (group, None)


def test_one_that_trained_fits_on_what_it_had(backend: LocalBackend) -> None:
    controlled = Controlled(backend, "fifo", STAGED)
    controlled.come("a", STRIDE, room=12 * GB)
    assert backend._wide.admit(order("a"), (STRIDE,)) == order("a")
    assert backend._wide.admit(order("b"), (STRIDE, 2 * STRIDE)) == order("b", gpus=2, least=2)


# -- a controller's own GPUs, to which no others come ------------------------------------------------------------------


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_of_two_unequal_gpus_the_larger_trains_what_the_smaller_does_not_hold(tmp_path: Path, policy: str) -> None:
    """A job of two replicas was rejected: "1 of those here has so much. Ask for 1"."""
    said = list[str]()
    with local_backend(tmp_path, note=said.append, memory_bytes=(12 * GB, 24 * GB)) as backend:
        controlled = Controlled(backend, policy, MEMORY, may_come=False)
        controlled.submit(order("wide", gpus=2), order("one"))
        assert controlled.placed[0].gpus == (1,) and {"wide", "one"} == controlled.scheduler.state.jobs.keys()
        assert said == ["wide: some of its 2 replicas run in turn: 2 GPUs are there as it arrives, of which 1 is too small for it"]


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_more_of_the_smaller_gpus_hold_a_base_of_which_there_are_too_few_larger(tmp_path: Path, policy: str) -> None:
    """By the largest it takes two, of which there is one; three of any hold it. It was rejected."""
    rooms = (24 * GB, 12 * GB, 12 * GB, 12 * GB)
    with local_backend(tmp_path, gpus=(0, 1, 2, 3), memory_bytes=rooms) as backend:
        controlled = Controlled(backend, policy, replace(MEMORY, bytes_by_gpus=(30 * GB, 16 * GB, 10 * GB, 9 * GB)), may_come=False)
        controlled.submit(order("large", least=2, gpus=2))
        (group,) = controlled.placed
        assert len(group.gpus) >= 3 == controlled.scheduler.state.jobs["large"].spec.least_gpus


def test_jobs_of_a_controllers_own_gpus_ask_for_as_many_as_hold_what_less_is_free_of(tmp_path: Path) -> None:
    """A worker finds others on its GPU. The job was rejected."""
    with local_backend(tmp_path, memory_bytes=(24 * GB, 24 * GB)) as backend:
        controlled = Controlled(backend, "fifo", MEMORY, may_come=False)
        controlled.submit(order("first", gpus=2), order("second"))
        assert [group.job_ids for group in controlled.placed] == [("first",)]
        backend.reconciler.events.append(MemoryFound((0, 1), (12 * GB, 12 * GB)))
        controlled.pass_on()
        second = controlled.scheduler.state.jobs["second"]
        assert (second.spec.gpus, second.spec.least_gpus) == (2, 2)
