"""`residual_capacity`: on which GPUs a job runs, who is refused at once, and what becomes of jobs whose GPUs are lost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.mirror import MOVES, Move, made_scheduler, made_settings, made_spec, started, steps_through
from tests.scheduler.timeline import Timeline, made_timeline, rejected, slowdowns
from tlora.protocol import ChangeGroup, GpusLost, JobFinished, JobSubmitted, NodeAdded, StartGroup, StopGroup, Tick
from tlora.scheduler.draft import has_room
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.settings import Settings

LONG = 100_000


def made_job(name: str, gpus: int = 1, steps: int = LONG, **others: object) -> JobSubmitted:
    """Too large to share, of one sample for each GPU, and on no fewer GPUs than it asks for."""
    values = {"parameters": 13 * 10**8, "longest": 1000, "max_slowdown": 1.0} | others
    return made_spec(name, gpus, 1000.0 * gpus, steps, **values)  # type: ignore[arg-type]


def nodes_of(timeline: Timeline, name: str) -> list[str]:
    return sorted({timeline.scheduler.state.pool.node_of[gpu] for gpu in timeline.gpus_of(name)})


# -- which GPUs ------------------------------------------------------------------------------------------------------------


def test_of_nodes_with_room_the_fullest() -> None:
    timeline = made_timeline(4, 4, 4)
    timeline.tell(made_job("three", 3), made_job("two", 2))
    assert nodes_of(timeline, "three") != nodes_of(timeline, "two")
    timeline.tell(made_job("one"))
    assert nodes_of(timeline, "one") == nodes_of(timeline, "three")
    timeline.tell(made_job("another"), made_job("last"))
    assert nodes_of(timeline, "another") == nodes_of(timeline, "last") == nodes_of(timeline, "two")
    timeline.tell(made_job("four", 4))
    assert len(timeline.gpus_of("four")) == 4 and len(nodes_of(timeline, "four")) == 1


@pytest.mark.parametrize("settings", [made_settings(), made_settings(elastic=False, preemption=False)], ids=["usual", "rigid"])
@pytest.mark.parametrize(
    ("free", "chosen"),
    [
        (["n0", "n2", "n3"], ["n2", "n3"]),
        (["n1", "n3", "n4", "n5"], ["n4", "n5"]),
        (["n0", "n1", "n2"], ["n0", "n1"]),
        (["n1", "n2"], ["n1", "n2"]),  # no rack has two
    ],
)
def test_a_job_of_several_nodes_gets_them_in_one_rack_where_one_has_them(free: list[str], chosen: list[str], settings: Settings) -> None:
    timeline = made_timeline(4, 4, 4, 4, 4, 4, settings=settings)
    timeline.tell(*[made_job(f"f{index}", 4) for index in range(6)])
    there = {nodes_of(timeline, f"f{index}")[0]: f"f{index}" for index in range(6)}
    timeline.tell(*[JobFinished(there[name]) for name in free])
    timeline.tell(made_job("wide", 8))
    assert len(timeline.gpus_of("wide")) == 8 and nodes_of(timeline, "wide") == chosen


def test_a_job_of_a_node_and_a_half_starts_where_these_are_free() -> None:
    """It has more than six samples, so that two whole nodes would be of use; those are not to be had for long."""
    timeline = made_timeline(4, 4)
    timeline.tell(made_job("two", 2))
    timeline.tell(made_job("six", 6, longest=16))
    assert len(timeline.gpus_of("six")) == 6


@given(moves=MOVES)
def test_every_group_is_on_as_few_nodes_as_hold_it(moves: list[Move]) -> None:
    """But for those that got GPUs of any nodes, as whole ones and a part of another held fewer, and those on a node that is left, which is
    not the measure of the others.
    """
    anywhere = set[tuple[int, ...]]()
    for _, state, _ in steps_through(residual_capacity(made_settings()), moves):
        for known in state.groups.values():
            gpus = known.group.gpus
            assert known.num_nodes == state.pool.num_nodes(gpus)
            if len(gpus) > state.pool.most_together:
                anywhere.add(gpus)
            if gpus not in anywhere and not state.pool.draining & {state.pool.node_of[gpu] for gpu in gpus}:
                assert known.num_nodes == -(-len(gpus) // state.pool.node_size)


@given(moves=MOVES)
def test_nobody_waits_for_whom_as_many_gpus_as_it_asks_for_are_free(moves: list[Move]) -> None:
    for _, state, _ in steps_through(residual_capacity(made_settings(starvation_factor=math.inf)), moves):
        free = [len(node.free) for node in state.pool.nodes.values()]
        for name in state.pending:
            gpus = state.jobs[name].spec.gpus
            assert not has_room(free, gpus, state.pool.node_size), f"{name} waits for {gpus} GPUs and {free} are free"


def test_company_is_sought_in_groups_of_its_own_base_alone() -> None:
    """Of two nodes of one GPU each, one is the other base's, though all of it is idle capacity but a hundredth."""
    timeline = made_timeline(1, 1, settings=made_settings(preemption=False))
    timeline.tell(made_spec("south", tokens=10.0, longest=10, steps=LONG, base_model="south", max_slowdown=100.0))
    timeline.tell(made_spec("north", tokens=500.0, longest=10, steps=LONG, max_slowdown=4.0))
    for index in range(4):
        timeline.tell(made_spec(f"j{index}", tokens=100.0, longest=10, steps=LONG, parameters=10**7, max_slowdown=8.0))
    groups = [known.group.job_ids for known in timeline.scheduler.state.groups.values()]
    assert groups[0] == ("south",) and groups[1][:2] == ("north", "j0")


