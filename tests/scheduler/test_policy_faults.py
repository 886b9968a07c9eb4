"""A policy that raises, or wants what cannot be, costs its decision and nothing else."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from tests.scheduler.mirror import made_cost
from tlora.protocol import (
    Event,
    GpusLost,
    JobFinished,
    JobGroup,
    JobProfile,
    JobRequest,
    JobSubmitted,
    NodeAdded,
    ParallelPlan,
    StartGroup,
    Tick,
)
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.scheduler.state import ClusterState

BASE = next(iter(made_cost().constants))
PROFILE = JobProfile(tokens_per_step=1000.0, steps=50, longest_sample_tokens=100, adapter_parameters=10**6)


def job(name: str, gpus: int = 1) -> JobSubmitted:
    return JobSubmitted(name, BASE, gpus, PROFILE)


def group(name: str, gpus: tuple[int, ...], *jobs: str, **fields: Any) -> JobGroup:
    made = JobGroup(name, BASE, gpus, ParallelPlan(len(gpus), 4096), jobs, tuple(1.0 for _ in jobs))
    return replace(made, **fields)


def test_what_an_event_brings_is_done_and_the_next_one_is_decided() -> None:
    faults: list[str] = []
    broken = [True]
    fifo = POLICIES["fifo"]()

    def policy(state: ClusterState) -> list[JobGroup]:
        if broken[0]:
            raise ZeroDivisionError("a bug of the policy")
        return fifo(state)

    scheduler = Scheduler(policy, made_cost(), faults.append)
    for event in (
        NodeAdded("n", (0, 1)),
        job("a"),
        job("b"),
        job("c"),
        JobRequest("b", "cancel"),
        JobRequest("c", "hold"),
        JobFinished("unknown"),
    ):
        assert scheduler.handle(event, 1.0) == []
    assert set(scheduler.state.jobs) == {"a", "c"} and scheduler.state.held == {"c"}
    assert set(faults) == {"ZeroDivisionError: a bug of the policy"}
    broken[0] = False
    (start,) = scheduler.handle(Tick(), 2.0)
    assert isinstance(start, StartGroup) and start.group.job_ids == ("a",)
    broken[0] = True
    scheduler.handle(JobFinished("a"), 3.0)
    assert not scheduler.state.groups and scheduler.state.pool.num_free == 2, "the group ended without a decision"
    broken[0] = False
    assert len(scheduler.handle(JobRequest("c", "release"), 4.0)) == 1


def test_without_anybody_to_tell_it_raises() -> None:
    def policy(_: ClusterState) -> list[JobGroup]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Scheduler(policy, made_cost()).handle(NodeAdded("n", (0,)), 0.0)


RUNNING = {"g0": group("g0", (0,), "a"), "g1": group("g1", (1, 2), "b", "c")}
IMPOSSIBLE: dict[str, list[JobGroup]] = {
    "a GPU that is another's": [group("g2", (1,), "d")],
    "a GPU that there is not": [group("g2", (9,), "d")],
    "a GPU twice": [group("g2", (3, 3), "d")],
    "a GPU in two new groups": [group("g2", (3,), "d"), group("g3", (3,), "e")],
    "a GPU that its owner keeps": [group("g1", (1, 2), "b"), group("g2", (2,), "d")],
    "a job that is in another": [group("g2", (3,), "a")],
    "a job in two new groups": [group("g2", (3,), "d"), group("g3", (4,), "d")],
    "a job twice": [group("g2", (3,), "d", "d")],
    "a job that has ended": [group("g2", (3,), "gone")],
    "a job that is held": [group("g2", (3,), "held")],
    "another base": [group("g2", (3,), "d", base_model="other")],
    "another base for a group": [group("g0", (0,), "a", base_model="other")],
    "no GPU": [group("g2", (), "d")],
    "no weight": [group("g2", (3,), "d", weights=())],
    "a weight that is no number": [group("g2", (3,), "d", weights=(float("nan"),))],
    "no tokens": [group("g2", (3,), "d", plan=ParallelPlan(1, 0))],
    "one name twice": [group("g2", (3,), "d"), group("g2", (4,), "e")],
    "a name of its own": [group("mine", (3,), "d")],
}


@pytest.mark.parametrize("wanted", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_cannot_be_changes_nothing(wanted: list[JobGroup]) -> None:
    wishes = [list(RUNNING.values())]
    faults: list[str] = []

    def policy(_: ClusterState) -> list[JobGroup]:
        return wishes.pop() if wishes else []

    scheduler = Scheduler(policy, made_cost(), faults.append)
    wishes.clear()
    events: list[Event] = [NodeAdded("n", tuple(range(6))), *map(job, ("a", "b", "c", "d", "e", "held")), JobRequest("held", "hold")]
    for event in events:
        scheduler.handle(event, 1.0)
    wishes.append(list(RUNNING.values()))
    assert len(scheduler.handle(Tick(), 2.0)) == 2
    before = copy.deepcopy(scheduler.state)
    wishes.append(wanted)
    assert scheduler.handle(Tick(), 2.0) == []
    assert len(faults) == 1 and "wants what cannot be" in faults[0]
    assert scheduler.state.groups == before.groups and scheduler.state.jobs == before.jobs
    assert scheduler.state.pool.group_on == before.pool.group_on and scheduler.state.pending == before.pending
    assert scheduler.handle(GpusLost((0,)), 3.0), "it goes on"
