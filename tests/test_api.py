"""A job has one schema: what a jobs file and an order over HTTP share is declared once."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from tlora.api import OrderedData, OrderSpec
from tlora.job import DataConfig, JobSpec

NARROWER = {"eval_size", "chat_template_kwargs"}  # over HTTP, with the same defaults


@pytest.mark.parametrize(("of_file", "of_order", "own"), [(JobSpec, OrderSpec, {"name", "data"}), (DataConfig, OrderedData, NARROWER)])
def test_fields_that_both_have_stand_in_what_both_are_made_of(of_file: type[BaseModel], of_order: type[BaseModel], own: set[str]) -> None:
    assert set(of_file.__annotations__) & set(of_order.__annotations__) <= own
    shared = set(of_file.model_fields) & set(of_order.model_fields)
    assert len(shared) >= 8
    for key in shared:
        assert of_file.model_fields[key].default == of_order.model_fields[key].default, key


def test_an_order_keeps_the_rules_between_the_fields_of_a_job() -> None:
    order = {"name": "a", "base_model": "base", "data": {"file": "file-1"}}
    for changes, rule in (
        ({"gpus": 4, "batch_size": 2}, "gpus 4 is more than batch_size 2"),
        ({"eval_steps": 5}, "eval_steps needs evaluation data"),
        ({"data": {"file": "file-1", "eval_file": "file-2", "eval_size": 3}}, "eval_size 3 and eval_path 'file-2' are both set"),
        ({"data": {"file": "file-1", "eval_file": ["file-2", "file-3"], "eval_size": 3}}, r"eval_path 'file-2 \+ file-3' are both set"),
        ({"data": {"file": ["file-1", {"file": "file-2", "weight": 1}]}}, "'file-1' has no weight"),
        ({"data": {"file": "file-1", "chat_template_kwargs": {"tools": "x"}}}, "chat_template_kwargs: 'tools'"),
    ):
        with pytest.raises(ValueError, match=rule):
            OrderSpec.model_validate(order | changes)
