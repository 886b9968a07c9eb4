"""`residual_capacity`: nobody is slowed down beyond its bound, by whoever joins, leaves or takes GPUs, and memory holds everybody."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given

from tests.scheduler.mirror import MOVES, Move, made_cost, made_scheduler, made_settings, made_spec, steps_through
from tests.scheduler.timeline import made_timeline, slowdowns
from tlora.protocol import ChangeGroup, Event, JobFailed, JobFinished, JobRequest, JobSubmitted, StartGroup
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.state import ClusterState
from tlora.shape.sharing import Member, group_step_seconds

ROUNDING = 1e-6
LONG = 100_000  # steps: more than any of these stories lasts


def beyond(state: ClusterState) -> dict[str, float]:
    """Jobs whose step takes longer than their bound allows, and how many times as long."""
    found: dict[str, float] = {}
    for known in state.groups.values():
        steps = state.step_seconds_of(known.group, state.pool.num_nodes(known.group.gpus))
        for name, seconds in zip(known.group.job_ids, steps, strict=True):
            job = state.jobs[name]
            over = seconds / (job.spec.max_slowdown * job.alone_step_seconds)
            if over > 1 + ROUNDING:
                found[name] = over
    return found


def together(budget: int, *tokens: float) -> list[float]:
    """Slowdowns of jobs of one GPU that share one with equal bounds, if all their steps fit into a micro-batch of `budget`."""
    cost = made_cost()
    needs = [own / cost.alone_step_seconds("north", own, 1) for own in tokens]
    members = [Member(own, need) for own, need in zip(tokens, needs, strict=True)]
    seconds = group_step_seconds(cost, "north", budget, 1, 1, members)
    return [own / cost.alone_step_seconds("north", n, 1) for own, n in zip(seconds, tokens, strict=True)]


# -- joins -----------------------------------------------------------------------------------------------------------------


@given(moves=MOVES)
def test_no_event_leaves_anybody_beyond_its_bound(moves: list[Move]) -> None:
    """As predicted. Groups of a base that is measured are planned anew, as they were made by other predictions."""
    for event, state, _ in steps_through(residual_capacity(made_settings()), moves):
        assert not beyond(state), f"after {event}"


@pytest.mark.parametrize("tight", ["there", "new"])
@pytest.mark.parametrize("margin", [1.001, 0.999])
def test_a_join_needs_the_bounds_of_those_who_are_there_and_of_the_one_who_comes(tight: str, margin: float) -> None:
    (slowed, _) = together(1024, 300.0, 300.0)
    assert 1.3 < slowed < 1.5
    bound = {"there": 9.0, "new": 9.0} | {tight: slowed * margin}
    scheduler = made_scheduler(residual_capacity(made_settings(preemption=False)), 1)
    scheduler.handle(made_spec("there", tokens=300.0, steps=LONG, max_slowdown=bound["there"]), 0.0)
    actions = scheduler.handle(made_spec("new", tokens=300.0, steps=LONG, max_slowdown=bound["new"]), 1.0)
    if margin > 1:
        (change,) = actions
        assert isinstance(change, ChangeGroup) and change.group.job_ids == ("there", "new")
        assert slowdowns(scheduler)[tight] == pytest.approx(slowed) and not beyond(scheduler.state)
    else:
        assert actions == [] and list(scheduler.state.pending) == ["new"]


def test_all_members_bounds_are_looked_at_and_not_their_mean_alone() -> None:
    """Each member that joins slows down those before: the group is full when one more would break the tightest bound."""
    timeline = made_timeline(1, settings=made_settings(preemption=False))
    for index in range(12):
        bound = 2.0 if index == 3 else 20.0
        timeline.tell(made_spec(f"j{index}", tokens=100.0, steps=LONG, parameters=10**6, longest=64, max_slowdown=bound))
    members = list(slowdowns(timeline.scheduler))
    count = len(members)
    assert "j3" in members and 4 < count < 12 and not beyond(timeline.scheduler.state)
    (at_count, *_), (with_one_more, *_) = together(16384, *[100.0] * count), together(16384, *[100.0] * (count + 1))
    assert at_count <= 2.0 < with_one_more


@pytest.mark.parametrize("sharing", [True, False])
def test_a_bound_of_one_is_never_shared_nor_given_fewer_gpus(sharing: bool) -> None:
    timeline = made_timeline(4, settings=made_settings(sharing=sharing))
    for index in range(6):
        timeline.tell(made_spec(f"j{index}", 2, tokens=200.0, longest=64, steps=LONG, max_slowdown=1.0))
        timeline.now += 1000.0
    assert all(len(known.group.job_ids) == 1 and len(known.group.gpus) >= 2 for known in timeline.scheduler.state.groups.values())
    assert len(timeline.scheduler.state.pending) == 4


def test_without_sharing_nobody_joins() -> None:
    scheduler = made_scheduler(residual_capacity(made_settings(sharing=False)), 1)
    scheduler.handle(made_spec("a", tokens=100.0, max_slowdown=9.0), 0.0)
    assert scheduler.handle(made_spec("b", tokens=100.0, max_slowdown=9.0), 1.0) == []


@pytest.mark.parametrize(("nodes", "members"), [((8,), ("all", "small")), ((4, 4), ("all",))])
def test_a_job_joins_a_group_of_one_node_and_none_of_several(nodes: tuple[int, ...], members: tuple[str, ...]) -> None:
    """Its members would keep whole nodes together, on which the next wide job starts before narrow ones that wait."""
    timeline = made_timeline(*nodes, settings=made_settings(preemption=False, elastic=False))
    timeline.tell(made_spec("all", 8, tokens=8000.0, longest=64, steps=LONG, max_slowdown=4.0))
    timeline.tell(made_spec("small", tokens=100.0, longest=64, steps=LONG, parameters=10**6, max_slowdown=9.0))
    assert [known.group.job_ids for known in timeline.scheduler.state.groups.values()] == [members]


# -- leaves ----------------------------------------------------------------------------------------------------------------


Leaving = Callable[[str], Event]
LEAVINGS: dict[str, Leaving] = {
    "finished": JobFinished,
    "cancelled": lambda name: JobRequest(name, "cancel"),
    "failed": lambda name: JobFailed(name, "out of luck"),
}


@pytest.mark.parametrize("how", LEAVINGS)
def test_who_stays_is_faster_when_another_leaves(how: str) -> None:
    scheduler = made_scheduler(residual_capacity(made_settings()), 1)
    for index in range(4):
        scheduler.handle(made_spec(f"j{index}", tokens=150.0 + 50 * index, steps=LONG, parameters=10**6, max_slowdown=4.0), 0.0)
    before = slowdowns(scheduler)
    assert len(before) == 4
    for index in range(3):
        scheduler.handle(LEAVINGS[how](f"j{index}"), 10.0 + index)
        after = slowdowns(scheduler)
        assert len(after) == 3 - index and all(seconds < before[name] for name, seconds in after.items())
        before = after
    assert before["j3"] == pytest.approx(1.0)


@pytest.mark.parametrize("how", LEAVINGS)
def test_who_is_left_alone_is_within_its_bound_when_another_leaves(how: str) -> None:
    """Together they would do best by two micro-batches to a step of the first, which without company take 2 launches instead of one."""
    scheduler = made_scheduler(residual_capacity(made_settings()), 2)
    scheduler.handle(made_spec("tight", 2, tokens=2166.0, steps=LONG, longest=64, parameters=10**7, max_slowdown=1.2), 0.0)
    scheduler.handle(made_spec("loose", 1, tokens=990.0, steps=LONG, longest=64, parameters=10**7, max_slowdown=6.0), 1.0)
    scheduler.handle(LEAVINGS[how]("loose"), 50.0)
    assert slowdowns(scheduler).keys() == {"tight"} and not beyond(scheduler.state)


# -- GPUs that are taken back ------------------------------------------------------------------------------------------------


def shrunk(bound: float) -> tuple[float, int]:
    """Slowdown and GPUs of a long job of four GPUs, after a much shorter one has come that asks for three of them."""
    timeline = made_timeline(4)
    timeline.tell(made_spec("long", 4, tokens=4000.0, longest=64, steps=LONG, max_slowdown=bound))
    timeline.until(3000.0)  # it has grown, and rested
    timeline.tell(made_spec("short", 3, tokens=3000.0, longest=64, steps=100, base_model="south", max_slowdown=1.0))
    assert not beyond(timeline.scheduler.state)
    assert len(timeline.gpus_of("short")) == 3
    return slowdowns(timeline.scheduler).get("long", math.inf), len(timeline.gpus_of("long"))


def test_a_group_that_gives_up_gpus_keeps_its_bound_or_stops() -> None:
    on_one_gpu = (0.5 + 4.0) / (0.5 + 0.05 + 1.0)
    assert shrunk(on_one_gpu * 1.001) == (pytest.approx(on_one_gpu), 1)
    assert shrunk(on_one_gpu * 0.999) == (math.inf, 0)


def test_fewer_gpus_than_asked_for_are_as_many_as_the_bound_needs() -> None:
    for bound in (1.0, 1.2, 1.5, 2.0, 3.0):
        timeline = made_timeline(4, 4)
        for index in range(12):
            timeline.tell(made_spec(f"j{index}", 4, tokens=4000.0, longest=64, steps=1000, max_slowdown=bound))
        timeline.until(1200.0)
        sizes = {len(known.group.gpus) for known in timeline.scheduler.state.groups.values()}
        least = next(gpus for gpus in (1, 2, 3, 4) if 0.5 + (gpus > 1) * 0.05 + 4.0 / gpus <= bound * 1.55 * (1 + ROUNDING))
        assert not beyond(timeline.scheduler.state) and min(sizes) >= least
        assert min(sizes) < 4 or least > 2, "where the bound leaves room, somebody has fewer than it asks for"


# -- memory ------------------------------------------------------------------------------------------------------------------


@given(moves=MOVES)
def test_every_plan_is_a_prepared_one_that_holds_the_longest_sample(moves: list[Move]) -> None:
    """That memory holds it and all adapters is looked at after each event too, by the state's own check."""
    for _, state, _ in steps_through(residual_capacity(made_settings()), moves):
        for known in state.groups.values():
            group, profiles = known.group, [state.jobs[name].spec.profile for name in known.group.job_ids]
            tokens = group.plan.token_budget // len(group.gpus)
            assert tokens in state.cost.budgets and tokens >= max(profile.longest_sample_tokens for profile in profiles)
            assert state.cost.fits(group.base_model, sum(profile.adapter_parameters for profile in profiles), tokens)


