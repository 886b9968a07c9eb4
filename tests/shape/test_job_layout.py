"""The value that says how a job's computation lies on GPUs."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.errors import ConfigError
from tlora.shape import layout
from tlora.shape.layout import Layout


@given(st.integers(1, 6), st.integers(1, 6))
def test_each_rank_has_one_replica_and_stage(replicas: int, stages: int) -> None:
    found = Layout("stages" if stages > 1 else "whole", replicas, stages)
    assert found.gpus == replicas * stages and found.is_even and sum(found.weights) == pytest.approx(1)


def test_equal_weights_need_not_be_given() -> None:
    assert Layout(replicas=2) == Layout(replicas=2, weights=(0.5, 0.5))
    assert Layout(replicas=2) != Layout(replicas=2, weights=(0.6, 0.4))
    assert not Layout(replicas=2, weights=(0.6, 0.4)).is_even


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"form": "sliced"}, "form 'sliced' is unknown; take one of whole, shared, streamed, stages"),
        ({"replicas": 0}, "replicas is 0, and must be at least 1"),
        ({"form": "stages", "stages": 0}, "stages is 0, and must be at least 1"),
        ({"stages": 2}, "2 stages of a base that is whole"),
        ({"form": "stages"}, "1 stage of a base that is stages"),
        ({"form": "shared"}, "a base is shared by at least 2 GPUs"),
        ({"replicas": 2, "weights": (1.0,)}, "1 weight for 2 replicas"),
        ({"replicas": 2, "weights": (0.5, 0.6)}, "must be above 0 and sum to 1"),
        ({"replicas": 2, "weights": (1.0, 0.0)}, "must be above 0 and sum to 1"),
        ({"replicas": 2, "weights": (float("nan"), 0.5)}, "must be above 0 and sum to 1"),
    ],
)
def test_what_breaks_a_rule_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Layout(**values)
    assert message in str(refused.value)


def test_text() -> None:
    found = doctest.testmod(layout)
    assert found.attempted and not found.failed
    assert str(Layout("stages", 1, 2)) == "stages on 2 GPUs: 1 replica of 2 stages"
    assert str(Layout("whole", 2, 1, (0.75, 0.25))) == "whole on 2 GPUs: weights 0.750 0.250"
