"""On which ranks of a worker jobs are computed."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from tlora.batching.replicas import Span
from tlora.engine.team.placing import WHOLE_BATCH, choose_span
from tlora.job import JobSpec, ObjectiveName
from tlora.objectives import objective_of


def spec(**fields: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "a", "data": "d.jsonl", **fields})


@pytest.mark.parametrize(
    ("gpus", "count", "deterministic", "span"),
    [
        (1, 2, True, Span(1, (0,))),  # bytes depend on replicas, and these on the order alone
        (1, 2, False, Span(2, (0, 1))),
        (2, 2, True, Span(2, (0, 1))),
        (2, 3, True, Span(2, (0, 1))),
        (4, 2, True, Span(4, (0, 1))),
        (4, 2, False, Span(4, (0, 1))),
        (2, 4, False, Span(4, (0, 1, 2, 3))),
    ],
)
def test_a_job_on_empty_ranks(gpus: int, count: int, deterministic: bool, span: Span) -> None:
    assert choose_span(spec(gpus=gpus, batch_size=8), count, [], deterministic) == span


def test_small_batches_fill_fewer_ranks() -> None:
    assert choose_span(spec(batch_size=3), 4, [], deterministic=False) == Span(3, (0, 1, 2))


def test_jobs_go_where_least_is_to_do_and_homes_alternate() -> None:
    spans = [Span(1, (0,))]
    for _ in range(3):
        spans.append(choose_span(spec(), 3, spans, deterministic=True))
    assert [span.ranks for span in spans] == [(0,), (1,), (2,), (0,)]
    two = spec(gpus=2, batch_size=4)
    first = choose_span(two, 2, [], deterministic=True)
    second = choose_span(two, 2, [first], deterministic=True)
    assert {first.home, second.home} == {0, 1}


def test_an_objective_with_a_statistic_of_its_batch_stays_in_one_place() -> None:
    data = {"sft": {}, "dpo": {}, "kto": {}, "orpo": {}}
    for name in get_args(ObjectiveName):
        objective = objective_of(spec(objective=name, batch_size=4, **data[name]))
        needs_all = objective is not None and objective.statistic is not None
        assert (name in WHOLE_BATCH) == needs_all, name
    assert choose_span(spec(objective="kto", batch_size=4, gpus=2), 2, [], deterministic=True).ranks == (0,)