# -- who is refused ----------------------------------------------------------------------------------------------------------


@given(
    gpus=st.integers(1, 8),
    tokens=st.sampled_from((50.0, 1000.0, 7777.0, 90_000.0)),
    longest=st.sampled_from((1, 64, 1500, 16_384)),
    parameters=st.sampled_from((0, 10**7, 10**9, 13 * 10**8, 2 * 10**9)),
    bound=st.sampled_from((1.0, 1.2, 6.0, 1e6)),
)
def test_who_is_not_refused_runs_at_once_where_nobody_else_is(
    gpus: int, tokens: float, longest: int, parameters: int, bound: float
) -> None:
    scheduler = made_scheduler(residual_capacity(made_settings()), 4, 4)
    spec = made_spec("a", gpus, tokens * gpus, 100, parameters, longest, max_slowdown=bound)
    actions = scheduler.handle(spec, 0.0)
    assert len(actions) == 1 and (started(actions) == ["a"]) != bool(rejected(actions))
    assert all(slowdown <= bound * (1 + 1e-6) for slowdown in slowdowns(scheduler).values())


# -- GPUs that are lost and come back ------------------------------------------------------------------------------------------


def test_a_lost_gpu_stops_its_group_alone_and_the_job_goes_on_elsewhere_from_where_it_was() -> None:
    timeline = made_timeline(2, 2, 2)
    timeline.tell(made_job("a", 2), made_job("b", 2))
    timeline.until(900.0)
    stays, done = timeline.gpus_of("b"), timeline.job("a").steps_at(900.0)
    lost = timeline.gpus_of("a")[1]
    stop, start = timeline.tell(GpusLost((lost,), "out of luck"))
    assert isinstance(stop, StopGroup) and isinstance(start, StartGroup) and start.group.job_ids == ("a",)
    assert lost not in start.group.gpus and timeline.gpus_of("b") == stays
    assert timeline.job("a").steps_at(900.0) == done > 500


def test_whose_bound_permits_goes_on_with_the_gpus_that_are_left() -> None:
    for bound, left in ((1.0, ()), (2.0, (0, 1, 3))):
        timeline = made_timeline(4)
        timeline.tell(made_job("a", 4, max_slowdown=bound))
        timeline.tell(GpusLost((2,)))
        assert timeline.gpus_of("a") == left


def test_members_of_a_group_whose_gpus_are_lost_all_go_on() -> None:
    timeline = made_timeline(1, 1)
    for name in "abcd":
        timeline.tell(made_spec(name, tokens=100.0, longest=64, steps=LONG, parameters=10**7, max_slowdown=4.0))
    assert len(slowdowns(timeline.scheduler)) == 4
    timeline.tell(GpusLost((0,)))
    timeline.until(60.0)  # one joins a group in one decision
    assert len(slowdowns(timeline.scheduler)) == 4 and {gpu for name in "abcd" for gpu in timeline.gpus_of(name)} == {1}


def test_when_all_gpus_are_lost_all_wait_and_when_they_return_all_run() -> None:
    timeline = made_timeline(4, 4)
    timeline.tell(made_job("a", 8), *[made_job(f"b{index}", steps=100) for index in range(8)])
    timeline.until(700.0)
    waiting = set(timeline.scheduler.state.jobs)
    timeline.tell(GpusLost(tuple(range(8))))
    assert set(timeline.scheduler.state.pending) == waiting and timeline.tell(Tick()) == []
    timeline.now += 5000.0
    assert timeline.tell(made_job("late", steps=10)) == []
    timeline.tell(NodeAdded("n1", (4, 5, 6, 7), "r0"))
    assert timeline.scheduler.state.pool.num_free == 0, "GPUs that come back are used at once"
    timeline.tell(NodeAdded("n0", (0, 1, 2, 3), "r0"))
    timeline.until(timeline.now + 300_000.0)
    assert set(timeline.ended_at) == waiting | {"late"} | {f"b{index}" for index in range(8)}


def test_gpus_that_are_lost_again_and_again_keep_nobody_from_its_end() -> None:
    timeline = made_timeline(4, 4, 4)
    timeline.tell(*[made_job(f"j{index}", 1 + index % 4, 2000) for index in range(12)])
    for index in range(60):
        timeline.until(timeline.now + 700.0)
        node = index % 3
        timeline.tell(GpusLost(tuple(range(4 * node, 4 * node + (4 if index % 2 else 1)))))
        timeline.until(timeline.now + 200.0)
        timeline.tell(NodeAdded(f"n{node}", tuple(range(4 * node, 4 * node + 4)), f"r{node // 2}"))
    timeline.until(timeline.now + 100_000.0)
    assert len(timeline.ended_at) == 12


def test_a_second_node_relieves_those_who_share() -> None:
    """Of four on a GPU some go to the GPUs of a node that is added, once the group has rested."""
    timeline = made_timeline(1)
    for name in "abcd":
        timeline.tell(made_spec(name, tokens=300.0, longest=300, steps=LONG, parameters=10**7, max_slowdown=4.0))
    timeline.until(1800.0)
    before = slowdowns(timeline.scheduler)
    timeline.tell(NodeAdded("n1", (1, 2, 3), "r0"))
    timeline.until(6000.0)
    after = slowdowns(timeline.scheduler)
    assert len(before) == len(after) == 4 and all(after[name] < 0.7 * before[name] for name in before)
    assert any(isinstance(action, ChangeGroup) for _, action in timeline.actions)
