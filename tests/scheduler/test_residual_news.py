"""`residual_capacity` under news that comes late, twice or out of order: nobody is harmed by it, and what is decided is the same."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.scheduler.mirror import MOVES, Mirror, Move, Story, made_cost, made_settings, made_spec, started, tell
from tests.scheduler.timeline import made_timeline
from tlora.protocol import (
    Action,
    ChangeGroup,
    Event,
    GroupLost,
    GroupReady,
    JobFailed,
    JobFinished,
    JobRequest,
    JobSubmitted,
    NodeAdded,
    NodeDraining,
    StepsDone,
    StopGroup,
    Tick,
)
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.scheduler import Scheduler

LONG = 100_000


def whole_story(moves: list[Move], repeated: type[Event] | tuple[type[Event], ...], late: int = 1) -> list[list[Action]]:
    """What is done at each move. Events of the types `repeated`, of requests those to cancel, come again after `late` more
    moves, and must then do nothing; but for the end of a group that has begun since.
    """
    scheduler, mirror, story, now = Scheduler(residual_capacity(made_settings()), made_cost()), Mirror(), Story(), 0.0
    for node in range(story.nodes):
        tell(scheduler, mirror, NodeAdded(f"n{node}", tuple(range(4 * node, 4 * node + 4)), f"r{node // 2}"), now)
    told, there = list[Event](), list[set[str]]()
    done: list[list[Action]] = []
    for move in moves:
        now += move[3]
        there.append(set(scheduler.state.groups))
        told.append(story.event(move, scheduler.state))
        done.append(tell(scheduler, mirror, told[-1], now))
        again = told[-late] if len(told) >= late else None
        if isinstance(again, GroupLost) and again.group_id in scheduler.state.groups.keys() - there[-late]:
            continue
        if isinstance(again, repeated) and not (isinstance(again, JobRequest) and again.verb != "cancel"):
            assert tell(scheduler, mirror, again, now) == [], f"{again} comes again"
    return done


ENDS = (JobFinished, JobRequest, JobFailed, JobSubmitted)


@pytest.mark.parametrize("late", [1, 4])
@given(moves=MOVES)
def test_what_is_told_of_a_job_or_group_twice_is_told_once(late: int, moves: list[Move]) -> None:
    assert whole_story(moves, (*ENDS, GroupLost), late) == whole_story(moves, ())


def test_a_job_that_ends_while_it_waits_never_starts() -> None:
    for ended in (JobFinished("b"), JobRequest("b", "cancel"), JobFailed("b", "out of luck")):
        timeline = made_timeline(1)
        timeline.tell(made_spec("a", max_slowdown=1.0))
        assert timeline.tell(made_spec("b", max_slowdown=1.0), ended) == []
        timeline.until(90_000.0)
        assert set(timeline.ended_at) == {"a"} and list(timeline.started_at) == ["a"]


def test_news_of_a_job_before_it_is_submitted_is_lost_and_the_job_runs() -> None:
    timeline = made_timeline(1)
    assert timeline.tell(JobFinished("a"), StepsDone("a", "g0", 10.0, 1.0), GroupReady("g0"), GroupLost("g0", "?")) == []
    assert started(timeline.tell(made_spec("a"))) == ["a"] and timeline.job("a").steps_done == 0.0


def test_what_comes_with_an_earlier_time_happens_now() -> None:
    """No age, rest or progress is counted backwards."""
    timeline = made_timeline(1)
    timeline.tell(made_spec("long", steps=LONG, max_slowdown=1.0))
    timeline.until(4800.0)
    done = timeline.job("long").steps_at(4800.0)
    timeline.now = 10.0
    (stop, _) = timeline.tell(made_spec("short", max_slowdown=1.0))
    assert isinstance(stop, StopGroup), "the long one has rested"
    assert timeline.job("long").steps_done == done and timeline.job("short").submitted_at == 4800.0
    assert timeline.tell(Tick()) == []


def test_an_older_report_that_comes_after_a_newer_one_takes_no_step_back() -> None:
    timeline = made_timeline(1)
    timeline.tell(made_spec("a", steps=LONG))
    timeline.until(600.0)
    timeline.tell(StepsDone("a", "g0", 400.0, 1.5), StepsDone("a", "g0", 360.0, 1.5))
    assert timeline.job("a").steps_at(600.0) == 400.0


def test_a_job_that_waits_joins_others_as_soon_as_their_host_is_used_again() -> None:
    """No GPU comes with that, as a group has them all."""
    scheduler, mirror = Scheduler(residual_capacity(made_settings()), made_cost()), Mirror()
    for event in (NodeAdded("a", (0,)), made_spec("there", tokens=400.0), GroupReady("g0"), NodeDraining("a", finish=True)):
        tell(scheduler, mirror, event, 0.0)
    assert not tell(scheduler, mirror, made_spec("waits", tokens=400.0), 1.0)
    (joined,) = tell(scheduler, mirror, NodeAdded("a", (0,)), 2.0)
    assert isinstance(joined, ChangeGroup) and joined.group.job_ids == ("there", "waits")
