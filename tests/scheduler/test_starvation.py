"""Who has waited too long goes first, on a small share of the GPUs; and what is left of a job that runs beyond the steps told of it."""

from __future__ import annotations

import math

import pytest

from tests.scheduler.mirror import BASES, made_settings, made_spec, made_state, waiting_job
from tests.scheduler.timeline import TICK_SECONDS, Timeline, made_timeline
from tlora.protocol import JobGroup, JobSubmitted, ParallelPlan, Tick
from tlora.scheduler.starvation import Starvation, starves_after
from tlora.scheduler.state import ClusterState
from tlora.scheduler.waiting import remaining_seconds, urgency

USUAL = made_settings()
HOUR = 3600.0
LONG = 1_000_000


def made_job(name: str, gpus: int = 1, steps: int = LONG, **others: object) -> JobSubmitted:
    """Too large to share, of one sample for each GPU, and on no fewer GPUs than it asks for."""
    values = {"parameters": 13 * 10**8, "longest": 1000, "max_slowdown": 1.0} | others
    return made_spec(name, gpus, 1000.0 * gpus, steps, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(("hours", "after"), [(0.01, 4.0), (0.4, 4.0), (1.0, 10.0), (2.4, 24.0), (100.0, 24.0)])
def test_a_job_starves_after_ten_times_its_length_but_not_before_four_hours_nor_after_a_day(hours: float, after: float) -> None:
    state = made_state(4)
    job = waiting_job(state, made_job("a", steps=round(hours * HOUR / 1.5)))
    assert starves_after(job, USUAL) == pytest.approx(after * HOUR)
    assert starves_after(job, made_settings(starvation_factor=math.inf)) == math.inf


def test_waits_count_together_and_time_in_a_group_does_not() -> None:
    timeline = made_timeline(1, settings=made_settings(starvation_factor=math.inf))
    timeline.tell(made_job("a"))
    timeline.until(HOUR)
    timeline.tell(made_job("b", steps=1000))
    timeline.until(3 * HOUR)
    assert timeline.ended_at["b"] == HOUR + 1500.0
    assert timeline.job("a").waited_seconds == 1500.0 and timeline.job("a").ran_at(timeline.now) == 3 * HOUR - 1500.0


def late(*gpus: int, nodes: tuple[int, ...] = (4, 4), **settings: float) -> list[str]:
    """Who of jobs that ask for so many GPUs goes first when all have waited for a day, among others that have not."""
    state = made_state(*nodes)
    for index, count in enumerate(gpus):
        state.submit(made_job(f"j{index}", count))
    starvation = Starvation(made_settings(**settings))  # type: ignore[arg-type]
    starvation.follow(state)
    assert starvation.first(state) == [] and starvation.next_at == pytest.approx(24 * HOUR)
    state.now = 24 * HOUR
    state.submit(made_job("new"))
    starvation.follow(state)
    anew = Starvation(made_settings(**settings))  # type: ignore[arg-type]
    anew.follow(state)
    assert anew.first(state) == starvation.first(state)
    return [job.spec.job_id for job in starvation.first(state)]


def test_as_they_came_up_to_a_share_of_the_gpus_or_the_first() -> None:
    assert late(1, 1, 1) == ["j0"]  # 5 % of 8 GPUs are less than one
    assert late(8, 1) == ["j0"]
    assert late(1, 1, 1, starvation_share=0.25) == ["j0", "j1"]
    assert late(1, 2, 1, starvation_share=0.25) == ["j0"], "nobody passes one who came earlier"
    assert late(3, 1, starvation_share=0.25) == ["j0"]
    assert USUAL.starvation_share <= 0.15


def first_names(state: ClusterState, starvation: Starvation) -> list[str]:
    """Who goes first, which one that has seen nothing before tells too."""
    anew = Starvation(made_settings(starvation_share=0.5))
    for each in (starvation, anew):
        each.follow(state)
    found = [job.spec.job_id for job in starvation.first(state)]
    assert [job.spec.job_id for job in anew.first(state)] == found and anew.next_at == starvation.next_at
    return found


DAY = 24 * HOUR


def with_wide(*names: str) -> tuple[ClusterState, Starvation]:
    """Jobs of all 8 GPUs and a narrow one, which have all waited for a day; the share is half of the GPUs."""
    state, starvation = made_state(4, 4), Starvation(made_settings(starvation_share=0.5))
    for name in names:
        state.submit(made_job(name, 8))
    state.submit(made_job("narrow", 1))
    state.now = DAY
    return state, starvation


def run_alone(state: ClusterState, name: str) -> None:
    state.place(JobGroup("g0", BASES[0], tuple(range(8)), ParallelPlan(8, 8192), (name,), (1.0,)))


def test_a_wide_one_goes_first_until_it_had_its_share_of_the_last_day_and_again_when_that_has_faded() -> None:
    """All 8 GPUs for t are the share of 4 where 1 - exp(-t / day) is a half."""
    state, starvation = with_wide("wide", "next")
    assert first_names(state, starvation) == ["wide"]
    run_alone(state, "wide")
    had_enough = DAY + DAY * math.log(2)
    state.now = had_enough - 60.0
    assert first_names(state, starvation) == ["wide"] and state.now < starvation.next_at <= had_enough + 1.0
    state.now = had_enough + 60.0
    assert first_names(state, starvation) == ["narrow"], "nor does the next wide one go first"
    state.end_group("g0")
    assert first_names(state, starvation) == ["narrow"] and starvation.next_at > state.now
    state.now += 120.0
    assert first_names(state, starvation) == ["wide"]


def test_recent_gpu_time_fades_while_a_job_waits_is_held_or_has_ended_and_never_counts_more_gpus_than_asked_for() -> None:
    state = made_state(4, 4)
    job = waiting_job(state, made_job("a", 4))
    run_alone(state, "a")
    state.now = DAY
    had = 4 * DAY * (1 - math.exp(-1))
    assert job.recent_at(state.now) == pytest.approx(had)
    state.end_group("g0")
    state.now += DAY
    state.hold("a")
    state.now += DAY
    assert job.recent_at(state.now) == pytest.approx(had * math.exp(-2))
    state.release("a")
    assert job.recent_at(state.now + DAY) == pytest.approx(had * math.exp(-3))


def test_those_that_have_ended_are_forgotten_after_three_days() -> None:
    state, _ = with_wide("a", "b")
    for name in ("a", "b"):
        run_alone(state, name)
        state.now += HOUR
        state.end_job(name)
        state.end_group("g0")
        state.now += 3 * DAY
    assert [job.spec.job_id for job in state.ended_late] == ["b"]


def test_a_held_job_makes_room_for_the_next_and_one_that_has_ended_too() -> None:
    state = made_state(4)
    for name in "abc":
        state.submit(made_job(name))
    state.now = 24 * HOUR
    starvation = Starvation(USUAL)
    starvation.follow(state)
    assert [job.spec.job_id for job in starvation.first(state)] == ["a"]
    state.hold("a")
    starvation.follow(state)
    assert [job.spec.job_id for job in starvation.first(state)] == ["b"]
    state.end_job("b")
    starvation.follow(state)
    assert [job.spec.job_id for job in starvation.first(state)] == ["c"]
    state.release("a")
    starvation.follow(state)
    assert [job.spec.job_id for job in starvation.first(state)] == ["a"], "it waited for a day before it was held"


def crowded(wide: int, hours: float) -> Timeline:
    """Short jobs of one GPU keep four nodes of four busy; from the beginning on one waits that asks for `wide` GPUs."""
    timeline, count = made_timeline(4, 4, 4, 4), 0
    timeline.tell(*[made_job(f"s{-index}", steps=100 + 10 * index) for index in range(1, 17)])
    timeline.tell(made_job("wide", wide, steps=5000), made_job("later", wide, steps=5000))
    while timeline.now < hours * HOUR:
        timeline.until(timeline.now + 60.0)
        while sum(name.startswith("s") for name in timeline.scheduler.state.pending) < 4:
            timeline.tell(made_job(f"s{count}", steps=200))
            count += 1
    return timeline


@pytest.mark.parametrize(
    "wide", [pytest.param(16, marks=pytest.mark.slow), *(pytest.param(wide, marks=pytest.mark.soak) for wide in (1, 4, 12))]
)
def test_the_first_who_starves_starts_within_a_rest_at_whatever_width_and_the_next_after_it(wide: int) -> None:
    length = 5000 * (1.5 if wide == 1 else 1.55 if wide == 4 else 1.7)
    due = USUAL.starvation_factor * length
    timeline = crowded(wide, (due + USUAL.min_residence_seconds) / HOUR)
    assert due <= timeline.started_at["wide"] <= due + TICK_SECONDS
    assert not timeline.gpus_of("later")
    short = sum(name.startswith("s") for known in timeline.scheduler.state.groups.values() for name in known.group.job_ids)
    assert short == 16 - wide, "the others serve those who came later"


def test_who_starves_goes_after_a_higher_priority() -> None:
    timeline = made_timeline(1)
    timeline.tell(made_job("high", steps=20_000, priority=1.0), made_job("late", steps=100))
    timeline.until(29_000.0)
    timeline.tell(made_job("also high", steps=100, priority=1.0), made_job("short", steps=10))
    timeline.until(90_000.0)
    assert timeline.started_at["also high"] < timeline.started_at["late"] < timeline.started_at["short"]


# -- beyond its steps ------------------------------------------------------------------------------------------------------


def test_what_is_left_of_a_job_that_runs_beyond_its_steps_is_a_tenth_of_the_time_that_it_has_run() -> None:
    timeline = made_timeline(1)
    timeline.tell(made_job("a", steps=1000))
    state, job = timeline.scheduler.state, timeline.job("a")
    left = [remaining_seconds(job, now, USUAL) for now in (0.0, 1400.0, 1500.0, 1530.0, 1600.0, 3000.0)]
    assert left == pytest.approx([1500.0, 100.0, 0.0, 0.0, 160.0, 300.0])
    assert urgency(job, 3000.0, USUAL) == pytest.approx((USUAL.patience_seconds + 3000.0) / 300.0)
    state.now = 3000.0
    state.end_group(str(job.group_id))
    assert remaining_seconds(job, 5000.0, USUAL) == pytest.approx(300.0)


def test_a_job_that_runs_beyond_its_steps_gives_way_to_a_far_shorter_one() -> None:
    timeline = made_timeline(1)
    timeline.tell(made_job("endless", steps=100))
    scheduler = timeline.scheduler
    scheduler.handle(made_job("short", steps=100), 10_000.0)
    scheduler.handle(Tick(), 10_001.0)
    assert [known.group.job_ids for known in scheduler.state.groups.values()] == [("short",)]
