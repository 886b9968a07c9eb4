"""The formula by hand, what it may only grow with, jobs by themselves, memory, and what observations do to it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.errors import ConfigError
from tlora.planner.cost import BaseConstants, CostModel

GIB = 2**30
ROUND = BaseConstants(
    tokens_per_second=10_000.0,
    launch_seconds=0.01,
    member_seconds=0.001,
    exchange_seconds=0.02,
    exchange_between_nodes_seconds=0.05,
    base_bytes=16 * GIB,
    activation_bytes_per_token=GIB / 256,
    gpu_bytes=100 * GIB,
    source={},
)
TOKENS = st.floats(1, 100_000)
GPUS_AND_NODES = st.sampled_from([(1, 1), (2, 1), (8, 1), (16, 2), (64, 8)])


def model(**changed: float) -> CostModel:
    return CostModel({"base": replace(ROUND, **changed)})


def test_the_formula_by_hand() -> None:
    cost = model()
    assert cost.micro_batch_seconds("base", 1000, 1, 1, 1) == pytest.approx(0.01 + 0.1)
    assert cost.micro_batch_seconds("base", 1000, 1, 1, 4) == pytest.approx(0.01 + 0.003 + 0.1)
    assert cost.micro_batch_seconds("base", 8000, 4, 1, 2) == pytest.approx(0.01 + 0.02 + 0.001 + 0.2)
    assert cost.micro_batch_seconds("base", 8000, 8, 2, 1) == pytest.approx(0.01 + 0.05 + 0.1)
    assert cost.capacity("base", 8000, 8, 2, 1) == pytest.approx(8000 / 0.16)


@given(tokens=TOKENS, more=st.floats(1, 50_000), members=st.integers(1, 30), where=GPUS_AND_NODES)
def test_more_tokens_take_longer_and_are_more_per_second(tokens: float, more: float, members: int, where: tuple[int, int]) -> None:
    cost = model()
    assert cost.micro_batch_seconds("base", tokens + more, *where, members) > cost.micro_batch_seconds("base", tokens, *where, members)
    assert cost.capacity("base", tokens + more, *where, members) > cost.capacity("base", tokens, *where, members)


@given(tokens=TOKENS, members=st.integers(1, 30), where=GPUS_AND_NODES)
def test_more_members_take_longer_and_more_gpus_of_one_node_less(tokens: float, members: int, where: tuple[int, int]) -> None:
    cost = model(exchange_seconds=0.0)
    gpus, nodes = where
    before = cost.micro_batch_seconds("base", tokens, gpus, nodes, members)
    assert cost.micro_batch_seconds("base", tokens, gpus, nodes, members + 1) > before
    assert cost.micro_batch_seconds("base", tokens, 1 if gpus == 1 else 2 * gpus, nodes, members) <= before
    assert cost.micro_batch_seconds("base", tokens, 2 * gpus, 1, members) < cost.micro_batch_seconds("base", tokens, gpus, 1, members)


@pytest.mark.parametrize(
    ("tokens", "gpus", "count"), [(100, 1, 1), (16384, 1, 1), (16385, 1, 2), (16385, 2, 1), (50_000, 1, 4), (70_000, 2, 3)]
)
def test_alone_a_job_takes_the_fewest_micro_batches(tokens: float, gpus: int, count: int) -> None:
    cost = model()
    launch = 0.01 if gpus == 1 else 0.03
    assert cost.alone_step_seconds("base", tokens, gpus) == pytest.approx(count * launch + tokens / (10_000 * gpus))


@given(tokens=TOKENS, where=GPUS_AND_NODES)
def test_alone_is_what_its_micro_batches_take(tokens: float, where: tuple[int, int]) -> None:
    cost = model()
    count = math.ceil(tokens / (cost.budgets[-1] * where[0]))
    assert cost.alone_step_seconds("base", tokens, *where) == count * cost.micro_batch_seconds("base", tokens / count, *where, 1)


def test_memory_is_weights_adapters_and_activations() -> None:
    cost = model()
    assert cost.memory_bytes("base", 0, 0) == 16 * GIB
    assert cost.memory_bytes("base", 1e6, 512) == pytest.approx(18 * GIB + 18e6)


def test_ninety_two_percent_of_a_gpu_may_be_planned_for() -> None:
    cost = model()
    room_tokens = (92 - 16) * 256
    assert cost.fits("base", 0, room_tokens)
    assert not cost.fits("base", 0, room_tokens + 1)
    assert not cost.fits("base", 1, room_tokens)


def test_observations_lead_to_the_ratio_that_is_seen() -> None:
    cost = model()
    predicted = cost.micro_batch_seconds("base", 4096, 1, 1, 3)
    for _ in range(100):
        cost.observe("base", 1, 1, cost.micro_batch_seconds("base", 4096, 1, 1, 3), 1.25 * predicted)
    assert cost.micro_batch_seconds("base", 4096, 1, 1, 3) == pytest.approx(1.25 * predicted, rel=1e-3)
    assert cost.alone_step_seconds("base", 4096, 1) == pytest.approx(1.25 * model().alone_step_seconds("base", 4096, 1), rel=1e-3)


def test_one_observation_counts_for_a_tenth() -> None:
    cost = model()
    cost.observe("base", 1, 1, 1.0, 1.5)
    assert cost.micro_batch_seconds("base", 990, 1, 1, 1) == pytest.approx(1.05 * 0.109)


def test_observations_are_kept_apart_by_base_and_by_reach() -> None:
    cost = CostModel({"base": ROUND, "other": ROUND})
    cost.observe("base", 8, 1, 1.0, 2.0)
    fresh = CostModel({"base": ROUND, "other": ROUND})
    for base, gpus, nodes, changed in [("base", 1, 1, 1.0), ("base", 2, 1, 1.1), ("base", 16, 2, 1.0), ("other", 8, 1, 1.0)]:
        expected = changed * fresh.micro_batch_seconds(base, 4096, gpus, nodes, 2)
        assert cost.micro_batch_seconds(base, 4096, gpus, nodes, 2) == pytest.approx(expected)


@given(st.lists(st.floats(1e-6, 1e6), max_size=50))
def test_no_observations_move_it_beyond_twice_or_half_and_the_same_ones_move_it_alike(seconds: list[float]) -> None:
    first, second = model(), model()
    for cost in (first, second):
        for observed in seconds:
            cost.observe("base", 1, 1, cost.micro_batch_seconds("base", 1024, 1, 1, 1), observed)
    found = first.micro_batch_seconds("base", 1024, 1, 1, 1)
    assert 0.5 - 1e-9 <= found / model().micro_batch_seconds("base", 1024, 1, 1, 1) <= 2 + 1e-9
    assert found == second.micro_batch_seconds("base", 1024, 1, 1, 1)


def test_an_unknown_base_is_named_with_those_that_are_known() -> None:
    cost = CostModel({"small": ROUND, "large": ROUND})
    message = "'none': its cost was never measured; name one of large, small"
    with pytest.raises(ConfigError, match=message):
        cost.micro_batch_seconds("none", 1024, 1, 1, 1)
    with pytest.raises(ConfigError, match=message):
        cost.memory_bytes("none", 0, 1024)
    with pytest.raises(ConfigError, match=message):
        cost.observe("none", 1, 1, 1.0, 1.0)
