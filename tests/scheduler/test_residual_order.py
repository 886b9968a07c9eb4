"""`residual_capacity`: who goes first of those who wait. Priority, starvation, deadlines, tenants' shares, then the shortest."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.scheduler.mirror import made_settings, made_spec
from tests.scheduler.timeline import MOST_RETHINK_SECONDS, TICK_SECONDS, Timeline, made_timeline
from tlora.protocol import JobSubmitted, StopGroup
from tlora.scheduler.settings import Settings

USUAL = made_settings()
STEP = 1.5  # seconds of a step of 1,000 tokens on one GPU
SOME_TIME = 1800.0  # more than a rest
AT_MOST = MOST_RETHINK_SECONDS + TICK_SECONDS  # until time alone makes a difference


def made_job(name: str, seconds: float, gpus: int = 1, **others: Any) -> JobSubmitted:
    """Of so many seconds alone on its GPUs. It is too large to share, has one sample for each GPU and takes no fewer than it asks for."""
    step = STEP if gpus == 1 else STEP + 0.05
    values = {"steps": max(1, round(seconds / step)), "parameters": 13 * 10**8, "longest": 1000, "max_slowdown": 1.0} | others
    return made_spec(name, gpus, 1000.0 * gpus, **values)


def order_of_starts(*waiting: JobSubmitted, settings: Settings = USUAL, first: float = 600.0) -> list[str]:
    """How those start who come one second after the other while the only GPU is busy for `first` seconds, and none but them comes."""
    timeline = made_timeline(1, settings=settings)
    timeline.tell(made_job("first", first, priority=100.0))
    for spec in waiting:
        timeline.until(timeline.now + 1.0)
        assert timeline.tell(spec) == []
    timeline.until(10 * 86400.0)
    assert len(timeline.ended_at) == len(waiting) + 1
    return sorted((spec.job_id for spec in waiting), key=lambda name: timeline.started_at[name])


# -- priority --------------------------------------------------------------------------------------------------------------


def test_the_shortest_goes_first_of_equals_who_came_first() -> None:
    jobs = [made_job("long", 3000.0), made_job("short", 300.0), made_job("b", 900.0), made_job("c", 900.0), made_job("d", 900.0)]
    assert order_of_starts(*jobs) == ["short", "b", "c", "d", "long"]


@pytest.mark.parametrize(("exponent", "seconds", "first"), [(0.25, 800.0, "narrow"), (0.25, 600.0, "wide"), (0.0, 800.0, "wide")])
def test_of_two_that_last_nearly_as_long_the_narrow_one_goes_first(exponent: float, seconds: float, first: str) -> None:
    """One of 1,000 s on one GPU, the other on four: with the exponent of 1/4 it counts as 1.41 times as long."""
    timeline = made_timeline(4, settings=replace(USUAL, width_exponent=exponent))
    timeline.tell(made_job("before", 600.0, gpus=4, priority=100.0))
    timeline.until(1.0)
    assert timeline.tell(made_job("narrow", 1000.0), made_job("wide", seconds, gpus=4)) == []
    timeline.until(10 * 86400.0)
    assert min(("narrow", "wide"), key=lambda name: timeline.started_at[name]) == first


def test_priority_orders_those_who_wait_before_all_else() -> None:
    jobs = [
        made_job("low", 60.0, priority=-1.0, deadline=100.0),
        made_job("usual", 60.0, deadline=100.0),
        made_job("high", 90_000.0, priority=1.0, tenant="rich"),
        made_job("highest", 90_000.0, priority=1.5, tenant="rich"),
    ]
    assert order_of_starts(*jobs) == ["highest", "high", "usual", "low"]


def on_a_busy_gpu(running: JobSubmitted, waiting: JobSubmitted, settings: Settings = USUAL) -> Timeline:
    """`waiting` comes to the only GPU when `running` has had some time there."""
    timeline = made_timeline(1, settings=settings)
    timeline.tell(running)
    timeline.until(SOME_TIME)
    timeline.tell(waiting)
    return timeline


def test_a_higher_priority_stops_a_lower_one_however_urgent_that_is() -> None:
    timeline = on_a_busy_gpu(made_job("urgent", SOME_TIME + 100.0), made_job("high", 90_000.0, priority=1.0))
    assert timeline.gpus_of("high") == (0,) and list(timeline.scheduler.state.pending) == ["urgent"]


def test_a_lower_priority_stops_nobody_however_urgent_it_is_and_however_long_it_waits() -> None:
    timeline = on_a_busy_gpu(made_job("high", 90_000.0, priority=1.0), made_job("urgent", 60.0, deadline=SOME_TIME))
    timeline.until(30_000.0)
    assert timeline.gpus_of("high") == (0,) and list(timeline.scheduler.state.pending) == ["urgent"]


# -- deadlines -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slack", "first"), [(100_000.0, "short"), (1000.0, "short"), (200.0, "due"), (-100.0, "due")])
def test_who_would_miss_its_deadline_by_waiting_goes_before_a_shorter_one(slack: float, first: str) -> None:
    """When the GPU comes free at 600 s, `due` takes 900 s of the 900 + slack that are left, and `short` 450 s."""
    jobs = [made_job("short", 450.0), made_job("due", 900.0, deadline=600.0 + 900.0 + slack)]
    assert order_of_starts(*jobs)[0] == first


def test_in_time_for_its_deadline_who_would_else_have_been_late() -> None:
    """Ten jobs of 300 s wait; one of 600 s is due 900 s after the GPU comes free."""
    timelines: list[float] = []
    for deadline in (None, 600.0 + 900.0):
        timeline = made_timeline(1)
        timeline.tell(made_job("first", 600.0, priority=1.0), *[made_job(f"j{index}", 300.0) for index in range(10)])
        timeline.tell(made_job("due", 600.0, deadline=deadline))
        timeline.until(90_000.0)
        timelines.append(timeline.ended_at["due"])
    without, with_it = timelines
    assert with_it <= 1500.0 < without


def test_a_deadline_counts_at_most_tenfold() -> None:
    late = made_job("late", 3000.0, deadline=10.0)
    assert order_of_starts(made_job("twelfth", 250.0), late)[0] == "twelfth"
    assert order_of_starts(made_job("eighth", 375.0), late)[0] == "late"


def test_a_near_deadline_stops_whoever_has_none() -> None:
    equal = made_job("equal", SOME_TIME + 3000.0)
    assert on_a_busy_gpu(equal, made_job("due", 3000.0)).gpus_of("equal") == (0,)
    timeline = on_a_busy_gpu(equal, made_job("due", 3000.0, deadline=SOME_TIME + 3300.0))
    assert timeline.gpus_of("due") == (0,)
    timeline.until(20_000.0)
    assert timeline.ended_at["due"] <= SOME_TIME + 3300.0 < timeline.ended_at["equal"]


# -- tenants ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1.4, 16.0])
def test_a_tenant_that_has_used_less_goes_first_however_long_its_job_is(length: float) -> None:
    """When one of the four GPUs comes free, `a` has had them all, and both have a job that waits."""
    timeline = made_timeline(4)
    timeline.tell(*[made_job(f"a{index}", 600.0 + 100.0 * index, tenant="a") for index in range(4)])
    timeline.tell(made_job("a", 500.0, tenant="a"), made_job("b", length * 500.0, tenant="b"))
    timeline.until(650.0)
    assert timeline.gpus_of("b") and len(timeline.scheduler.state.pending) == 1


def test_of_two_that_have_used_nothing_the_shorter_goes_first() -> None:
    timeline = made_timeline(4)
    timeline.tell(*[made_job(f"a{index}", 600.0 + 100.0 * index, tenant="a") for index in range(4)])
    timeline.tell(made_job("a", 500.0, tenant="a"), made_job("b", 1000.0, tenant="b"), made_job("c", 1200.0, tenant="c"))
    timeline.until(650.0)
    assert timeline.gpus_of("b") and list(timeline.scheduler.state.pending) == ["a", "c"]


def gpu_share(*tenants: str) -> float:
    """Share of all GPU time so far of the second, whose jobs came later and are a little longer, while both have some that wait."""
    timeline = made_timeline(8, 8)
    timeline.tell(*[made_job(f"a{index}", 400.0 + 25.0 * min(index, 8), tenant=tenants[0]) for index in range(80)])
    own = total = 0
    while timeline.now < 2400.0:
        if timeline.now == 1000.0:
            timeline.tell(*[made_job(f"b{index}", 605.0, tenant=tenants[1]) for index in range(40)])
        timeline.until(timeline.now + 50.0)
        running = [name for known in timeline.scheduler.state.groups.values() for name in known.group.job_ids]
        own, total = own + sum(name.startswith("b") for name in running), total + len(running)
    assert {name[0] for name in timeline.scheduler.state.pending} >= {"b"} and total == 16 * 48
    return own / total


def test_two_tenants_get_halves_whoever_came_first_and_with_how_many() -> None:
    assert 0.4 < gpu_share("a", "b") < 0.6
    assert gpu_share("same", "same") < 0.1


# -- starvation ------------------------------------------------------------------------------------------------------------


WIDE_SECONDS = 1000.0
LATE_AT = USUAL.starvation_least_seconds


def crowded(seconds: float, settings: Settings, *nodes: int, wide: dict[str, Any] | None = None) -> Timeline:
    """Short jobs of one GPU come without end to nodes that they keep busy; from the beginning on one waits that asks for four GPUs."""
    timeline = made_timeline(*nodes, settings=settings)
    gpus, count = sum(nodes), 0
    timeline.tell(*[made_job(f"s{-index}", 100.0 + 20.0 * (3 * index % 8)) for index in range(1, gpus + 1)])
    timeline.tell(made_job("wide", WIDE_SECONDS, 4, **(wide or {})))
    while timeline.now < seconds:
        timeline.until(timeline.now + 30.0)
        while sum(name.startswith("s") for name in timeline.scheduler.state.pending) < 2:
            timeline.tell(made_job(f"s{count}", 300.0))
            count += 1
    return timeline


@pytest.mark.parametrize("preemption", [True, False])
def test_who_is_late_by_the_factor_starts_next(preemption: bool) -> None:
    """By stopping others, or else when those have ended who run by then: GPUs are kept free for it."""
    timeline = crowded(LATE_AT + 2000.0, made_settings(preemption=preemption), 4)
    latest = TICK_SECONDS if preemption else TICK_SECONDS + 300.0
    assert LATE_AT <= timeline.started_at["wide"] <= LATE_AT + latest
    assert "wide" not in crowded(LATE_AT + 2000.0, made_settings(preemption=preemption, starvation_factor=math.inf), 4).started_at


def test_gpus_are_kept_free_for_who_starves_on_no_more_nodes_than_it_needs() -> None:
    timeline = crowded(LATE_AT, made_settings(preemption=False), 4, 4)
    kept = 0
    while "wide" not in timeline.started_at:
        timeline.until(timeline.now + 10.0)
        if not timeline.scheduler.state.pending.keys() - {"wide"}:
            timeline.tell(made_job(f"more {timeline.now}", 300.0))
        free = [len(node.free) for node in timeline.scheduler.state.pool.nodes.values()]
        kept = max(kept, *free)
        assert min(free) == 0, "the other node serves who waits"
        assert timeline.now < LATE_AT + 2000.0
    assert kept >= 3


def test_who_starves_of_a_lower_priority_does_not_pass_a_higher_one() -> None:
    timeline = crowded(LATE_AT + 2000.0, USUAL, 4, wide={"priority": -1.0})
    assert "wide" not in timeline.started_at


def test_of_those_who_starve_who_came_first_goes_first_though_others_are_shorter() -> None:
    timeline = made_timeline(1)
    timeline.tell(made_job("first", 40_000.0, priority=1.0), made_job("long", 2000.0))
    timeline.until(1.0)
    timeline.tell(made_job("short", 700.0))
    timeline.until(40_000.0 - 1000.0)
    timeline.tell(made_job("new", 70.0))
    timeline.until(90_000.0)
    assert timeline.started_at["long"] < timeline.started_at["short"] < timeline.started_at["new"]


def test_who_starves_is_not_stopped_for_somebody_more_urgent() -> None:
    """Once late, it runs to its end: only a higher priority stops it."""
    for priority, stops in ((0.0, False), (1.0, True)):
        timeline = made_timeline(1)
        timeline.tell(made_job("first", 30_000.0, priority=1.0), made_job("late", 2500.0))
        timeline.until(32_000.0)
        assert timeline.gpus_of("late") == (0,)
        actions = timeline.tell(made_job("urgent", 90.0, priority=priority))
        assert any(isinstance(action, StopGroup) for action in actions) == stops
