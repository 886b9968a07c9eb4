"""Which jobs are cut among several GPUs, and into how many replicas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tlora.job import JobSpec
from tlora.objectives import objective_of
from tlora.planning.job_work import choose_replicas, multiply_adds, trained_tokens
from tlora.planning.planned_job import PlannedJob
from tlora.registry import OBJECTIVES


def planned(name: str, tokens: int = 1000, **fields: Any) -> PlannedJob:
    """100 samples of so many tokens each."""
    spec = JobSpec.model_validate({"name": name, "data": "d", "batch_size": 16, "max_steps": 10, **fields})
    train = SimpleNamespace(lengths=np.full(100, tokens), epoch=100)
    data: Any = SimpleNamespace(train=train, eval=None)
    return PlannedJob(spec, data)


@pytest.mark.parametrize(
    ("seconds", "gpus", "expected"),
    [
        ({"a": 5.5, "b": 5.0, "c": 5.0}, 3, {}),  # less than a tenth above an equal share, 5.17
        ({"a": 10.0, "b": 1.0, "c": 1.0}, 3, {"a": 3}),
        ({"a": 10.0, "b": 4.0, "c": 1.0}, 3, {"a": 2}),
        ({"a": 10.0}, 4, {"a": 4}),
        ({"a": 10.0}, 1, {}),
        ({"a": 0.0, "b": 0.0}, 2, {}),
    ],
)
def test_a_job_is_cut_until_it_takes_no_more_than_an_equal_share(seconds: dict[str, float], gpus: int, expected: dict[str, int]) -> None:
    assert choose_replicas([planned(name) for name in seconds], seconds, gpus, deterministic=False) == expected


@pytest.mark.parametrize(
    ("tokens", "fields", "replicas"),
    [(500, {}, 7), (500, {"batch_size": 3}, 1), (1024, {"batch_size": 3}, 3), (150, {}, 2), (100, {}, 1), (10_000, {"gpus": 3}, 3)],
)
def test_a_replica_has_samples_and_tokens_enough(tokens: int, fields: dict[str, Any], replicas: int) -> None:
    found = choose_replicas([planned("a", tokens, **fields)], {"a": 100.0}, 8, deterministic=False)
    assert found.get("a", 1) == replicas


def test_a_deterministic_run_does_only_what_was_ordered() -> None:
    jobs = [planned("long"), planned("ordered", gpus=2), planned("plain")]
    seconds = {"long": 100.0, "ordered": 1.0, "plain": 1.0}
    assert choose_replicas(jobs, seconds, 4, deterministic=True) == {"ordered": 2}
    assert choose_replicas(jobs, seconds, 1, deterministic=True) == {"ordered": 2}


def test_a_statistic_of_the_whole_batch_and_a_job_with_problems_stay_in_one_place() -> None:
    refused = planned("refused", gpus=2)
    refused.problems.append("no such file")
    jobs = [planned("kto", objective="kto", gpus=2), refused]
    assert choose_replicas(jobs, {"kto": 10.0, "refused": 0.0}, 2, deterministic=False) == {}


def test_each_objective_has_its_forwards() -> None:
    """The table's count for who loads no torch is that of the objectives themselves."""
    for name, entry in OBJECTIVES.items():
        objective = objective_of(JobSpec.model_validate({"name": name, "data": "d", "objective": name}))
        statistic = objective.statistic if objective is not None else None
        beside = objective is not None and objective.needs_reference
        assert entry.forwards_beside == beside + (1 + statistic.needs_reference if statistic is not None else 0), name


@pytest.mark.parametrize(("objective", "forwards"), [("sft", 2), ("orpo", 2), ("dpo", 3), ("kto", 5)])
def test_what_an_objective_computes_beside_its_batch_is_counted(objective: str, forwards: int) -> None:
    """DPO: its reference. KTO: that, and the KL of its batch under the adapter and under the reference."""
    weights, job = 10**6, planned("a", objective=objective)
    tokens = trained_tokens(job)
    work = multiply_adds(job, weights, 0)
    assert work == forwards * weights * tokens
