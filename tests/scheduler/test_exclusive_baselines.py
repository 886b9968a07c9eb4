"""Policies that give each job GPUs of its own: who starts, who waits, who gives way."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.scheduler.mirror import BASES, MOVES, Move, made_scheduler, made_spec, started, steps_through
from tlora.protocol import GpusLost, GroupFound, JobFinished, JobGroup, NodeAdded, ParallelPlan, StartGroup, StopGroup, Tick
from tlora.scheduler.draft import Draft, has_room
from tlora.scheduler.exclusive_baselines import backfill, fifo, las, sjf, srtf
from tlora.scheduler.job import Job
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.state import ClusterState
from tlora.scheduler.waiting import arrival

EXCLUSIVE = {"fifo": fifo, "backfill": backfill, "sjf": sjf, "srtf": srtf, "las": las}
DECIDES = (Tick, NodeAdded, GpusLost)  # after these the policy was asked for certain
WORK_CONSERVING = ("backfill", "sjf", "srtf", "las", "memory", "tlora")


# -- all of them -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXCLUSIVE)
@given(moves=MOVES)
def test_each_job_has_the_gpus_that_it_asked_for_to_itself(name: str, moves: list[Move]) -> None:
    for _, state, _ in steps_through(EXCLUSIVE[name](), moves):
        for known in state.groups.values():
            (job_id,) = known.group.job_ids
            assert len(known.group.gpus) == state.jobs[job_id].spec.gpus


@pytest.mark.parametrize("name", WORK_CONSERVING)
@given(moves=MOVES)
def test_nobody_waits_who_would_fit(name: str, moves: list[Move]) -> None:
    for _, state, _ in steps_through(POLICIES[name](), moves):
        for job_id in state.pending:
            assert Draft(state).allocate(state.jobs[job_id].spec.gpus) is None, f"{job_id} could start"


@pytest.mark.parametrize("name", EXCLUSIVE)
def test_the_higher_priority_goes_first(name: str) -> None:
    scheduler = made_scheduler(EXCLUSIVE[name](), 1)
    scheduler.handle(made_spec("first", priority=9.0, steps=10), 0.0)
    scheduler.handle(made_spec("low", steps=1), 1.0)
    scheduler.handle(made_spec("high", steps=5000, priority=2.0), 2.0)
    assert started(scheduler.handle(JobFinished("first"), 3.0)) == ["high"]


@pytest.mark.parametrize("name", [*EXCLUSIVE, "memory"])
@given(moves=MOVES)
def test_asked_again_nothing_is_left_to_want(name: str, moves: list[Move]) -> None:
    for event, state, _ in steps_through(POLICIES[name](), moves):
        if isinstance(event, DECIDES):
            assert POLICIES[name]()(state) == []


# -- first in, first out ---------------------------------------------------------------------------------------------------


@given(moves=MOVES)
def test_strict_fifo_never_starts_a_job_before_an_earlier_one(moves: list[Move]) -> None:
    for _, state, actions in steps_through(fifo(), moves):
        waits = [arrival(state.jobs[name]) for name in state.pending]
        assert all(arrival(state.jobs[name]) < min(waits, default=(1e9,)) for name in started(actions))


# -- by remaining time -------------------------------------------------------------------------------------------------------


def test_the_shortest_that_fits_starts_and_stops_nobody() -> None:
    scheduler = made_scheduler(sjf(), 1)
    scheduler.handle(made_spec("runs", steps=1000), 0.0)
    for name, steps in (("long", 300), ("short", 20), ("middle", 70)):
        assert scheduler.handle(made_spec(name, steps=steps), 1.0) == []
    order = ["runs"]
    for _ in range(3):
        order += started(scheduler.handle(JobFinished(order[-1]), 2.0))
    assert order == ["runs", "short", "middle", "long"]


def test_a_shorter_job_takes_the_gpus_of_the_one_that_has_longest_to_go() -> None:
    scheduler = made_scheduler(srtf(), 2)
    scheduler.handle(made_spec("long", steps=1000), 0.0)
    scheduler.handle(made_spec("longer", steps=2000), 0.0)
    stop, start = scheduler.handle(made_spec("short", steps=10), 1.0)
    assert stop == StopGroup("g1") and isinstance(start, StartGroup) and start.group.job_ids == ("short",)
    assert started(scheduler.handle(JobFinished("short"), 2.0)) == ["longer"]


def test_what_remains_counts_and_not_what_there_was() -> None:
    scheduler = made_scheduler(srtf(), 1)
    scheduler.handle(made_spec("runs", steps=100), 0.0)  # a step takes 1.5 s: 150 s
    assert scheduler.handle(made_spec("shorter whole", steps=60), 100.0) == []
    assert started(scheduler.handle(made_spec("shorter", steps=30), 101.0)) == ["shorter"]


def test_nobody_gives_way_in_vain() -> None:
    scheduler = made_scheduler(srtf(), 4)
    for name, gpus, steps in (("large", 2, 1000), ("small", 1, 2000), ("short", 1, 5)):
        scheduler.handle(made_spec(name, gpus, steps=steps, tokens=1000.0 * gpus), 0.0)
    assert scheduler.handle(made_spec("all", 4, steps=100, tokens=4000.0), 1.0) == []  # "short" would have to stop too
    actions = scheduler.handle(made_spec("pair", 2, steps=100, tokens=2000.0), 2.0)
    assert [action for action in actions if isinstance(action, StopGroup)] == [
        StopGroup("g0")
    ]  # "small" alone is too little, "large" enough
    assert started(actions) == ["pair"]


@given(moves=MOVES)
def test_whoever_waits_could_not_have_the_gpus_of_those_who_rank_behind(moves: list[Move]) -> None:
    def rank(state: ClusterState, job: Job) -> tuple[float, float]:
        return -job.spec.priority, job.remaining_seconds(state.now)

    for event, state, _ in steps_through(srtf(), moves):
        if not isinstance(event, DECIDES):
            continue
        for job in (state.jobs[name] for name in state.pending):
            free = {name: len(node.free) for name, node in state.pool.nodes.items()}
            for known in state.groups.values():
                if rank(state, state.jobs[known.group.job_ids[0]]) > rank(state, job):
                    for gpu in known.group.gpus:
                        free[state.pool.node_of[gpu]] += 1
            assert not has_room(free.values(), job.spec.gpus, state.pool.node_size), f"{job.spec.job_id} could run"


@pytest.mark.parametrize("name", ["srtf", "las"])
def test_a_group_taken_over_with_two_members_gives_way_as_one(name: str) -> None:
    """As another policy made it before a restart: its GPUs come free once, and both members wait."""
    scheduler = made_scheduler(EXCLUSIVE[name](), 4)
    shared = made_spec("a", steps=10**6), made_spec("b", steps=10**6)
    alone = made_spec("c", 2, steps=10**5, priority=0.5)
    scheduler.handle(GroupFound(JobGroup("g0", BASES[0], (0, 1), ParallelPlan(2, 8192), ("a", "b"), (1.0, 1.0)), shared), 0.0)
    scheduler.handle(GroupFound(JobGroup("g1", BASES[0], (2, 3), ParallelPlan(2, 8192), ("c",), (1.0,)), (alone,)), 0.0)
    actions = scheduler.handle(made_spec("urgent", 3, tokens=2000.0, steps=1, priority=1.0), 1.0)
    assert {action.group_id for action in actions if isinstance(action, StopGroup)} == {"g0", "g1"}
    assert started(actions) == ["urgent", "a"] and set(scheduler.state.pending) == {"b", "c"}


@pytest.mark.parametrize("name", ["srtf", "las"])
def test_no_member_of_a_group_gives_way_to_a_job_that_it_goes_before(name: str) -> None:
    scheduler = made_scheduler(EXCLUSIVE[name](), 2)
    shared = made_spec("low", steps=10**6), made_spec("high", steps=10**6, priority=2.0)
    group = JobGroup("g0", BASES[0], (0, 1), ParallelPlan(2, 8192), ("low", "high"), (1.0, 1.0))
    scheduler.handle(GroupFound(group, shared), 0.0)
    assert scheduler.handle(made_spec("between", priority=1.0, steps=1), 1.0) == []
    actions = scheduler.handle(made_spec("highest", priority=3.0, steps=1), 2.0)
    assert actions[0] == StopGroup("g0") and started(actions) == ["highest", "high"]


@pytest.mark.parametrize("name", ["srtf", "las"])
def test_a_job_of_one_host_stops_none_on_several(name: str) -> None:
    scheduler = made_scheduler(EXCLUSIVE[name](), 2, 2, 4)
    scheduler.handle(GpusLost((4, 5, 6, 7)), 0.0)
    for job in ("a", "b"):
        scheduler.handle(made_spec(job, 2, tokens=2000.0, steps=10**6), 1.0)
    wide = made_spec("wide", 4, tokens=4000.0, steps=1, priority=1.0, least_gpus=4, on_one_host=True)
    assert scheduler.handle(wide, 2.0) == [] == scheduler.handle(Tick(), 3.0)
    assert started(scheduler.handle(NodeAdded("n2", (4, 5, 6, 7)), 4.0)) == ["wide"]


# -- least attained service --------------------------------------------------------------------------------------------------


def test_a_job_sinks_with_the_gpu_seconds_it_had_and_gives_way_to_those_above() -> None:
    scheduler = made_scheduler(las((100.0, 1000.0)), 2)
    scheduler.handle(made_spec("old", 2, steps=10**6, tokens=2000.0), 0.0)
    assert scheduler.handle(made_spec("new", steps=10**6), 49.0) == []  # 98 GPU-seconds: both are in the first queue
    assert started(scheduler.handle(Tick(), 50.0)) == ["new"]
    assert scheduler.state.jobs["old"].service_gpu_seconds == 100.0
    assert scheduler.handle(Tick(), 149.0) == []
    assert scheduler.handle(Tick(), 150.0) == []  # 100 GPU-seconds as well: an equal does not give way
    assert started(scheduler.handle(JobFinished("new"), 160.0)) == ["old"]


def test_three_queues_by_default() -> None:
    scheduler = made_scheduler(las(), 1)
    scheduler.handle(made_spec("a", steps=10**6), 0.0)
    scheduler.handle(made_spec("b", steps=10**6), 1.0)
    assert scheduler.handle(Tick(), 3249.0) == []
    assert started(scheduler.handle(Tick(), 3250.0)) == ["b"]
    assert scheduler.handle(Tick(), 7000.0) == []  # both in the second
    assert started(scheduler.handle(Tick(), 3250.0 + 18000.0)) == ["a"]
