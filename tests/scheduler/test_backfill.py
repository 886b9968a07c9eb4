"""EASY backfill: a job of several GPUs that finds no room has a reservation, and others run meanwhile where they do not put it off."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.mirror import made_settings, made_spec
from tests.scheduler.timeline import Timeline, made_timeline
from tlora.protocol import JobSubmitted
from tlora.scheduler.exclusive_baselines import easy
from tlora.scheduler.forecast import Reasons
from tlora.scheduler.policies import reservation

LIVE = made_settings(elastic=False, preemption=False, reservations=True, order="arrival", starvation_factor=float("inf"))
START = LIVE.moves.cold_start_seconds
POLICIES = ["easy", "residual_capacity"]


def timeline_of(policy: str, *nodes: int) -> Timeline:
    return made_timeline(*nodes, policy=easy(LIVE)) if policy == "easy" else made_timeline(*nodes, settings=LIVE)


def made_job(name: str, gpus: int, seconds: float, priority: float = 0.0) -> JobSubmitted:
    """Too large to share; its steps take 1.5 s alone on one GPU."""
    return made_spec(name, gpus, 1000.0 * gpus, round(seconds / 1.5), 13 * 10**8, max_slowdown=1.0, priority=priority)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_small_job_runs_under_the_reservation_if_it_ends_before(policy: str) -> None:
    timeline = timeline_of(policy, 2)
    timeline.tell(made_job("runs", 1, 3000.0))
    timeline.tell(made_job("wide", 2, 600.0), made_job("long", 1, 6000.0), made_job("short", 1, 600.0))
    assert timeline.gpus_of("short") and not timeline.gpus_of("long") and not timeline.gpus_of("wide")
    timeline.until(20_000.0)
    alone = timeline_of(policy, 2)
    alone.tell(made_job("runs", 1, 3000.0))
    alone.tell(made_job("wide", 2, 600.0))
    alone.until(20_000.0)
    assert timeline.started_at["wide"] == alone.started_at["wide"], "nothing has put it off"
    assert timeline.started_at["long"] > timeline.started_at["wide"]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_it_will_not_need_is_free_for_long_ones(policy: str) -> None:
    timeline = timeline_of(policy, 4)
    timeline.tell(made_job("a", 2, 1500.0), made_job("b", 1, 3000.0))
    timeline.tell(made_job("wide", 3, 600.0), made_job("long", 1, 6000.0))
    assert not timeline.gpus_of("long"), "three of four come free with the first to end, and none is spare"
    other = timeline_of(policy, 4)
    other.tell(made_job("a", 3, 1500.0))
    other.tell(made_job("wide", 2, 600.0), made_job("long", 1, 6000.0), made_job("longer", 1, 6000.0))
    assert other.gpus_of("long") and not other.gpus_of("longer")
    other.until(1600.0)
    assert other.started_at["wide"] == other.ended_at["a"] and other.gpus_of("longer")


@pytest.mark.parametrize("policy", POLICIES)
def test_other_nodes_are_free_for_all(policy: str) -> None:
    timeline = timeline_of(policy, 2, 2)
    timeline.tell(made_job("a", 1, 1500.0), made_job("b", 1, 3000.0), made_job("c", 2, 9000.0))
    first, second = timeline.gpus_of("a"), timeline.gpus_of("b")
    assert timeline.scheduler.state.pool.node_of[first[0]] == timeline.scheduler.state.pool.node_of[second[0]]
    timeline.tell(made_job("wide", 2, 600.0), made_job("long", 1, 9000.0))
    assert not timeline.gpus_of("long")
    timeline.until(1600.0)
    assert not timeline.gpus_of("long"), "the GPU that came free is kept too"
    timeline.until(3100.0)
    assert timeline.gpus_of("wide")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_wider_than_a_node_gets_the_nodes_that_come_free_first(policy: str) -> None:
    timeline = timeline_of(policy, 2, 2, 2)
    timeline.tell(made_job("a", 2, 1500.0), made_job("b", 2, 9000.0), made_job("c", 1, 3000.0))
    timeline.tell(made_job("wide", 4, 600.0), made_job("long", 1, 9000.0), made_job("short", 1, 900.0))
    assert timeline.gpus_of("short") and not timeline.gpus_of("long")
    timeline.until(3100.0)
    assert timeline.started_at["wide"] == timeline.ended_at["c"]


def test_one_without_reservations_keeps_nothing() -> None:
    timeline = made_timeline(2, settings=made_settings(elastic=False, order="arrival"))
    timeline.tell(made_job("runs", 1, 3000.0))
    timeline.tell(made_job("wide", 2, 600.0), made_job("long", 1, 6000.0))
    assert timeline.gpus_of("long")


def test_a_job_joins_no_group_whose_end_is_counted_on() -> None:
    """It would slow down the others there. A group that will run on in any case takes it."""

    def told(steps: int) -> Timeline:
        timeline = made_timeline(3, settings=LIVE)
        timeline.tell(made_spec("runs", tokens=200.0, steps=steps, max_slowdown=4.0), made_job("other", 1, 1500.0))
        timeline.tell(made_job("wide", 2, 600.0), made_spec("joins", tokens=200.0, steps=20_000, max_slowdown=4.0))
        return timeline

    counted, not_counted = told(500), told(10_000)
    assert not counted.gpus_of("joins")
    assert not_counted.gpus_of("joins") == not_counted.gpus_of("runs") != ()


@pytest.mark.parametrize("policy", POLICIES)
def test_both_jobs_are_told_why(policy: str) -> None:
    timeline = timeline_of(policy, 2)
    timeline.tell(made_job("runs", 1, 3000.0))
    timeline.tell(made_job("wide", 2, 600.0), made_job("long", 1, 6000.0))
    state = timeline.scheduler.state
    reasons = Reasons(state, policy != "easy", kept=reservation(policy, state))
    wide, long = reasons.of(state.jobs["wide"]), reasons.of(state.jobs["long"])
    assert wide.startswith("it asks for 2 GPUs and 1 is free")
    assert wide.endswith("the GPUs on which it will soonest start are kept for it, and used by jobs that end before that")
    assert long == "what is free is kept for a job before it that asks for 2 GPUs, which this one would put off"
    assert reservation("backfill", state) is None


JOBS = st.lists(st.tuples(st.integers(1, 4), st.floats(100.0, 5000.0)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(policy=st.sampled_from(POLICIES), running=JOBS, behind=JOBS)
def test_the_first_of_the_queue_starts_no_later_than_without_those_behind_it(
    policy: str, running: list[tuple[int, float]], behind: list[tuple[int, float]]
) -> None:
    def start_of(*others: tuple[int, float]) -> float:
        timeline = timeline_of(policy, 4)
        timeline.tell(*[made_job(f"r{number}", gpus, seconds) for number, (gpus, seconds) in enumerate(running)])
        if timeline.scheduler.state.pending:  # all that came before have to run
            return 0.0
        timeline.tell(made_job("wide", 4, 600.0))
        for number, (gpus, seconds) in enumerate(others):
            timeline.tell(made_job(f"b{number}", gpus, seconds))
        timeline.until(10_000.0)
        return timeline.started_at["wide"]

    assert start_of(*behind) <= start_of() + START
