"""Groups of an earlier controller are taken over as they run; what cannot be is stopped, and its jobs wait."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.sim.small_clusters import even_cost, made_job
from tlora.protocol import (
    Action,
    ChangeGroup,
    Event,
    GroupFound,
    JobGroup,
    JobSubmitted,
    NodeAdded,
    ParallelPlan,
    StartGroup,
    StepsDone,
    StopGroup,
    Tick,
)
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.scheduler import Scheduler

NOW = 100.0


def order(name: str, submitted_at: float | None = 20.0) -> JobSubmitted:
    return replace(made_job(name, 100).job, submitted_at=submitted_at)


def group(name: str, gpu: int, *jobs: str) -> JobGroup:
    return JobGroup(name, order("a").base_model, (gpu,), ParallelPlan(1, 1024), jobs, tuple(1.0 for _ in jobs))


def told(scheduler: Scheduler, *events: Event) -> list[Action]:
    return [action for event in events for action in scheduler.handle(event, NOW)]


@pytest.fixture
def scheduler() -> Scheduler:
    made = Scheduler(POLICIES["fifo"](), even_cost())
    assert told(made, NodeAdded("n", (0, 1))) == []
    return made


def test_it_goes_on_as_it_is(scheduler: Scheduler) -> None:
    found = group("g7", 1, "a", "b")
    assert told(scheduler, GroupFound(found, (order("a"), order("b", 30.0)))) == []
    state = scheduler.state
    assert state.groups["g7"].group == found and state.groups["g7"].ready and state.pool.num_free == 1
    assert {name: job.submitted_at for name, job in state.jobs.items()} == {"a": 20.0, "b": 30.0}
    assert told(scheduler, Tick()) == []
    scheduler.handle(StepsDone("a", "g7", 40, 1.0), NOW)
    assert state.jobs["a"].steps_done == 40
    started = [action for action in told(scheduler, order("c", None)) if isinstance(action, StartGroup)]
    assert started[0].group.group_id == "g8" and started[0].group.gpus == (0,), "its number is not given again"


def test_nothing_is_decided_before_the_last_was_found(scheduler: Scheduler) -> None:
    """A policy may want more GPUs for the first than are left when the second is known."""
    assert told(scheduler, GroupFound(group("g0", 0, "a"), (order("a"),)), GroupFound(group("g1", 1, "b"), (order("b"),))) == []
    assert set(scheduler.state.groups) == {"g0", "g1"}


@pytest.mark.parametrize(
    "found",
    [group("g0", 5, "a"), group("g0", 0), replace(group("g0", 0, "a"), base_model="other"), replace(group("g0", 0, "a"), weights=(0.0,))],
)
def test_what_cannot_be_is_stopped(scheduler: Scheduler, found: JobGroup) -> None:
    assert told(scheduler, GroupFound(found, (order("a"),))) == [StopGroup("g0")]
    assert not scheduler.state.groups and "a" in scheduler.state.pending


def test_a_gpu_that_is_anothers_stops_the_second(scheduler: Scheduler) -> None:
    told(scheduler, GroupFound(group("g0", 0, "a"), (order("a"),)))
    assert told(scheduler, GroupFound(group("g1", 0, "b"), (order("b"),))) == [StopGroup("g1")]


def test_members_that_are_not_submitted_are_let_go(scheduler: Scheduler) -> None:
    assert told(scheduler, GroupFound(group("g0", 0, "a", "gone"), (order("a"),))) == [ChangeGroup(group("g0", 0, "a"))]


@pytest.mark.parametrize("at", [None, math.nan, -math.inf, math.inf, NOW + 1])
def test_a_time_that_cannot_be_counts_as_now(scheduler: Scheduler, at: float | None) -> None:
    told(scheduler, order("a", at))
    assert scheduler.state.jobs["a"].submitted_at == NOW
