"""GPUs of two kinds: each job is predicted at its GPUs' own speed, and goes where that is worth most."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.mirror import BASES, made_cost, made_settings, made_spec, waiting_job
from tests.scheduler.timeline import Timeline
from tlora.protocol import BaseMeasured, BaseSpeed, GroupReady, KindsFound, NodeAdded, StepsDone
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.scheduler import Policy, Scheduler
from tlora.scheduler.state import ClusterState

NEW, OLD = "new", "old"
SPEEDS = {NEW: 1.0, OLD: 0.25}


def two_kinds(policy: Policy | None = None, launch_seconds: float = 0.0) -> Timeline:
    """GPU 0 is old and GPU 1 new, on hosts of their own."""
    timeline = Timeline(Scheduler(policy or residual_capacity(made_settings()), made_cost(launch_seconds)))
    timeline.tell(NodeAdded("old host", (0,)), KindsFound((0,), (OLD,), (SPEEDS[OLD],)))
    timeline.tell(KindsFound((1,), (NEW,), (SPEEDS[NEW],)), NodeAdded("new host", (1,)))
    return timeline


def gpus_of(timeline: Timeline, job: str) -> tuple[int, ...]:
    state = timeline.scheduler.state
    return state.groups[state.jobs[job].group_id or ""].group.gpus


def test_the_first_job_takes_the_faster_gpu_and_is_predicted_at_its_speed() -> None:
    timeline = two_kinds()
    timeline.tell(made_spec("a", tokens=8000.0, max_slowdown=1.0), made_spec("b", tokens=8000.0, max_slowdown=1.0))
    jobs = timeline.scheduler.state.jobs
    assert (gpus_of(timeline, "a"), gpus_of(timeline, "b")) == ((1,), (0,))
    assert jobs["a"].step_seconds == pytest.approx(8.0) and jobs["b"].step_seconds == pytest.approx(32.0)
    assert jobs["a"].alone_step_seconds == jobs["b"].alone_step_seconds == pytest.approx(32.0), "bounds hold on the slowest kind"


def test_a_job_that_gains_nothing_leaves_the_faster_gpu_to_others() -> None:
    """Whose micro-batches are launches only."""
    timeline = two_kinds(launch_seconds=30.0)
    timeline.tell(made_spec("a", tokens=100.0, max_slowdown=1.0))
    assert gpus_of(timeline, "a") == (0,)


def test_a_job_moves_to_the_faster_gpu_when_nobody_else_wants_it() -> None:
    timeline = two_kinds()
    timeline.tell(made_spec("a", tokens=8000.0, max_slowdown=1.0), made_spec("b", tokens=8000.0, steps=500, max_slowdown=1.0))
    timeline.until(900.0)
    assert "a" in timeline.ended_at and gpus_of(timeline, "b") == (1,) and timeline.moves == {"b": 1}


def test_a_move_that_costs_more_than_it_saves_is_not_made() -> None:
    timeline = two_kinds()
    timeline.tell(made_spec("a", tokens=8000.0, max_slowdown=1.0), made_spec("b", tokens=8000.0, steps=26, max_slowdown=1.0))
    timeline.until(801.0)
    assert "a" in timeline.ended_at and gpus_of(timeline, "b") == (0,), "32 s of it are left"


def test_each_kind_is_corrected_by_its_own_steps_and_measurements() -> None:
    timeline = two_kinds()
    timeline.tell(made_spec("a", tokens=8000.0, max_slowdown=1.0), made_spec("b", tokens=8000.0, max_slowdown=1.0))
    jobs, state = timeline.scheduler.state.jobs, timeline.scheduler.state
    timeline.tell(GroupReady(jobs["b"].group_id or ""))
    for step in range(1, 40):
        timeline.now += 48.0
        timeline.tell(StepsDone("b", jobs["b"].group_id or "", float(step), 48.0))
    assert jobs["b"].step_seconds > 1.2 * 32.0, "it is slower than was believed"
    assert state.cost_on([1]).alone_step_seconds(jobs["a"].spec.base_model, 8000.0, 1) == pytest.approx(8.0)
    timeline.tell(BaseMeasured(jobs["a"].spec.base_model, OLD, BaseSpeed(500.0, 0.0, 0.01, 0.0)))
    assert jobs["b"].step_seconds == pytest.approx(16.0) == jobs["b"].alone_step_seconds
    assert state.cost_on([1]).alone_step_seconds(jobs["a"].spec.base_model, 8000.0, 1) == pytest.approx(8.0)


def test_a_group_over_two_kinds_goes_by_the_slower() -> None:
    timeline = Timeline(Scheduler(residual_capacity(made_settings()), made_cost(0.0)))
    timeline.tell(KindsFound((0, 1), (OLD, NEW), (SPEEDS[OLD], SPEEDS[NEW])), NodeAdded("both", (0, 1)))
    timeline.tell(made_spec("wide", gpus=2, tokens=16_000.0))
    job = timeline.scheduler.state.jobs["wide"]
    assert gpus_of(timeline, "wide") == (0, 1) and job.step_seconds == pytest.approx(32.0 + 0.05)


def test_steps_on_two_kinds_correct_what_is_believed_of_neither() -> None:
    """The new GPU has four fifths of the job as soon as its steps were measured: the old one is as slow as before."""
    timeline = Timeline(Scheduler(residual_capacity(made_settings()), made_cost(0.0)))
    timeline.tell(KindsFound((0, 1), (OLD, NEW), (SPEEDS[OLD], SPEEDS[NEW])), NodeAdded("both", (0, 1)))
    timeline.tell(made_spec("wide", gpus=2, tokens=16_000.0))
    state = timeline.scheduler.state
    job, base = state.jobs["wide"], state.jobs["wide"].spec.base_model
    timeline.tell(GroupReady(job.group_id or ""))
    for step in range(1, 40):
        timeline.now += 12.8
        timeline.tell(StepsDone("wide", job.group_id or "", float(step), 12.8))
    alone = [state.cost_on([gpu]).alone_step_seconds(base, 8000.0, 1) for gpu in (0, 1)]
    assert alone == pytest.approx([32.0, 8.0]) and job.steps_done == 39


def test_one_kind_as_fast_as_the_clusters_own_model_changes_nothing() -> None:
    state = ClusterState(made_cost())
    assert state.find_kinds((0, 1), (NEW, NEW), (1.0, 1.0)) and not state.find_kinds((0, 1), (NEW, NEW), (1.0, 1.0))
    assert state.cost_on([0, 1]) is state.cost and not state.kinds.differ
    state.find_kinds((0, 1), (OLD, OLD), (float("nan"), 0.0))
    assert state.cost_on([0, 1]) is state.cost, "a speed that is none is not taken"


def test_hosts_of_one_other_kind_have_its_speed() -> None:
    """Of a controller without GPUs of its own, whose model is an H200's."""
    state = ClusterState(made_cost(0.0))
    state.add_node("n", "", (0,))
    state.find_kinds((0,), (OLD,), (SPEEDS[OLD],))
    assert waiting_job(state, made_spec("a", tokens=8000.0)).alone_step_seconds == pytest.approx(32.0)