def joined(*specs: JobSubmitted) -> list[str]:
    """Who of them is in the group on the only GPU, in the end."""
    timeline = made_timeline(1, settings=made_settings(preemption=False))
    timeline.tell(*specs)
    return list(timeline.mirror.groups["g0"].job_ids)


def test_adapters_that_memory_does_not_hold_together_do_not_meet_whatever_the_bounds() -> None:
    def made(name: str, parameters: int) -> JobSubmitted:
        return made_spec(name, tokens=50.0, longest=64, steps=LONG, parameters=parameters, max_slowdown=1000.0)

    most = int((0.92 * 100e9 - 52e9 - 1024 * 1e6) / 18)  # with the smallest prepared micro-batch
    assert joined(made("a", 10**9), made("b", most - 10**9)) == ["a", "b"]
    assert joined(made("a", 10**9), made("b", most - 10**9 + 1)) == ["a"]
    assert joined(made("a", 10**9), made("b", most - 10**9 + 1), made("c", most - 10**9)) == ["a", "c"], "a smaller one passes"


def test_a_member_of_long_samples_needs_room_for_them_beside_all_adapters() -> None:
    def made(name: str, parameters: int, longest: int) -> JobSubmitted:
        return made_spec(name, tokens=50.0, longest=longest, steps=LONG, parameters=parameters, max_slowdown=1000.0)

    assert joined(made("a", 10**9, 64), made("b", 5 * 10**8, 4096)) == ["a", "b"]
    assert joined(made("a", 10**9, 64), made("b", 5 * 10**8, 16384)) == ["a"]
    assert joined(made("a", 5 * 10**8, 16384), made("b", 10**9, 64)) == ["a"]
    assert joined(made("a", 10**8, 16384), made("b", 10**8, 64)) == ["a", "b"]


def test_a_bound_of_infinity_stands_still_for_nobody() -> None:
    scheduler = made_scheduler(residual_capacity(made_settings()), 1)
    scheduler.handle(made_spec("any", tokens=400.0, steps=LONG, longest=64, parameters=10**7, max_slowdown=math.inf), 0.0)
    (change,) = scheduler.handle(made_spec("one", tokens=400.0, steps=LONG, longest=64, parameters=10**7, max_slowdown=2.0), 1.0)
    assert isinstance(change, ChangeGroup) and not isinstance(change, StartGroup)
    assert slowdowns(scheduler)["one"] <= 2.0 and slowdowns(scheduler)["any"] < math.inf
