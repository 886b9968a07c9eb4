"""A worker has measured a base: predictions, and slowdowns follow from that; groups that run go on."""

from __future__ import annotations

from tests.scheduler.invariants import check
from tests.scheduler.mirror import BASES, made_scheduler, made_spec
from tlora.protocol import BaseMeasured, BaseSpeed, GroupReady, NodeAdded, Tick
from tlora.scheduler.policies import POLICIES

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
        assert scheduler.state.groups["g0"].group == group, "what runs, runs on"
        check(scheduler.state)


def test_a_base_that_nobody_asks_for() -> None:
    scheduler = made_scheduler(POLICIES["fifo"](), 1)
    assert scheduler.handle(BaseMeasured("new", "CPU", SLOW), 0.0) == []
    assert scheduler.handle(made_spec("a", base_model="new"), 1.0)
    assert scheduler.handle(NodeAdded("n1", (7,)), 2.0) == [] == scheduler.handle(Tick(), 3.0)
