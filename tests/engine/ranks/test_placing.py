"""On which ranks of a worker jobs are computed."""

from __future__ import annotations

from typing import Any

import pytest

from tlora.batching.replicas import LEAST_REPLICA_TOKENS, ReplicaPlacement
from tlora.engine.ranks.job_spans import choose_span
from tlora.job import JobSpec
from tlora.objectives import objective_of
from tlora.registry import OBJECTIVES
from tlora.worker_protocol import Join


def spec(**fields: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "a", "data": "d.jsonl", **fields})


@pytest.mark.parametrize(
    ("gpus", "count", "deterministic", "span"),
    [
        (1, 2, True, ReplicaPlacement(1, (0,))),  # bytes depend on replicas, and these on the order alone
        (1, 2, False, ReplicaPlacement(2, (0, 1))),
        (2, 2, True, ReplicaPlacement(2, (0, 1))),
        (2, 3, True, ReplicaPlacement(2, (0, 1))),
        (4, 2, True, ReplicaPlacement(4, (0, 1))),
        (4, 2, False, ReplicaPlacement(4, (0, 1))),
        (2, 4, False, ReplicaPlacement(4, (0, 1, 2, 3))),
    ],
)
def test_a_job_on_empty_ranks(gpus: int, count: int, deterministic: bool, span: ReplicaPlacement) -> None:
    assert choose_span(Join(spec(gpus=gpus, batch_size=8)), range(count), [], deterministic) == span


def test_small_batches_fill_fewer_ranks() -> None:
    assert choose_span(Join(spec(batch_size=3)), range(4), [], deterministic=False) == ReplicaPlacement(3, (0, 1, 2))


@pytest.mark.parametrize(
    ("tokens", "gpus", "deterministic", "replicas"),
    [
        (4 * LEAST_REPLICA_TOKENS, 1, False, 4),
        (4 * LEAST_REPLICA_TOKENS - 1, 1, False, 3),
        (LEAST_REPLICA_TOKENS - 1, 1, False, 1),
        (100.0, 2, False, 2),  # what is ordered is done
        (8 * LEAST_REPLICA_TOKENS, 1, True, 1),
    ],
)
def test_each_replica_has_tokens_enough(tokens: float, gpus: int, deterministic: bool, replicas: int) -> None:
    join = Join(spec(batch_size=8, gpus=gpus), tokens_per_step=tokens)
    assert choose_span(join, range(4), [], deterministic).replicas == replicas


def test_jobs_go_where_least_is_to_do_and_homes_alternate() -> None:
    spans = [ReplicaPlacement(1, (0,))]
    for _ in range(3):
        spans.append(choose_span(Join(spec()), range(3), spans, deterministic=True))
    assert [span.ranks for span in spans] == [(0,), (1,), (2,), (0,)]
    two = Join(spec(gpus=2, batch_size=4))
    first = choose_span(two, range(2), [], deterministic=True)
    second = choose_span(two, range(2), [first], deterministic=True)
    assert {first.lead_rank, second.lead_rank} == {0, 1}


def test_an_objective_with_a_statistic_of_its_batch_stays_in_one_place() -> None:
    data = {"sft": {}, "dpo": {}, "kto": {}, "orpo": {}}
    for name in OBJECTIVES:
        objective = objective_of(spec(objective=name, batch_size=4, **data[name]))
        needs_all = objective is not None and objective.statistic is not None
        assert spec(objective=name, batch_size=4).needs_whole_batch == needs_all, name
    assert choose_span(Join(spec(objective="kto", batch_size=4, gpus=2)), range(2), [], deterministic=True).ranks == (0,)