@pytest.mark.parametrize("name", LIVE_POLICIES)
def test_all_jobs_end_on_hosts_of_two_kinds(name: str) -> None:
    """Each action is possible at its turn, and the state sound after it (`tell`)."""
    chance, timeline = random.Random(0), Timeline(Scheduler(LIVE_POLICIES[name](), made_cost()))
    gpus, kinds = tuple(range(6)), (NEW, OLD, OLD, NEW, OLD, OLD)
    timeline.tell(KindsFound(gpus, kinds, tuple(SPEEDS[kind] for kind in kinds)))
    timeline.tell(NodeAdded("both", (0, 1)), NodeAdded("old", (2, 4)), NodeAdded("more", (3, 5)))
    for number in range(20):
        timeline.until(timeline.now + chance.choice((0.0, 60.0, 900.0)))
        tokens, steps = chance.choice((500.0, 8000.0)), chance.choice((5, 60))
        timeline.tell(made_spec(f"j{number}", gpus=chance.choice((1, 1, 1, 2, 3)), tokens=tokens, steps=steps))
        if number % 10 == 9 and (ready := list(timeline.scheduler.state.groups)):
            timeline.tell(GroupReady(chance.choice(ready)))
    for _ in range(100):
        timeline.until(timeline.now + 600.0)
        if not timeline.scheduler.state.jobs:
            return
    pytest.fail(f"{len(timeline.scheduler.state.jobs)} jobs have not ended")


def test_a_job_whose_bounds_hold_on_too_few_gpus_starts_on_those_that_it_asks_for() -> None:
    """A kind that should be the faster was measured far slower than the reference, of which there are too few."""
    timeline = Timeline(Scheduler(residual_capacity(made_settings()), made_cost()))
    timeline.tell(KindsFound((0, 1), (OLD,) * 2, (SPEEDS[OLD],) * 2), NodeAdded("old host", (0, 1)))
    timeline.tell(KindsFound(tuple(range(2, 10)), (NEW,) * 8, (SPEEDS[NEW],) * 8), NodeAdded("new host", tuple(range(2, 10))))
    timeline.tell(
        BaseMeasured(BASES[0], OLD, BaseSpeed(20_000.0, 2.0, 0.05, 0.05)), BaseMeasured(BASES[0], NEW, BaseSpeed(500.0, 0.5, 0.01, 0.05))
    )
    timeline.tell(made_spec("a", 5, 40_000.0, max_slowdown=1.5))
    assert len(gpus_of(timeline, "a")) == 5
