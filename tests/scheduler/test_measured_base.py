"""A worker has measured a base: predictions, and slowdowns follow from that; groups keep GPUs and jobs as far as bounds allow."""

from __future__ import annotations

from tests.scheduler.invariants import check
from tests.scheduler.mirror import BASES, made_scheduler, made_settings, made_spec
from tlora.protocol import BaseMeasured, BaseSpeed, ChangeGroup, GroupReady, NodeAdded, StartGroup, Tick
from tlora.scheduler.plans import shared_plan
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.scheduler import Scheduler
from tlora.shape.moves import MoveCosts

NORTH, SOUTH = BASES
SLOW = BaseSpeed(tokens_per_second=10.0, launch_seconds=1.0, floor_seconds=0.0, member_seconds=0.5)


def test_a_jobs_time_alone_is_that_of_the_new_constants() -> None:
    for name in POLICIES:
        scheduler = made_scheduler(POLICIES[name](), 4)
        scheduler.handle(made_spec("a"), 0.0)
        scheduler.handle(made_spec("b", base_model=SOUTH), 0.0)
        before = scheduler.state.jobs["b"].alone_step_seconds
        scheduler.handle(GroupReady("g0"), 1.0)
        group = scheduler.state.groups["g0"].group
        scheduler.handle(BaseMeasured(NORTH, "CPU", SLOW), 2.0)
        job = scheduler.state.jobs["a"]
        assert job.alone_step_seconds == 1.0 + 1000 / 10.0 and scheduler.state.jobs["b"].alone_step_seconds == before
        assert job.need == 1000.0 / (job.spec.max_slowdown * job.alone_step_seconds)
        after = scheduler.state.groups["g0"].group
        assert (after.gpus, after.job_ids) == (group.gpus, group.job_ids), "what runs, runs on"
        check(scheduler.state)


def test_a_base_that_nobody_asks_for() -> None:
    scheduler = made_scheduler(POLICIES["fifo"](), 1)
    assert scheduler.handle(BaseMeasured("new", "CPU", SLOW), 0.0) == []
    assert scheduler.handle(made_spec("a", base_model="new"), 1.0)
    assert scheduler.handle(NodeAdded("n1", (7,)), 2.0) == [] == scheduler.handle(Tick(), 3.0)


def shared() -> Scheduler:
    """Two jobs that share a GPU, of which the second came last, and one of the other base on a second GPU."""
    scheduler = made_scheduler(residual_capacity(made_settings(preemption=False)), 1)
    for name in ("first", "last"):
        scheduler.handle(made_spec(name, tokens=300.0, steps=100_000, max_slowdown=1.6), 0.0)
    assert [known.group.job_ids for known in scheduler.state.groups.values()] == [("first", "last")]
    scheduler.handle(GroupReady("g0"), 1.0)
    return scheduler


def test_who_shares_within_its_bound_as_measured_goes_on_under_the_plan_for_that() -> None:
    scheduler = shared()
    before = scheduler.state.groups["g0"].group
    quick = BaseSpeed(tokens_per_second=1e6, launch_seconds=0.5, floor_seconds=0.0, member_seconds=0.001)
    (change,) = scheduler.handle(BaseMeasured(NORTH, "CPU", quick), 2.0)
    assert isinstance(change, ChangeGroup) and change.group.gpus == before.gpus and change.group.job_ids == before.job_ids
    jobs = [scheduler.state.jobs[name] for name in before.job_ids]
    assert change.group.plan == shared_plan(scheduler.state.cost, 1, 1, jobs)
    assert change.group.weights == tuple(job.weight for job in jobs) != before.weights
    for seconds in (3.0, 4.0, 5000.0):
        assert scheduler.handle(Tick(), seconds) == [], "once"
    assert scheduler.handle(BaseMeasured(NORTH, "CPU", quick), 5001.0) == [], "it was measured so before"


def test_whose_bound_cannot_hold_as_measured_waits_until_there_is_room() -> None:
    """The last to come leaves, and does not come back; the first is alone, as it asked to be. A GPU that comes is the other's."""
    scheduler = shared()
    *_, change = scheduler.handle(BaseMeasured(NORTH, "CPU", SLOW), 2.0)
    assert isinstance(change, ChangeGroup) and change.group.job_ids == ("first",) and list(scheduler.state.pending) == ["last"]
    for seconds in (3.0, 700.0, 5000.0):
        assert scheduler.handle(Tick(), seconds) == []
    (start,) = scheduler.handle(NodeAdded("n1", (7,)), 5001.0)
    assert isinstance(start, StartGroup) and start.group.job_ids == ("last",) and start.group.gpus == (7,)
    check(scheduler.state)


def test_who_has_to_leave_goes_where_there_is_room_at_once() -> None:
    """A start takes so long here that nobody leaves a group for what it gains."""
    scheduler = made_scheduler(
        residual_capacity(made_settings(preemption=False, elastic=False, moves=MoveCosts(cold_start_seconds=1e9))), 1
    )
    for name in ("first", "last"):
        scheduler.handle(made_spec(name, tokens=300.0, steps=100_000, max_slowdown=1.6), 0.0)
    assert scheduler.handle(NodeAdded("n1", (7,)), 1.0) == []
    *_, change, start = scheduler.handle(BaseMeasured(NORTH, "CPU", SLOW), 2.0)
    assert isinstance(change, ChangeGroup) and change.group.job_ids == ("first",)
    assert isinstance(start, StartGroup) and start.group.job_ids == ("last",)


def test_short_jobs_that_waited_for_a_worker_to_load_are_joined_by_all_others_once_it_is_ready() -> None:
    """Loading takes longer than all their steps do; they are not taken for nearly done, ahead of all who could share with them."""
    scheduler = made_scheduler(residual_capacity(made_settings(preemption=False)), 1)
    names = ("first", "second", "third")
    for name in names:
        scheduler.handle(made_spec(name, steps=10, max_slowdown=1.4), 0.0)
    scheduler.handle(Tick(), 200.0)
    assert list(scheduler.state.pending) == ["second", "third"], "as its constants were"
    launching = BaseSpeed(tokens_per_second=1000.0, launch_seconds=5.0, floor_seconds=0.0, member_seconds=0.001)
    scheduler.handle(BaseMeasured(NORTH, "CPU", launching), 201.0)
    scheduler.handle(GroupReady("g0"), 202.0)
    changes = scheduler.handle(Tick(), 212.0)
    assert [change.group.job_ids for change in changes if isinstance(change, ChangeGroup)] == [names[:2], names]
    assert not scheduler.state.pending
    check(scheduler.state)
