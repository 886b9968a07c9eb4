"""What each key allows, as the models say it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tlora.job import DataConfig, JobSpec, RunSpec
from tlora.jobs_file import explain
from tlora.jobs_file.rules import rule_of

ONE: dict[str, Any] = {"name": "a", "data": "d"}


@pytest.mark.parametrize("model", [RunSpec, JobSpec, DataConfig])
def test_every_whole_number_has_an_upper_bound(model: type[BaseModel]):
    """10**400 is a whole number, and no float."""
    whole = {key for key, field in model.model_fields.items() if "a whole number" in rule_of(field) and key != "data"}
    assert {RunSpec: "token_budget", JobSpec: "max_steps", DataConfig: "max_length"}[model] in whole
    needed = {RunSpec: {"base_model": "b", "jobs": [ONE]}, JobSpec: ONE, DataConfig: {"path": "d"}}[model]
    for key in whole:
        value = {"q_proj": 10**400} if key in ("rank_pattern", "chat_template_kwargs") else 10**400
        with pytest.raises(ValidationError) as caught:
            model.model_validate(needed | {key: value})
        assert key in explain(caught.value) and "a whole number from" in explain(caught.value), key
