"""Jobs that are held and released: they leave the queue or their group at once, and come back with what they had done."""

from __future__ import annotations

import pytest

from tests.scheduler.mirror import Mirror, made_scheduler, made_spec, tell
from tlora.protocol import ChangeGroup, GroupReady, JobFinished, JobRequest, StartGroup, StopGroup, Tick
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.scheduler import Scheduler


def test_a_job_that_waits_is_passed_over_until_it_is_released() -> None:
    scheduler, mirror = made_scheduler(POLICIES["fifo"](), 1), Mirror({0: None})
    tell(scheduler, mirror, made_spec("a"), 0.0)
    assert tell(scheduler, mirror, made_spec("b"), 1.0) == [] == tell(scheduler, mirror, JobRequest("b", "hold"), 2.0)
    assert tell(scheduler, mirror, JobRequest("b", "hold"), 2.0) == []  # twice is once
    tell(scheduler, mirror, made_spec("c"), 3.0)
    (stop, start) = tell(scheduler, mirror, JobFinished("a"), 4.0)
    assert isinstance(stop, StopGroup) and isinstance(start, StartGroup) and start.group.job_ids == ("c",)
    assert tell(scheduler, mirror, JobRequest("b", "release"), 5.0) == []
    (_, start) = tell(scheduler, mirror, JobFinished("c"), 6.0)
    assert isinstance(start, StartGroup) and start.group.job_ids == ("b",)


def test_a_queue_forgets_nobody_when_one_is_held_and_released_between_two_decisions() -> None:
    """The queue stops looking at the first job that it knows: one that comes back must be another entry."""
    scheduler, mirror = made_scheduler(POLICIES["backfill"](), 1), Mirror({0: None})
    for name in ("a", "b"):
        tell(scheduler, mirror, made_spec(name), 0.0)
    scheduler.state.hold("b")
    scheduler.state.submit(made_spec("c"))
    scheduler.state.release("b")
    mirror.alive.add("c")
    started: list[str] = []
    for name in ("a", "b", "c"):
        actions = tell(scheduler, mirror, JobFinished(name), 1.0)
        started += [name for action in actions if isinstance(action, StartGroup) for name in action.group.job_ids]
    assert started == ["b", "c"]


def shared() -> tuple[Scheduler, Mirror]:
    """Jobs a and b share the one GPU, half a step of a done by second 10."""
    scheduler, mirror = made_scheduler(POLICIES["memory"](), 1), Mirror({0: None})
    for name in ("a", "b"):
        tell(scheduler, mirror, made_spec(name, steps=1000), 0.0)
    assert mirror.groups["g0"].job_ids == ("a", "b")
    return scheduler, mirror


def test_a_job_in_company_leaves_its_group_and_keeps_its_steps() -> None:
    scheduler, mirror = shared()
    job = scheduler.state.jobs["b"]
    each = job.step_seconds
    (change,) = tell(scheduler, mirror, JobRequest("b", "hold"), 10 * each)
    assert isinstance(change, ChangeGroup) and change.group.job_ids == ("a",)
    assert (job.status, job.group_id, job.steps_done) == ("held", None, pytest.approx(10.0))
    assert job.steps_at(1e6) == pytest.approx(10.0)
    (change,) = tell(scheduler, mirror, JobRequest("b", "release"), 1e4)
    assert isinstance(change, ChangeGroup) and change.group.job_ids == ("a", "b")


def test_a_group_ends_with_its_last_job_that_is_held() -> None:
    scheduler, mirror = shared()
    tell(scheduler, mirror, JobRequest("a", "hold"), 1.0)
    assert tell(scheduler, mirror, JobRequest("b", "hold"), 2.0) == [StopGroup("g0")]
    assert scheduler.state.held == {"a", "b"} and scheduler.state.pool.num_free == 1


def test_news_of_a_held_job_that_has_ended_is_taken_in() -> None:
    """It was through before it could be told to leave."""
    scheduler, mirror = shared()
    tell(scheduler, mirror, JobRequest("b", "hold"), 1.0)
    tell(scheduler, mirror, JobFinished("b"), 1.0)
    assert tell(scheduler, mirror, JobRequest("b", "release"), 2.0) == [] and not scheduler.state.held


def test_a_job_that_is_held_lets_the_next_into_its_group_at_once() -> None:
    """Also where the policy has just found nothing to do."""
    scheduler, mirror = made_scheduler(POLICIES["residual_capacity-no-growth"](), 1), Mirror({0: None})
    for number in range(30):
        tell(scheduler, mirror, made_spec(f"j{number}", tokens=300.0, steps=10**6, max_slowdown=3.0), float(number))
    (name,) = scheduler.state.groups
    tell(scheduler, mirror, GroupReady(name), 30.0)
    tell(scheduler, mirror, Tick(), 31.0)
    members = mirror.groups[name].job_ids
    assert scheduler.state.pending and tell(scheduler, mirror, Tick(), 32.0) == []
    without, joined = tell(scheduler, mirror, JobRequest(members[0], "hold"), 33.0)
    assert isinstance(without, ChangeGroup) and without.group.job_ids == members[1:]
    assert isinstance(joined, ChangeGroup) and len(joined.group.job_ids) == len(members)
