"""Why a job waits, in words: the setting that is named lets it run when it is changed as is said."""

from __future__ import annotations

import re

import pytest

from tests.scheduler.mirror import made_settings, made_spec
from tests.scheduler.timeline import Timeline, made_timeline
from tlora.protocol import JobFinished
from tlora.scheduler.forecast import Reasons

LIVE = made_settings(elastic=False)


def why(timeline: Timeline, name: str, shares: bool = True) -> str:
    state = timeline.scheduler.state
    assert name in state.pending
    return Reasons(state, shares).of(state.jobs[name])


def test_its_own_bound_is_named_with_one_that_would_do() -> None:
    def told(bound: float) -> Timeline:
        timeline = made_timeline(1, settings=LIVE)
        timeline.tell(made_spec("first", tokens=400.0, steps=4000, max_slowdown=6.0))
        timeline.until(100.0)
        timeline.tell(made_spec("second", tokens=400.0, max_slowdown=bound))
        return timeline

    said = why(told(1.05), "second")
    assert said.startswith("no GPU is free, and to share one with the job there") and "its max_slowdown is 1.05" in said
    least = float(re.findall(r"with ([\d.]+) or more it could", said)[0])
    assert told(least).gpus_of("second") == (0,)
    assert "second" in told(least - 0.2).scheduler.state.pending


def test_the_bounds_of_the_others_are_named() -> None:
    timeline = made_timeline(1, settings=LIVE)
    timeline.tell(made_spec("first", tokens=400.0, steps=4000, max_slowdown=1.0))
    timeline.tell(made_spec("second", tokens=400.0, max_slowdown=6.0))
    assert why(timeline, "second") == "no GPU is free, and the max_slowdown of the job there (1) leaves it no room to share one"


def test_memory_is_named() -> None:
    timeline = made_timeline(1, settings=LIVE)
    timeline.tell(*[made_spec(name, parameters=13 * 10**8, max_slowdown=6.0, steps=4000) for name in ("first", "second")])
    assert why(timeline, "second") == "no GPU is free, and there is no memory left for it with the job there"


@pytest.mark.parametrize(
    ("gpus", "base", "shares", "said"),
    [
        (1, "north", False, "no GPU is free, and the policy lets no jobs share one"),
        (1, "south", True, "no GPU is free, and none holds its base"),
        (2, "south", True, "no GPU is free, and none holds its base"),
    ],
)
def test_other_reasons(gpus: int, base: str, shares: bool, said: str) -> None:
    timeline = made_timeline(2, settings=made_settings(elastic=False, sharing=shares))
    timeline.tell(*[made_spec(f"first{index}", steps=4000, max_slowdown=1.0) for index in range(2)])
    timeline.tell(made_spec("second", gpus, base_model=base, max_slowdown=6.0))
    assert why(timeline, "second", shares) == said


def test_a_job_of_more_gpus_than_are_free_is_said_to_be_that() -> None:
    timeline = made_timeline(2, settings=LIVE)
    timeline.tell(made_spec("first", steps=4000, max_slowdown=1.0), made_spec("second", 2, max_slowdown=1.0, base_model="south"))
    assert why(timeline, "second") == "it asks for 2 GPUs and 1 is free, and none holds its base"


def test_places_are_called_what_they_are() -> None:
    """A server may train on CPUs."""
    timeline = made_timeline(2, settings=LIVE)
    timeline.tell(made_spec("first", steps=4000, max_slowdown=1.0))
    timeline.tell(made_spec("second", 2, max_slowdown=1.0))
    state = timeline.scheduler.state
    said = Reasons(state, True, ("CPU process", "CPU processes")).of(state.jobs["second"])
    assert said.startswith("it asks for 2 CPU processes and 1 is free")


def test_free_gpus_that_do_not_hold_a_job_together_are_named() -> None:
    timeline = made_timeline(2, 2, settings=LIVE)
    timeline.tell(*[made_spec(f"first{index}", tokens=8000.0, steps=4000, max_slowdown=1.0) for index in range(4)])
    timeline.tell(made_spec("pair", 2, tokens=16_000.0, max_slowdown=1.0))
    timeline.tell(*[JobFinished(name) for name in ("first0", "first2")])
    assert why(timeline, "pair") == "it asks for 2 GPUs, and the 2 that are free do not hold it together"
