"""The scheduler over random events, with every policy: nothing twice, nothing lost, each action possible at its turn."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.invariants import check
from tests.scheduler.mirror import MOVES, Mirror, Move, made_cost, made_scheduler, made_spec, made_state, steps_through, tell
from tests.sim.small_clusters import POLICY_CASES
from tlora.protocol import (
    ChangeGroup,
    GpusLost,
    GroupLost,
    GroupReady,
    JobFinished,
    JobGroup,
    NodeAdded,
    ParallelPlan,
    RejectJob,
    StartGroup,
    StepsDone,
    StopGroup,
    Tick,
)
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.scheduler import Policy, Scheduler, reconcile
from tlora.scheduler.state import ClusterState

EVERY_POLICY = pytest.mark.parametrize("name", POLICY_CASES)


def play(policy: Policy, moves: list[Move]) -> ClusterState:
    return [state for _, state, _ in steps_through(policy, moves)][-1]


@EVERY_POLICY
@given(moves=MOVES)
def test_nothing_is_given_twice_or_lost(name: str, moves: list[Move]) -> None:
    play(POLICIES[name](), moves)


@EVERY_POLICY
@given(moves=MOVES)
def test_policies_remember_nothing_that_changes_what_they_want_and_change_nothing(name: str, moves: list[Move]) -> None:
    policy = POLICIES[name]()

    def told_twice(state: ClusterState) -> list[JobGroup]:
        before = copy.deepcopy((state.jobs, state.groups, state.pool, list(state.pending)))
        wanted = policy(state)
        assert before == (state.jobs, state.groups, state.pool, list(state.pending))
        assert policy(state) == wanted, "asked again, it wants something else"
        assert POLICIES[name]()(state) == wanted, "one that has seen nothing before wants something else"
        return wanted

    play(told_twice, moves)


@EVERY_POLICY
@given(moves=MOVES)
def test_what_is_wanted_is_wanted_once(name: str, moves: list[Move]) -> None:
    last: list[JobGroup] = []
    policy = POLICIES[name]()

    def kept(state: ClusterState) -> list[JobGroup]:
        last[:] = policy(state)
        return last

    assert reconcile(play(kept, moves), last) == []


@EVERY_POLICY
@given(gpus=st.lists(st.integers(1, 8), min_size=1, max_size=12))
def test_everybody_is_served_in_the_end(name: str, gpus: list[int]) -> None:
    scheduler, mirror, now = Scheduler(POLICIES[name](), made_cost()), Mirror(), 0.0
    tell(scheduler, mirror, NodeAdded("n0", (0, 1, 2, 3)), 0.0)
    tell(scheduler, mirror, NodeAdded("n1", (4, 5, 6, 7)), 0.0)
    for index, count in enumerate(gpus):
        tell(scheduler, mirror, made_spec(f"j{index}", count, tokens=1000.0 * count), 0.0)
    while scheduler.state.jobs:
        running = [job for job in scheduler.state.jobs.values() if job.status == "placed"]
        assert running, "jobs wait and GPUs are idle"
        now += 10.0
        tell(scheduler, mirror, JobFinished(running[0].spec.job_id), now)
    assert scheduler.state.pool.num_free == 8


def test_an_order_that_comes_twice_is_one() -> None:
    scheduler = made_scheduler(POLICIES["fifo"](), 1)
    assert len(scheduler.handle(made_spec("a"), 1.0)) == 1
    assert scheduler.handle(made_spec("a"), 2.0) == []
    assert scheduler.handle(JobFinished("a"), 3.0) == [StopGroup("g0")]
    assert scheduler.handle(made_spec("a"), 4.0) == []
    assert scheduler.handle(JobFinished("a"), 5.0) == []


def test_time_does_not_go_back() -> None:
    scheduler = made_scheduler(POLICIES["fifo"](), 1)
    scheduler.handle(made_spec("a"), 50.0)
    scheduler.handle(Tick(), 40.0)
    assert scheduler.state.now == 50.0


def test_what_speaks_of_nobody_known_is_ignored() -> None:
    scheduler = made_scheduler(POLICIES["fifo"](), 1)
    for event in (JobFinished("x"), GroupLost("g7", "?"), GroupReady("g7"), StepsDone("x", "g7", 3.0, 1.0), GpusLost((77,))):
        assert scheduler.handle(event, 1.0) == []


def test_a_group_is_ready_when_it_says_so_until_it_changes() -> None:
    scheduler = made_scheduler(POLICIES["memory"](), 1)
    scheduler.handle(made_spec("a"), 0.0)
    assert not scheduler.state.groups["g0"].ready
    scheduler.handle(GroupReady("g0"), 1.0)
    assert scheduler.state.groups["g0"].ready
    (change,) = scheduler.handle(made_spec("b"), 2.0)
    assert isinstance(change, ChangeGroup) and change.group.job_ids == ("a", "b")
    assert not scheduler.state.groups["g0"].ready


# -- reconcile -----------------------------------------------------------------------------------------------------------


def grouped(state: ClusterState, group_id: str, gpus: tuple[int, ...], *names: str) -> JobGroup:
    weights = tuple(state.jobs[name].weight for name in names)
    return JobGroup(group_id, "north", gpus, ParallelPlan(len(gpus), 1024 * len(gpus)), names, weights)


def with_jobs(*names: str) -> ClusterState:
    state = made_state(4)
    for name in names:
        state.submit(made_spec(name))
    return state


def test_whoever_gives_up_a_job_or_a_gpu_does_it_before_another_takes_it() -> None:
    state = with_jobs("a", "b", "c", "d")
    reconcile(state, [grouped(state, "g0", (0, 1), "a", "b"), grouped(state, "g1", (2, 3), "c", "d")])
    swapped = [grouped(state, "g0", (0, 2), "a", "d"), grouped(state, "g1", (3, 1), "c", "b")]
    actions = reconcile(state, swapped)
    assert all(isinstance(action, ChangeGroup) for action in actions)
    shrunk, wanted = actions[:2], actions[2:]
    assert [action.group.gpus for action in shrunk] == [(0,), (3,)] and [action.group.job_ids for action in shrunk] == [("a",), ("c",)]  # type: ignore[union-attr]
    assert [action.group for action in wanted] == swapped  # type: ignore[union-attr]
    check(state)


def test_a_group_that_only_gives_up_changes_before_the_one_that_takes() -> None:
    state = with_jobs("a", "b", "c")
    reconcile(state, [grouped(state, "g0", (0,), "a"), grouped(state, "g1", (1, 2), "b", "c")])
    wanted = [grouped(state, "g0", (0, 2), "a", "c"), grouped(state, "g1", (1,), "b")]
    assert reconcile(state, wanted) == [ChangeGroup(wanted[1]), ChangeGroup(wanted[0])]
    check(state)


def test_what_ends_comes_first_and_what_opens_last() -> None:
    state = with_jobs("a", "b", "c")
    reconcile(state, [grouped(state, "g0", (0,), "a"), grouped(state, "g1", (1,), "b")])
    ended = replace(state.groups["g0"].group, job_ids=(), weights=())
    actions = reconcile(state, [grouped(state, "g2", (2,), "c"), grouped(state, "g1", (1, 0), "b", "a"), ended])
    assert [type(action) for action in actions] == [StopGroup, ChangeGroup, StartGroup]
    check(state)


def test_a_group_that_is_as_wanted_gives_no_action() -> None:
    state = with_jobs("a")
    wanted = [grouped(state, "g0", (0,), "a")]
    assert len(reconcile(state, wanted)) == 1
    assert reconcile(state, wanted) == []
    assert reconcile(state, [replace(wanted[0], group_id="g9", job_ids=(), weights=())]) == []


# -- jobs that can never run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"base_model": "nowhere"}, "'nowhere' is not served here. There are north, south"),
        ({"gpus": 0}, "0 GPUs"),
        ({"max_slowdown": 0.9}, "slowdown of 0.9"),
        ({"max_slowdown": math.nan}, "slowdown of nan"),
        ({"steps": 0}, "0 steps"),
        ({"tokens": 0.0}, "0.0 tokens"),
        ({"tokens": math.inf}, "inf tokens"),
        ({"tokens": math.nan}, "nan tokens"),
        ({"steps": 2**53 + 1}, "more than 9007199254740992"),
        ({"steps": 10**5000}, "more than 9007199254740992"),
        ({"gpus": 10**400}, "more than 9007199254740992"),
        ({"parameters": 10**400}, "more than 9007199254740992"),
        ({"priority": math.nan}, "priority is nan"),
        ({"deadline": math.nan}, "deadline is no number"),
        ({"gpus": 13}, "13 GPUs and the cluster has 12"),
        ({"longest": 16385}, "16385 tokens, and a micro-batch on a GPU holds at most 16384"),
        ({"parameters": 3 * 10**9}, "a micro-batch of 1024 tokens, .* of 512, take 99.67 GiB"),
        ({"longest": 9000, "parameters": 15 * 10**8}, "a micro-batch of 16384 tokens, .* of 9000, take 88.83 GiB"),
    ],
)
def test_a_job_that_can_never_run_is_refused_with_the_reason(wrong: dict[str, object], reason: str) -> None:
    scheduler = made_scheduler(POLICIES["fifo"](), 8, 2, 2)
    (action,) = scheduler.handle(made_spec("a", **wrong), 0.0)  # type: ignore[arg-type]
    assert isinstance(action, RejectJob) and action.job_id == "a"
    assert not scheduler.state.jobs
    assert re.search(reason, action.reason), action.reason


def test_gpus_that_are_lost_for_a_time_refuse_nobody() -> None:
    scheduler = made_scheduler(POLICIES["fifo"](), 4, 4)
    scheduler.handle(GpusLost((4, 5, 6, 7)), 0.0)
    assert scheduler.handle(made_spec("a", 8), 1.0) == []
    (start,) = scheduler.handle(NodeAdded("n1", (4, 5, 6, 7)), 2.0)
    assert isinstance(start, StartGroup) and len(start.group.gpus) == 8
