"""`residual_capacity`: growth onto idle GPUs is revoked for whoever waits, and nothing is moved for less than it saves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given

from tests.scheduler.mirror import MOVES, Move, made_settings, made_spec, steps_through
from tests.scheduler.timeline import MOST_RETHINK_SECONDS, TICK_SECONDS, made_timeline, wanted
from tlora.protocol import (
    BaseMeasured,
    ChangeGroup,
    GpusLost,
    GroupKept,
    JobGroup,
    JobSubmitted,
    NodeAdded,
    NodeDraining,
    StartGroup,
    StopGroup,
)
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.settings import Settings
from tlora.scheduler.starvation import starves_after
from tlora.scheduler.state import ClusterState

USUAL = made_settings()
REST = USUAL.min_residence_seconds
AT_MOST = MOST_RETHINK_SECONDS + TICK_SECONDS  # until time alone makes a difference
LONG = 100_000
FROM_OUTSIDE = (GpusLost, NodeDraining, BaseMeasured)  # which no group is spared
SOME_TIME = 1800.0  # more than a rest


def made_job(name: str, gpus: int = 1, steps: int = LONG, tokens: float = 1000.0) -> JobSubmitted:
    """Of short samples, so that many GPUs are of use; of a bound that lets it have no fewer than it asks for, and too large to share."""
    return made_spec(name, gpus, tokens, steps, parameters=13 * 10**8, longest=16, max_slowdown=1.0)


def alone_on(gpus: int, tokens: float = 1000.0) -> float:
    """Seconds of a step on GPUs of one node."""
    return 0.5 + (0.05 if gpus > 1 else 0.0) + tokens / (1000.0 * gpus)


# -- growth ----------------------------------------------------------------------------------------------------------------


def test_who_is_alone_grows_onto_idle_gpus_when_it_has_rested() -> None:
    timeline = made_timeline(8)
    timeline.tell(made_job("a"))
    own = len(timeline.gpus_of("a"))
    assert own < 8
    timeline.until(REST - 1.0)
    assert len(timeline.gpus_of("a")) == own
    timeline.until(REST + AT_MOST)
    assert len(timeline.gpus_of("a")) == 8


def test_who_could_not_grow_is_counted_on_what_it_has_and_rests() -> None:
    timeline = made_timeline(8)
    timeline.tell(made_job("a"))
    own = timeline.gpus_of("a")
    timeline.until(REST + AT_MOST)
    assert len(timeline.gpus_of("a")) == 8
    (change,) = timeline.tell(GroupKept("g0", tuple(own), "a rank has ended"))
    assert isinstance(change, ChangeGroup) and change.group.gpus == tuple(own) and change.group.plan.data_parallel == len(own)
    assert timeline.tell(GroupKept("g0", tuple(own), "it says so twice"), GroupKept("g9", (0,), "of no group that is there")) == []
    timeline.until(timeline.now + REST - TICK_SECONDS)
    assert timeline.gpus_of("a") == own, "the next attempt comes after a rest"
    timeline.until(timeline.now + AT_MOST + 2 * TICK_SECONDS)
    assert len(timeline.gpus_of("a")) == 8


def test_what_was_grown_is_given_back_at_once_to_somebody_who_comes() -> None:
    """In the same decision, though the group has changed a moment ago; it keeps what is its share."""
    timeline = made_timeline(8)
    timeline.tell(made_job("a"))
    timeline.until(REST + AT_MOST)
    shares: list[int] = []
    for index in range(7):
        timeline.now += 1.0
        assert len(timeline.gpus_of("a")) + sum(shares) == 8
        change, start = timeline.tell(made_job(f"b{index}"))
        assert isinstance(change, ChangeGroup) and isinstance(start, StartGroup) and start.group.job_ids == (f"b{index}",)
        shares = [len(timeline.gpus_of(f"b{number}")) for number in range(index + 1)]
        if len(timeline.gpus_of("a")) == 1:
            break
    assert len(timeline.gpus_of("a")) < 4 and not timeline.scheduler.state.pending


def test_everybody_gets_a_gpu_before_anybody_has_two() -> None:
    timeline = made_timeline(4)
    timeline.tell(made_job("a"))
    timeline.until(2 * REST)
    for name in "bcd":
        timeline.tell(made_job(name))
        timeline.until(timeline.now + 2 * REST)
    assert sorted(len(timeline.gpus_of(name)) for name in "abcd") == [1, 1, 1, 1] and not timeline.scheduler.state.pending


def test_everybody_gets_the_gpu_that_it_asks_for_though_some_might_share_more() -> None:
    """Two on three GPUs are faster than each on its own, on two together slower: then nobody else gets the third back."""
    timeline = made_timeline(4)
    for name in "abcd":
        timeline.tell(made_spec(name, tokens=1000.0, longest=16, steps=LONG, max_slowdown=1.0))
        timeline.until(timeline.now + 2 * REST)
    timeline.until(timeline.now + 4 * REST)
    assert not timeline.scheduler.state.pending


@pytest.mark.parametrize("elastic", [True, False])
def test_only_who_may_grows(elastic: bool) -> None:
    timeline = made_timeline(8, settings=made_settings(elastic=elastic))
    timeline.tell(made_job("a", 2))
    timeline.until(4 * REST)
    assert (len(timeline.gpus_of("a")) == 8) == elastic and (elastic or len(timeline.gpus_of("a")) == 2)


def test_nobody_gets_more_gpus_than_it_has_samples() -> None:
    for samples in (1, 2, 3, 5):
        timeline = made_timeline(8)
        timeline.tell(made_spec("a", tokens=1000.0 * samples, longest=1000, steps=LONG))
        timeline.until(4 * REST)
        assert len(timeline.gpus_of("a")) == samples
        other = made_timeline(1)
        other.tell(made_spec("a", tokens=1000.0 * samples, longest=1000, steps=LONG))
        other.until(SOME_TIME)
        other.tell(NodeAdded("n1", tuple(range(1, 9))))
        assert samples == 1 or 1 < len(other.gpus_of("a")) <= samples
        other.until(SOME_TIME + 4 * REST)
        assert len(other.gpus_of("a")) == samples


@pytest.mark.parametrize(("least", "most"), [(1, 8), (1000, 4), (5000, 1)])
def test_nobody_gets_more_gpus_than_its_back_end_cuts_a_step_for(least: int, most: int) -> None:
    timeline = made_timeline(8, settings=Settings(least_replica_tokens=least))
    timeline.tell(made_spec("a", tokens=4000.0, longest=64, steps=LONG))
    timeline.until(4 * REST)
    assert len(timeline.gpus_of("a")) == most


def test_growth_goes_to_whom_it_is_worth_most() -> None:
    """Of two that could grow onto the same GPUs, the one that is nearly done is worth more, and the other gets what is left."""
    timeline = made_timeline(4)
    timeline.tell(made_job("far", steps=LONG), made_job("near", steps=2000))
    timeline.until(REST + AT_MOST)
    assert len(timeline.gpus_of("near")) == 3 and len(timeline.gpus_of("far")) == 1


# -- for too little --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "grows"), [(0.025, False), (0.035, True)])
def test_growth_must_shorten_steps_by_its_least_share(saved: float, grows: bool) -> None:
    """With n tokens and two GPUs a step takes .55 + n / 2 instead of .5 + n: a share of (n / 2 - .05) / (.5 + n) less."""
    tokens = 1000 * (0.05 + 0.5 * saved) / (0.5 - saved)
    assert 1 - alone_on(2, tokens) / alone_on(1, tokens) == pytest.approx(saved)
    timeline = made_timeline(2)
    timeline.tell(made_job("a", tokens=tokens))
    timeline.until(4 * REST)
    assert len(timeline.gpus_of("a")) == (2 if grows else 1)


def grown(gpus: int, left: float, *node: int) -> tuple[int, ...]:
    """GPUs of a job that has rested alone on the only one, with so many seconds to go, when n1 or (without) n0 gets more."""
    timeline = made_timeline(1)
    timeline.tell(made_job("a", steps=round((SOME_TIME + left) / alone_on(1))))
    timeline.until(SOME_TIME)
    timeline.tell(NodeAdded(f"n{len(node)}", node or tuple(range(gpus))))
    return timeline.gpus_of("a")


@pytest.mark.parametrize(("margin", "grows"), [(0.9, False), (1.1, True)])
def test_growth_must_save_more_than_its_pause(margin: float, grows: bool) -> None:
    """What is left when the base is on the GPU that comes, times the share saved, against (1 + hysteresis) * (checkpoint + join)."""
    saved = 1 - alone_on(2) / alone_on(1)
    least = USUAL.moves.warm_start_seconds + (1 + USUAL.hysteresis) * USUAL.moves.change_seconds(grows=True) / saved
    assert least < (1 + USUAL.hysteresis) * USUAL.moves.restart_seconds / saved, "which another worker costs"
    assert grown(2, margin * least) == ((0, 1) if grows else (0,))


@pytest.mark.parametrize(("margin", "moves"), [(0.9, False), (1.1, True)])
def test_a_move_to_another_node_must_save_more_than_a_start(margin: float, moves: bool) -> None:
    least = (1 + USUAL.hysteresis) * USUAL.moves.restart_seconds / (1 - alone_on(4) / alone_on(1))
    assert grown(4, margin * least, 1, 2, 3, 4) == ((1, 2, 3, 4) if moves else (0,))


@pytest.mark.parametrize(("margin", "parts"), [(0.9, False), (1.1, True)])
def test_who_shares_parts_for_a_free_gpu_where_that_saves_more_than_a_start(margin: float, parts: bool) -> None:
    """What is left of both alone, times what sharing adds to it, against (1 + hysteresis) * members * (start + checkpoint)."""
    together = 0.5 + 0.01 + 0.6  # a step of both
    least = (1 + USUAL.hysteresis) * USUAL.moves.restart_seconds / (together / alone_on(1, 300.0) - 1)
    steps = round(SOME_TIME / together + margin * least / alone_on(1, 300.0))
    timeline = made_timeline(1)
    for name in "ab":
        timeline.tell(made_spec(name, tokens=300.0, longest=300, steps=steps, max_slowdown=2.0))
    timeline.until(SOME_TIME)
    assert timeline.gpus_of("a") == timeline.gpus_of("b") == (0,)
    timeline.tell(NodeAdded("n1", (1,)))
    assert ({timeline.gpus_of("a"), timeline.gpus_of("b")} == {(0,), (1,)}) == parts


def test_while_somebody_waits_who_shares_parts_only_when_the_group_has_rested() -> None:
    """The free GPU is one of two that a wide job waits for."""
    timeline = made_timeline(2, settings=made_settings(elastic=False, preemption=False))
    timeline.tell(made_job("brief", steps=100))
    for name in "ab":
        timeline.tell(made_spec(name, tokens=300.0, longest=300, steps=LONG, max_slowdown=2.0))
    timeline.tell(made_job("wide", gpus=2))
    timeline.until(200.0)
    assert "brief" in timeline.ended_at and timeline.gpus_of("wide") == ()
    assert timeline.gpus_of("a") == timeline.gpus_of("b")
    timeline.until(REST + AT_MOST)
    assert {timeline.gpus_of("a"), timeline.gpus_of("b")} == {(0,), (1,)}


# -- at the expense of others ------------------------------------------------------------------------------------------------


def waits_for(long_left: float, short: float, settings: Settings = USUAL) -> float:
    """How long a job of `short` seconds waits for the only GPU, on which one has `long_left` to go and has rested."""
    timeline = made_timeline(1, settings=settings)
    timeline.tell(made_job("long", steps=round((2000.0 + long_left) / 1.5)))
    timeline.until(2000.0)
    timeline.tell(made_job("short", steps=round(short / 1.5)))
    timeline.until(2000.0 + long_left + short + 1000.0)
    return timeline.started_at["short"] - 2000.0


def test_who_is_far_less_urgent_gives_way_at_once_if_it_has_rested() -> None:
    assert waits_for(9000.0, 900.0) == 0.0
    assert waits_for(9000.0, 900.0, made_settings(preemption=False)) == pytest.approx(9000.0, abs=2.0)


@pytest.mark.parametrize(("ratio", "waits"), [(1.9, True), (2.1, False)])
def test_nobody_is_stopped_for_a_small_difference_in_urgency(ratio: float, waits: bool) -> None:
    """Ages add some per cent: of two submitted so close to each other the ratio is that of what is left of each."""
    assert (waits_for(90_000.0, 90_000.0 / ratio / 1.007) > 0) == waits


# -- no thrash -------------------------------------------------------------------------------------------------------------


@given(moves=MOVES)
def test_a_group_that_has_just_changed_neither_grows_nor_moves_nor_stops(moves: list[Move]) -> None:
    """Unless its GPUs are lost, its base is measured, or for somebody who starves. It may take in who waits, give up GPUs, and let one go
    who has free GPUs for itself: who has left so leaves no group again before somebody has joined it there.
    """
    before: dict[str, JobGroup] = {}
    changed_at: dict[str, float] = {}
    for event, state, actions in steps_through(residual_capacity(made_settings()), moves):
        starts = [action.group for action in actions if isinstance(action, StartGroup)]
        alone = {group.job_ids[0] for group in starts if len(group.job_ids) == 1}
        rescued = any(
            state.jobs[name].waited_seconds >= starves_after(state.jobs[name], USUAL) for group in starts for name in group.job_ids
        )
        for action in actions:
            match action:
                case StopGroup(name):
                    members, gpus = (), 0
                case ChangeGroup(group):
                    name, members, gpus = group.group_id, group.job_ids, len(group.gpus)
                case _:
                    continue
            if name in before and state.now - changed_at[name] < REST and not rescued and not isinstance(event, FROM_OUTSIDE):
                gone = _alive(state, before[name]) - set(members)
                assert not gone or (members and len(gone) == 1 and gone <= alone), f"{name} loses {gone} at {event}"
                assert gpus <= len(before[name].gpus), f"{name} grows at {event}"
        changed_at |= {group.group_id: state.now for group in wanted(actions)}
        before = {name: known.group for name, known in state.groups.items()}


def _alive(state: ClusterState, group: JobGroup) -> set[str]:
    return (set(group.job_ids) & set(state.jobs)) - state.held


@pytest.mark.slow
def test_moves_are_few_in_a_long_random_story() -> None:
    """Jobs of all sizes come at random to three nodes of four GPUs, about as many as these can serve; then no more."""
    draws = random.Random(5)
    timeline = made_timeline(4, 4, 4)
    for index in range(200):
        timeline.until(timeline.now + draws.expovariate(1 / 220.0))
        gpus = draws.choice((1, 1, 1, 1, 2, 2, 4, 8))
        tokens = gpus * draws.choice((200.0, 800.0, 3000.0))
        seconds = 60.0 * 10 ** draws.uniform(0, 2.6) / gpus**0.5
        steps = max(1, round(seconds / alone_on(gpus, tokens)))
        bound, tenant = draws.choice((1.2, 1.5, 1.5, 2.0)), f"t{index % 3}"
        timeline.tell(made_spec(f"j{index}", gpus, tokens, steps, 10**7, 64, max_slowdown=bound, tenant=tenant))
    timeline.until(timeline.now + 10 * 86400.0)
    assert len(timeline.ended_at) == 200, "somebody starved"
    assert 0.2 < sum(timeline.moves.values()) / 200 < 2
    for name, moves in timeline.moves.items():
        assert moves <= 4 + 2 * (timeline.ended_at[name] - timeline.started_at[name]) / REST, name


@pytest.mark.parametrize("least", [1, 3])
def test_no_group_has_fewer_gpus_than_its_base_needs(least: int) -> None:
    """Of ten jobs on four GPUs, each on one by the policy's own choice."""
    timeline = made_timeline(4)
    for number in range(10):
        timeline.tell(made_spec(f"j{number}", gpus=least, tokens=4000.0, longest=64, steps=400, least_gpus=least))
    timeline.until(3600.0)
    sizes = [len(action.group.gpus) for _, action in timeline.actions if isinstance(action, StartGroup | ChangeGroup)]
    assert sizes and min(sizes) == least
