"""Jobs that cannot run on the hosts that are there, where others may come: they wait aside, and none waits behind them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.scheduler.mirror import Mirror, made_cost, made_spec, tell
from tests.scheduler.test_unequal_gpus import GB, MEMORY, costs, small
from tests.shape.made_stages import with_made_stages
from tlora.cluster.hosts import node_events
from tlora.protocol import (
    ChangeGroup,
    Event,
    GpusAsked,
    GpusLost,
    GpusUnheard,
    GroupFound,
    JobFinished,
    JobGroup,
    JobRequest,
    JobSubmitted,
    MemoryFound,
    NodeAdded,
    NodeDraining,
    ParallelPlan,
    RejectJob,
    StartGroup,
    StopGroup,
    Tick,
)
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.shape import CPU_SHARE
from tlora.shape.cost import CostModel
from tlora.worker_protocol import Device, HostLabels

TOO_LARGE: dict[str, Any] = {"longest": 16384, "tokens": 16384.0, "parameters": 2 * 10**9}  # for 24 GB


class Cluster:
    """`told`: jobs that were said to wait, and why."""

    def __init__(self, policy: str = "fifo", *, may_come: bool = True, cost: CostModel | None = None) -> None:
        self.told: list[tuple[str, str]] = []
        on_wait = (lambda name, why: self.told.append((name, why))) if may_come else None
        self.scheduler, self.mirror, self.now = Scheduler(LIVE_POLICIES[policy](), cost or costs(), on_wait=on_wait), Mirror(), 0.0

    def tell(self, *events: Event) -> tuple[list[tuple[str, ...]], list[str]]:
        """Jobs that are placed, by group, and those that are rejected."""
        self.now += 1.0
        actions = [action for event in events for action in tell(self.scheduler, self.mirror, event, self.now)]
        placed = [action.group.job_ids for action in actions if isinstance(action, StartGroup | ChangeGroup)]
        return placed, [action.job_id for action in actions if isinstance(action, RejectJob)]

    @property
    def parked(self) -> set[str]:
        state = self.scheduler.state
        assert state.parked.keys() <= state.held and not state.parked.keys() & state.pending.keys()
        return set(state.parked)


def host(name: str, *gpus: int, room: int = 24 * GB) -> list[Event]:
    return node_events(HostLabels(name, devices=(Device("cpu", int(room * len(gpus) / CPU_SHARE) + 1),) * len(gpus)), gpus)


def cut(name: str, **others: object) -> JobSubmitted:
    """Over a base that takes two GPUs, as one that is ordered in stages does."""
    return small(name, gpus=2, least_gpus=2, **others)


@pytest.mark.parametrize("policy", LIVE_POLICIES)
@pytest.mark.parametrize("first", ["host", "job"])
def test_a_job_over_a_base_in_stages_waits_for_the_second_host(policy: str, first: str) -> None:
    """It was rejected while there was one GPU, whether it came before that or after."""
    cluster = Cluster(policy)
    events: list[Event] = [*host("a", 0), cut("wide")] if first == "host" else [cut("wide"), *host("a", 0)]
    assert cluster.tell(*events) == ([], []) and cluster.parked == {"wide"}
    assert cluster.told == [("wide", "its base takes 2 GPUs and the cluster has 1. Train it over a smaller base, or add GPUs")]
    assert cluster.tell(small("one")) == ([("one",)], []), "none waits behind it"
    cluster.tell(JobFinished("one"))
    placed, rejected = cluster.tell(*host("b", 1000))
    assert (placed[-1], rejected) == (("wide",), []) and not cluster.parked and len(cluster.told) == 1


def test_without_hosts_to_come_it_is_rejected() -> None:
    cluster = Cluster(may_come=False)
    assert cluster.tell(*host("a", 0), cut("wide"), small("late", **TOO_LARGE)) == ([], ["wide", "late"])


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_the_first_host_to_come_back_decides_for_no_job_that_waits_for_a_larger_one(policy: str) -> None:
    """As after a restart of a controller without GPUs of its own, whose smallest host dials first."""
    cluster = Cluster(policy)
    assert cluster.tell(small("large", **TOO_LARGE), *host("small", 0)) == ([], []) and cluster.parked == {"large"}
    assert "at most 22.35 GiB may be used of a GPU here" in cluster.told[0][1]
    assert cluster.tell(*host("smaller", 1000, room=20 * GB)) == ([], []) and cluster.parked == {"large"}
    placed, _ = cluster.tell(*host("large", 2000, room=80 * GB))
    assert placed == [("large",)] and cluster.mirror.groups["g0"].gpus == (2000,)


def test_what_users_ask_of_a_job_that_waits_for_hosts_is_kept() -> None:
    cluster = Cluster()
    cluster.tell(*host("a", 0), cut("held"), cut("free"), cut("ended"), JobRequest("free", "release"), JobRequest("held", "hold"))
    assert cluster.parked == {"free", "ended"}, "a release of what nobody holds changes nothing"
    cluster.tell(JobRequest("ended", "cancel"))
    assert cluster.parked == {"free"} and "ended" not in cluster.scheduler.state.jobs
    cluster.tell(JobRequest("held", "hold"), JobRequest("held", "release"))
    assert cluster.parked == {"free", "held"} and len(cluster.told) == 3, "each is told of once"
    cluster.tell(JobRequest("held", "hold"))
    assert cluster.tell(*host("b", 1000))[0] == [("free",)]
    cluster.tell(JobFinished("free"))
    assert cluster.scheduler.state.held == {"held"}
    assert cluster.tell(JobRequest("held", "release"))[0] == [("held",)]


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_a_job_that_waits_may_ask_for_fewer_gpus_and_for_more(policy: str) -> None:
    cluster = Cluster(policy)
    state = cluster.scheduler.state
    cluster.tell(*host("a", 0), small("runs"), small("wide", gpus=4), small("cut", gpus=4, least_gpus=3))
    assert cluster.parked == {"wide", "cut"} and state.asked == {1: 1}, "those that wait aside are no reason to look for room for four"
    assert cluster.tell(GpusAsked("wide", 2), GpusAsked("cut", 2), GpusAsked("runs", 2), GpusAsked("nobody", 1)) == ([], [])
    assert cluster.parked == {"wide", "cut"} and state.jobs["cut"].spec.gpus == 4, "its base takes three"
    assert cluster.tell(GpusAsked("wide", 1)) == ([], []), "it is decided on with the host that has come"
    assert cluster.parked == {"cut"} and state.asked == {1: 2} and state.tenants.open_jobs == {"": 2}
    placed, _ = cluster.tell(JobFinished("runs"))
    assert placed == [("wide",)]
    cluster.tell(JobRequest("cut", "cancel"), JobFinished("wide"))
    assert not state.asked and not state.parked and not state.tenants.open_jobs


@pytest.mark.parametrize("policy", LIVE_POLICIES)
@pytest.mark.parametrize("room", [24 * GB, 80 * GB])
def test_a_job_that_asks_for_the_gpus_of_a_host_that_is_about_to_come_is_judged_with_it(policy: str, room: int) -> None:
    """It was said to wait for that host, once and for all; what it really waits for later was not said."""
    for gpus, told in ((3, []), (5, [("wide", "it asks for 5 GPUs and the cluster has 3. Ask for fewer")])):
        cluster = Cluster(policy)
        cluster.tell(*host("a", 0), small("runs"), small("wide"))
        cluster.tell(GpusAsked("wide", gpus), *host("b", 1000, 1001, room=room))
        assert cluster.scheduler.state.jobs["wide"].spec.gpus == gpus and cluster.told == told
        assert cluster.parked == {name for name, _ in told}


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_a_job_that_waits_may_need_more_gpus_than_it_did(policy: str) -> None:
    """What was predicted of it on one is forgotten: it waited on, as that was the most that it could use."""
    cluster = Cluster(policy)
    cluster.tell(*host("a", 0, 1), small("runs", gpus=2, tokens=512.0, max_slowdown=1.0))
    assert cluster.mirror.groups["g0"].gpus == (0, 1)
    assert cluster.tell(small("one", tokens=512.0, max_slowdown=1.0), Tick()) == ([], [])
    assert cluster.tell(GpusAsked("one", 2, 3), GpusAsked("one", 2, 0)) == ([], []), "no such thing can be"
    assert cluster.tell(GpusAsked("one", 2, 2)) == ([], []) and cluster.scheduler.state.jobs["one"].spec.least_gpus == 2
    placed, _ = cluster.tell(JobFinished("runs"))
    assert placed == [("one",)] and cluster.mirror.groups["g1"].gpus == (0, 1)


def test_a_job_that_waited_aside_has_its_place_in_the_queue() -> None:
    """In that in which jobs arrived, though it began to wait there after the second."""
    cluster = Cluster("fifo")
    cluster.tell(*host("a", 0), small("runs"), cut("first"), small("second"))
    assert cluster.tell(*host("b", 1000)) == ([], []), "the free GPU is not the second's"
    assert cluster.tell(JobFinished("runs"))[0] == [("first",)]


def test_the_time_alone_follows_the_hosts_that_come_and_go() -> None:
    """Of a job over two GPUs: on two hosts of one, on one host of two, and on two again."""
    cluster = Cluster()
    state = cluster.scheduler.state
    cluster.tell(small("wide", gpus=2), *host("a", 0), *host("b", 1000))
    apart = state.jobs["wide"].alone_step_seconds
    assert state.jobs["wide"].alone_nodes == 2
    cluster.tell(*host("c", 2000, 2001))
    assert state.jobs["wide"].alone_nodes == 1 and state.jobs["wide"].alone_step_seconds < apart
    cluster.tell(NodeDraining("c", finish=True))
    assert state.jobs["wide"].alone_nodes == 2 and state.jobs["wide"].alone_step_seconds == apart
    cluster.tell(NodeAdded("c", (2000, 2001)), GpusLost((2000,)))
    assert state.jobs["wide"].alone_nodes == 2


def test_a_job_that_trains_is_not_judged_when_a_controller_finds_it() -> None:
    """Its replicas take turns on the GPU that there was when it arrived; the next controller was told of as many as it orders."""
    for may_come in (True, False):
        cluster, spec = Cluster(may_come=may_come), small("a", gpus=2)
        cluster.tell(*host("a", 0))
        found = GroupFound(JobGroup("g0", spec.base_model, (0,), ParallelPlan(1, 1024), ("a",), (1.0,)), (spec,), (3,))
        assert cluster.scheduler.handle(found, 2.0) == [] and cluster.scheduler.state.jobs["a"].group_id == "g0"


def test_of_a_base_in_stages_a_gpu_has_its_part() -> None:
    """Each GPU has room for 16 GB of base, but not for that and 4 GB of adapter: the job was never placed."""
    spec = cut("wide", parameters=2 * 10**8, tokens=64_000.0)
    for memory, fits in ((with_made_stages(MEMORY, 9 * GB, 7 * GB).cut(), True), (MEMORY, False)):
        cost = made_cost()
        cost.memory = {spec.base_model: memory}
        cluster = Cluster(cost=cost)
        placed, _ = cluster.tell(*host("a", 0, room=20 * GB), *host("b", 1000, room=20 * GB), spec)
        assert placed == ([("wide",)] if fits else []) and cluster.parked == (set() if fits else {"wide"})
        assert cost.is_whole(spec.base_model, 20 * GB) != fits, "as its GPUs cannot change in place"


def test_a_host_that_is_left_may_be_taken_back() -> None:
    """A job over both hosts was rejected while one of them was drained."""
    cluster = Cluster("residual_capacity", may_come=False, cost=made_cost())
    cluster.tell(NodeAdded("a", (0,)), NodeAdded("b", (1000,)), made_spec("one", tokens=8000.0), made_spec("other", tokens=8000.0))
    cluster.tell(NodeDraining("b", finish=True))
    assert cluster.tell(made_spec("wide", gpus=2, tokens=8000.0, max_slowdown=1.0)) == ([], [])
    assert "wide" in cluster.scheduler.state.pending


def idle(name: str, *gpus: int) -> NodeAdded:
    return NodeAdded(name, gpus)


@pytest.mark.parametrize("lost", [GpusLost((4,)), NodeDraining("b")])
@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_a_wide_job_stays_aside_while_hosts_go_and_come_back_one_by_one(policy: str, lost: Event) -> None:
    cluster = Cluster(policy, cost=made_cost())
    cluster.tell(idle("a", 0, 1, 2, 3), idle("b", 4), idle("c", 5, 6, 7))
    cluster.tell(made_spec("wide", 9, 9000.0))
    assert cluster.parked == {"wide"} and "it asks for 9 GPUs and the cluster has 8" in cluster.told[0][1]
    cluster.tell(lost)
    cluster.tell(GpusLost((5, 6, 7)))
    cluster.tell(idle("b", 4))
    assert cluster.parked == {"wide"} and "the 5 that are there now" in cluster.scheduler.state.parked["wide"].reason
    cluster.tell(idle("c", 5, 6, 7))
    assert cluster.parked == {"wide"} and "the cluster has 8" in cluster.scheduler.state.parked["wide"].reason
    assert cluster.tell(made_spec("small")) == ([("small",)], []) and len(cluster.told) == 1
    cluster.tell(JobFinished("small"))
    assert cluster.tell(idle("d", 10, 11, 12, 13))[0] == [("wide",)]


@pytest.mark.parametrize("may_come", [True, False])
def test_a_job_that_came_while_a_host_was_away_starts_when_it_is_back(may_come: bool) -> None:
    cluster = Cluster(may_come=may_come, cost=made_cost())
    cluster.tell(idle("a", 0, 1, 2, 3), idle("b", 4), idle("c", 5, 6, 7))
    cluster.tell(GpusLost((4,)))
    assert cluster.tell(made_spec("wide", 8, 8000.0)) == ([], []), "one may come back"
    assert cluster.tell(idle("b", 4)) == ([("wide",)], []) and not cluster.parked


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_a_larger_host_puts_no_wide_job_aside(policy: str) -> None:
    """Of four hosts of 4 GPUs it takes all. Beside one of 8 it was said to need two of these, or that one and one of the others."""
    cluster = Cluster(policy, cost=made_cost())
    cluster.tell(*[idle(f"h{host}", *range(10 * host, 10 * host + 4)) for host in range(4)])
    cluster.tell(made_spec("runs", 4, 32_000.0, 10**6, max_slowdown=1.0, priority=1.0))
    assert cluster.tell(made_spec("wide", 16, 128_000.0)) == ([], []) and not cluster.parked
    cluster.tell(idle("large", *range(100, 108)))
    assert not cluster.parked and not cluster.told
    assert (cluster.scheduler.state.jobs["wide"].group_id is not None) == (policy != "residual_capacity-growth"), (
        "there the other has grown"
    )


def test_a_cluster_that_is_not_known_as_a_whole_rejects_no_wide_job() -> None:
    cluster = Cluster(may_come=False, cost=made_cost())
    cluster.tell(made_spec("wide", 24, 192_000.0), idle("a", 0, 1, 2, 3), idle("b", 10, 11, 12, 13), idle("c", *range(20, 28)))
    assert cluster.tell(idle("d", *range(30, 38))) == ([("wide",)], [])


@pytest.mark.parametrize("may_come", [True, False])
def test_a_job_that_is_released_is_judged_by_the_hosts_that_are_there(may_come: bool) -> None:
    cluster = Cluster(may_come=may_come)
    cluster.tell(*host("a", 0, room=80 * GB), small("large", **TOO_LARGE), JobRequest("large", "hold"), MemoryFound((0,), (24 * GB,)))
    _, rejected = cluster.tell(JobRequest("large", "release"))
    assert (cluster.parked, rejected) == (({"large"}, []) if may_come else (set(), ["large"]))
    assert cluster.tell(small("small")) == ([("small",)], [])


# -- hosts of unequal sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least_gpus", [1, 8])
@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_a_job_gets_the_gpus_of_hosts_of_four_two_and_two(policy: str, least_gpus: int) -> None:
    """As replicas, and in stages. It was rejected: nodes of 4 were too few to hold 8, or 7 with a part of another."""
    for gpus in (8, 7):
        cluster = Cluster(policy, cost=made_cost())
        cluster.tell(idle("a", 0, 1, 2, 3), idle("b", 4, 5), idle("c", 6, 7), made_spec("narrow", 2, 2000.0, max_slowdown=1.0))
        assert cluster.tell(made_spec("wide", gpus, 8000.0 * gpus, max_slowdown=1.0, least_gpus=min(gpus, least_gpus)))[1] == []
        assert cluster.scheduler.state.jobs["wide"].group_id is None or policy in ("srtf", "las"), "two are not free"
        cluster.tell(JobFinished("narrow"), Tick())
        (group,) = [known.group for known in cluster.scheduler.state.groups.values() if "wide" in known.group.job_ids]
        assert len(group.gpus) == (8 if policy == "residual_capacity-growth" else gpus) and group.gpus[:6] == tuple(range(6))


@pytest.mark.parametrize("policy", ["residual_capacity", "residual_capacity-growth", "srtf", "las"])
def test_long_jobs_on_hosts_of_four_two_and_two_give_way_to_a_wide_one(policy: str) -> None:
    cluster = Cluster(policy, cost=made_cost())
    cluster.tell(idle("a", 0, 1, 2, 3), idle("b", 4, 5), idle("c", 6, 7))
    cluster.tell(*[made_spec(f"long{number}", 2, 2000.0, 10**6, max_slowdown=1.0) for number in range(4)])
    assert not cluster.scheduler.state.pool.num_free
    cluster.now += 50_000.0
    placed, _ = cluster.tell(made_spec("wide", 7, 7000.0, max_slowdown=1.0, priority=1.0))
    (group,) = [known.group for known in cluster.scheduler.state.groups.values() if "wide" in known.group.job_ids]
    assert ("wide",) in placed and len(group.gpus) == 7 and len(cluster.scheduler.state.pending) == 4


def test_what_a_group_has_beyond_its_share_goes_to_a_wide_job_on_any_hosts() -> None:
    """It goes on with the rest. Its share is less the more jobs wait."""
    cluster = Cluster("residual_capacity-growth", cost=made_cost())
    state = cluster.scheduler.state
    cluster.tell(idle("a", 0, 1, 2, 3), idle("b", 4, 5), idle("c", 6, 7), idle("d", 8, 9))
    cluster.tell(made_spec("grown", 1, 8000.0, 10**6, longest=100, max_slowdown=8.0))
    assert len(state.groups["g0"].group.gpus) == 4
    cluster.tell(*[made_spec(f"wide{number}", 8, 8000.0, 10**5, max_slowdown=1.0) for number in range(8)])
    assert state.groups["g0"].group.gpus == (2, 3) and len(state.pending) == 7 and not state.pool.num_free


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_jobs_that_whole_hosts_hold_still_take_these(policy: str) -> None:
    cluster = Cluster(policy, cost=made_cost())
    cluster.tell(idle("a", 0, 1), idle("b", 2, 3, 4, 5), idle("c", 6, 7), made_spec("wide", 6, 48_000.0, max_slowdown=1.0))
    (group,) = [known.group for known in cluster.scheduler.state.groups.values()]
    assert len(group.gpus) == (8 if policy == "residual_capacity-growth" else 6) and set(group.gpus) > {2, 3, 4, 5}


@pytest.mark.parametrize("policy", sorted(LIVE_POLICIES))
def test_a_host_of_which_nothing_is_heard_gets_no_job(policy: str) -> None:
    """One that trains there stays, and those that wait go where somebody is heard."""
    cluster = Cluster(policy)
    cluster.tell(NodeAdded("a", (0,)), NodeAdded("b", (1, 2)), GpusUnheard((1, 2), "its lease"))
    assert cluster.tell(small("one"), Tick()) == ([("one",)], [])
    (group,) = cluster.scheduler.state.groups.values()
    assert group.group.gpus == (0,)
    cluster.tell(GpusUnheard((0,), "its lease"), Tick())
    placed, _ = cluster.tell(small("two"), small("three"), Tick())
    assert not placed and cluster.scheduler.state.pending.keys() == {"two", "three"}
    cluster.tell(GpusUnheard((1, 2), ""), Tick())
    gpus = {gpu for known in cluster.scheduler.state.groups.values() for gpu in known.group.gpus}
    assert len(gpus) > 1 and not cluster.scheduler.state.pending
    cluster.tell(GpusLost((0,)), Tick())
    assert not any(map(cluster.scheduler.state.pool.is_avoided, ("a", "b")))


@pytest.mark.parametrize("policy", sorted(LIVE_POLICIES))
def test_a_job_that_waits_begins_where_a_host_is_heard_again_while_another_is_no_more(policy: str) -> None:
    cluster = Cluster(policy)
    cluster.tell(NodeAdded("a", (0,)), NodeAdded("b", (1,)), GpusUnheard((0, 1), "its lease"), GpusUnheard((1,), ""), small("one"), Tick())
    cluster.tell(GpusUnheard((1,), "its lease"), small("two"), Tick())
    cluster.tell(GpusUnheard((1,), ""), Tick())
    assert cluster.scheduler.state.pending.keys() == {"two"}
    cluster.tell(GpusUnheard((1,), "its lease"))
    assert cluster.tell(GpusUnheard((0,), ""))[0] and not cluster.scheduler.state.pending


def test_a_group_that_is_found_stays_though_its_host_was_cut_off_meanwhile() -> None:
    """As one does that was there before."""
    cluster, spec = Cluster(), small("a", gpus=2)
    cluster.tell(NodeAdded("a", (0, 1)), GpusUnheard((1,), "its lease"))
    found = GroupFound(JobGroup("g0", spec.base_model, (0, 1), ParallelPlan(2, 1024), ("a",), (1.0,)), (spec,), (3,))
    pool = cluster.scheduler.state.pool
    assert cluster.scheduler.handle(found, 2.0) == [] and pool.group_on == {0: "g0", 1: "g0"} and pool.unheard == {1}
    cluster.scheduler.handle(JobFinished("a"), 3.0)
    assert pool.num_free == 1
    assert cluster.scheduler.handle(replace(found, jobs=()), 4.0) == [StopGroup("g0")] and pool.num_free == 1
