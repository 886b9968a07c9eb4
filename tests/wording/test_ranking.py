"""Which orders may be ranked by their losses."""

from __future__ import annotations

from typing import Any

import pytest

from tlora.job import JobSpec
from tlora.wording.losses import incomparable


def order(**keys: Any) -> dict[str, Any]:
    """As `job.json` has it."""
    return JobSpec.model_validate({"name": "a", "data": {"path": "a.jsonl"} | keys.pop("data", {})} | keys).model_dump(mode="json")


WEIGHTED = [[{"path": "a.jsonl", "weight": weight}, {"path": "b.jsonl", "weight": 1}] for weight in (1, 2)]


@pytest.mark.parametrize(
    ("one", "other", "by_eval", "differing"),
    [
        ({"seed": 1, "r": 8}, {"seed": 2, "learning_rate": 1e-3}, True, ""),
        ({"data": {"eval_size": 2}, "seed": 1}, {"data": {"eval_size": 2}, "seed": 2}, True, ""),
        ({"data": {"eval_size": 2}}, {"data": {"eval_size": 2, "eval_seed": 1}}, True, "eval_seed"),
        ({"data": {"eval_size": 2}}, {"data": {"eval_size": 3}}, True, "eval_size"),
        ({"data": {"max_length": 8}}, {"data": {"max_length": 9}}, False, "max_length"),
        ({"data": {"path": "b.jsonl"}}, {}, False, "path"),
        ({"data": {"path": "b.jsonl", "eval_path": "e.jsonl"}}, {"data": {"eval_path": "e.jsonl"}}, True, ""),
        ({"data": {"path": WEIGHTED[0], "eval_size": 2}}, {"data": {"path": WEIGHTED[1], "eval_size": 2}}, True, ""),
        ({"data": {"path": WEIGHTED[0]}}, {"data": {"path": WEIGHTED[1]}}, False, "path"),
        ({"beta": 0.1}, {"beta": 0.2}, True, ""),
        ({"objective": "dpo", "beta": 0.1}, {"objective": "dpo", "beta": 0.2}, True, "beta"),
        ({"objective": "dpo"}, {"objective": "orpo"}, True, "objective"),
    ],
)
def test_orders_that_differ(one: dict[str, Any], other: dict[str, Any], by_eval: bool, differing: str) -> None:
    said = incomparable([order(**one), order(**other)], by_eval)
    assert said == "" if not differing else f"are not comparable: the jobs differ in {differing}, and so" in said, said


def test_no_orders_differ_in_nothing() -> None:
    assert incomparable([], True) == ""
