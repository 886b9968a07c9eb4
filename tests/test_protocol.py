"""Events and actions survive JSON, and nothing else is taken for one."""

from __future__ import annotations

import json
import math
import typing
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora import protocol
from tlora.protocol import Action, Event, GpusLost, JobRequest, JobSubmitted, StepsDone, Tick, from_json, to_json

KINDS = [*typing.get_args(Event), *typing.get_args(Action)]


@given(st.one_of(*(st.from_type(kind) for kind in KINDS)))
def test_json_both_ways(item: Any) -> None:
    if any(isinstance(getattr(item, f.name), float) and getattr(item, f.name) != getattr(item, f.name) for f in fields(item)):
        return  # NaN equals nothing
    assert from_json(json.loads(json.dumps(to_json(item)))) == item or "nan" in repr(item)


def test_every_kind_has_a_name_of_its_own() -> None:
    assert len({kind.__name__ for kind in KINDS}) == len(KINDS) == len(protocol._KINDS)


def test_whole_numbers_are_taken_where_seconds_are_wanted() -> None:
    assert from_json({"type": "StepsDone", "job_id": "a", "group_id": "g0", "steps": 3, "step_seconds": 1}) == StepsDone(
        "a", "g0", 3.0, 1.0
    )


JOB = {"type": "JobSubmitted", "job_id": "a", "base_model": "b", "gpus": 1}
PROFILE = {"tokens_per_step": 8.0, "steps": 2, "longest_sample_tokens": 4, "adapter_parameters": 1}


@pytest.mark.parametrize(
    ("found", "facts"),
    [
        ({}, ("None", "NodeAdded")),
        ({"type": "Tock"}, ("'Tock'", "NodeAdded")),
        ({"type": "Tick", "when": 3}, ("Tick.when",)),
        ({"type": "JobFinished"}, ("JobFinished.job_id", "required")),
        ({"type": "JobFinished", "job_id": 3}, ("JobFinished.job_id", "3", "string")),
        ({"type": "GpusLost", "gpus": [1, True]}, ("GpusLost.gpus.1", "True", "integer")),
        ({"type": "GpusLost", "gpus": [1.0]}, ("GpusLost.gpus.0", "1.0", "integer")),
        ({"type": "GpusLost", "gpus": 1}, ("GpusLost.gpus", "1", "array")),
        ({"type": "StepsDone", "job_id": "a", "group_id": "g", "steps": True, "step_seconds": 1.0}, ("StepsDone.steps", "True", "number")),
        ({"type": "StepsDone", "job_id": "a", "group_id": "g", "steps": "3", "step_seconds": 1.0}, ("StepsDone.steps", "'3'", "number")),
        ({**JOB, "profile": {**PROFILE, "more": 1}}, ("JobSubmitted.profile.more",)),
    ],
)
def test_anything_else_is_refused(found: dict[str, Any], facts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refused:
        from_json(found)
    assert all(fact in str(refused.value) for fact in facts), refused.value


def test_times_may_be_infinite_or_unknown() -> None:
    found = from_json(json.loads('{"type": "StepsDone", "job_id": "a", "group_id": "g", "steps": NaN, "step_seconds": Infinity}'))
    assert isinstance(found, StepsDone) and math.isnan(found.steps) and found.step_seconds == math.inf


def test_requests_of_older_logs_are_read() -> None:
    for older, verb in (("JobCancelled", "cancel"), ("JobHeld", "hold"), ("JobReleased", "release")):
        found = from_json({"type": older, "job_id": "a"})
        assert isinstance(found, JobRequest) and (found.job_id, found.verb) == ("a", verb)


def test_defaults_may_be_left_out() -> None:
    assert from_json({"type": "Tick"}) == Tick() and from_json({"type": "GpusLost", "gpus": [1]}) == GpusLost((1,))
    profile = {"tokens_per_step": 8.0, "steps": 2, "longest_sample_tokens": 4, "adapter_parameters": 1}
    job = from_json({"type": "JobSubmitted", "job_id": "a", "base_model": "b", "gpus": 1, "profile": profile, "deadline": None})
    assert isinstance(job, JobSubmitted) and job.max_slowdown == protocol.DEFAULT_MAX_SLOWDOWN and job.profile.length_histogram == ()
