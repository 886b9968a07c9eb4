"""The formula by hand, what it may only grow with, jobs by themselves, memory, and what observations do to it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.errors import ConfigError
from tlora.job import Recompute
from tlora.protocol import BaseSpeed
from tlora.shape.cost import CORRECTED_FROM, BaseConstants, CostModel
from tlora.shape.memory import BaseMemory
from tlora.shape.sharing import fastest_step_seconds
from tlora.shape.token_cost import recompute_factor

GIB, MIB = 2**30, 2**20
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


def model(**changed: float) -> CostModel:
    return CostModel({"base": replace(ROUND, **changed)})


def test_the_formula_by_hand() -> None:
    cost = model()
    assert cost.micro_batch_seconds("base", 1000, 1, 1, 1) == pytest.approx(0.01 + 0.1)
    assert cost.micro_batch_seconds("base", 1000, 1, 1, 4) == pytest.approx(0.01 + 0.003 + 0.1)
    assert cost.micro_batch_seconds("base", 8000, 4, 1, 2) == pytest.approx(0.01 + 0.02 + 0.001 + 0.2)
    assert cost.micro_batch_seconds("base", 8000, 8, 2, 1) == pytest.approx(0.01 + 0.05 + 0.1)
    assert cost.capacity("base", 8000, 8, 2, 1) == pytest.approx(8000 / 0.16)


def test_the_floor_by_hand() -> None:
    """The root of the sum of squares, the correction outside; without a floor the bits are those of the sum alone."""
    cost = model(floor_seconds=0.24)
    assert cost.micro_batch_seconds("base", 600, 1, 1, 1) == pytest.approx(math.hypot(0.07, 0.24))
    assert cost.micro_batch_seconds("base", 1, 1, 1, 1) == pytest.approx(0.24, rel=0.01)
    assert cost.micro_batch_seconds("base", 100_000, 1, 1, 1) == pytest.approx(10.01, rel=0.01)
    assert model(floor_seconds=0.0).micro_batch_seconds("base", 600, 1, 1, 1) == 0.01 + 0.0 + 0.001 * 0 + 600 / 10_000.0
    before = cost.micro_batch_seconds("base", 600, 1, 1, 1)
    assert cost.observe("base", 1, 1, 1.5, 0.0)
    assert cost.micro_batch_seconds("base", 600, 1, 1, 1) > before


@pytest.mark.parametrize(
    ("tokens", "gpus", "count"), [(100, 1, 1), (16384, 1, 1), (16385, 1, 2), (16385, 2, 1), (50_000, 1, 4), (70_000, 2, 3)]
)
def test_alone_a_job_takes_the_fewest_micro_batches(tokens: float, gpus: int, count: int) -> None:
    cost = model()
    launch = 0.01 if gpus == 1 else 0.03
    assert cost.alone_step_seconds("base", tokens, gpus) == pytest.approx(count * launch + tokens / (10_000 * gpus))


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


# -- what is observed ------------------------------------------------------------------------------------------------------


def see(cost: CostModel, ratio: float, gpus: int = 1, nodes: int = 1, now: float = 0.0, base: str = "base") -> bool:
    """A micro-batch of 1,024 tokens that takes `ratio` times what the constants say."""
    constants = CostModel(cost.constants).micro_batch_seconds(base, 1024, gpus, nodes, 1)
    return cost.observe(base, gpus, nodes, ratio * constants / cost.micro_batch_seconds(base, 1024, gpus, nodes, 1), now)


def correction(cost: CostModel, gpus: int = 1, nodes: int = 1, base: str = "base") -> float:
    constants = CostModel(cost.constants)
    return cost.micro_batch_seconds(base, 4096, gpus, nodes, 3) / constants.micro_batch_seconds(base, 4096, gpus, nodes, 3)


def test_observations_lead_to_the_ratio_that_is_seen() -> None:
    cost = model()
    for _ in range(500):
        see(cost, 1.25)
    assert correction(cost) == pytest.approx(1.25, rel=CORRECTED_FROM)
    assert cost.alone_step_seconds("base", 4096, 1) == pytest.approx(correction(cost) * model().alone_step_seconds("base", 4096, 1))


def test_a_slow_machine_is_slow_on_all_reaches_of_the_base_and_for_no_other() -> None:
    cost = CostModel({"base": ROUND, "other": ROUND})
    found: list[float] = []
    for _ in range(100):
        see(cost, 1.5, 8)
        found = [correction(cost, *where) for where in ((1, 1), (8, 1), (16, 2))]
        assert max(found) == pytest.approx(min(found), rel=0.03), "T0 and a group's step may be on different reaches"
    assert min(found) > 1.4 and correction(cost, base="other") == 1.0


@given(st.lists(st.floats(0.982, 1.018), max_size=50))
def test_small_errors_change_no_prediction(ratios: list[float]) -> None:
    cost = model()
    assert [see(cost, ratio) for ratio in ratios] == [False] * len(ratios)
    assert correction(cost) == 1.0 and cost.times_corrected == 0


def test_each_change_of_predictions_is_counted_and_they_are_few() -> None:
    cost = model()
    changes, before = 0, correction(cost)
    for _ in range(3000):
        changed = see(cost, 1.5)
        assert changed == (correction(cost) != before)
        changes, before = changes + changed, correction(cost)
    assert cost.times_corrected == changes and 5 < changes < 25  # a change is of 2 % at least


def test_what_is_long_past_counts_for_less_however_often_it_was_seen() -> None:
    cost = model()
    for second in range(5000):
        see(cost, 1.5, now=float(second))
    assert correction(cost) == pytest.approx(1.5, rel=CORRECTED_FROM)
    for _ in range(200):
        see(cost, 1.0, now=8 * 86400.0)
    assert correction(cost) == pytest.approx(1.0, abs=0.06)
    steady = model()
    for second in range(5000):
        see(steady, 1.5, now=float(second))
    for _ in range(200):
        see(steady, 1.0, now=5000.0)
    assert correction(steady) > 1.4


@given(st.lists(st.floats(1e-6, 1e6), max_size=50))
def test_no_observations_move_it_beyond_twice_or_half_and_the_same_ones_move_it_alike(seconds: list[float]) -> None:
    first, second = model(), model()
    for cost in (first, second):
        for observed in seconds:
            cost.observe("base", 1, 1, observed / cost.micro_batch_seconds("base", 1024, 1, 1, 1), 0.0)
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
        cost.observe("none", 1, 1, 1.0, 0.0)


# -- what a worker has measured ------------------------------------------------------------------------------------------

SPEED = BaseSpeed(2_000.0, 0.05, 0.0, 0.002)


def test_what_was_measured_counts_in_place_of_what_was_believed() -> None:
    cost = model()
    assert cost.observe("base", 1, 1, 2.0, 0.0)
    cost.measure("base", "H100", SPEED)
    assert cost.times_corrected == 2
    assert cost.micro_batch_seconds("base", 1000, 1, 1, 3) == pytest.approx(0.05 + 0.004 + 0.5), "nothing is left of the correction"
    assert cost.micro_batch_seconds("base", 1000, 2, 1, 1) == pytest.approx(0.05 + 0.02 + 0.25), "the exchange is as it was"
    assert cost.memory_bytes("base", 0, 256) == 17 * GIB, "and so is memory"
    assert "H100" in cost.constants["base"].source["launch_seconds"]


def test_a_base_of_which_nothing_was_known() -> None:
    cost = model()
    cost.measure("new", "H100", SPEED)
    assert cost.micro_batch_seconds("new", 1000, 2, 1, 1) == pytest.approx(0.05 + 0.25)
    assert cost.fits("new", 1e9, 16384), "where no memory is known, none is missing"
    assert cost.observe("new", 1, 1, 2.0, 0.0)


def test_an_exchange_takes_longer_the_more_gpus_a_node_has_up_to_what_several_nodes_take() -> None:
    found = model(exchange_seconds=0.004, exchange_gpu_seconds=0.001, exchange_between_nodes_seconds=0.01).constants["base"]
    assert [found.exchange(gpus, 1) for gpus in (1, 2, 4, 8, 9, 64)] == pytest.approx([0.0, 0.004, 0.006, 0.01, 0.01, 0.01])
    assert [found.exchange(gpus, 2) for gpus in (2, 16, 128)] == [0.01] * 3


@pytest.mark.parametrize("tokens", [300.0, 1000.0, 9000.0, 70_000.0])
@pytest.mark.parametrize("each", [0.0, 0.004, 0.05])
def test_no_number_of_gpus_is_faster_than_the_fastest(tokens: float, each: float) -> None:
    cost = model(exchange_seconds=0.02, exchange_gpu_seconds=each, exchange_between_nodes_seconds=0.3)
    filled = {gpus: min(tokens, cost.budgets[-1] * gpus) for gpus in range(1, 33)}
    steps = [tokens * cost.micro_batch_seconds("base", fill, gpus, -(-gpus // 8), 1) / fill for gpus, fill in filled.items()]
    assert fastest_step_seconds(cost, "base", tokens, 32, 8) == pytest.approx(min(steps))


# -- recomputation ---------------------------------------------------------------------------------------------------------

COUNTED = BaseMemory((16 * GIB,), 0.5 * GIB, 1.0 * MIB, 0.25 * MIB, num_layers=16)


def test_layers_are_recomputed_until_a_micro_batch_fits() -> None:
    """Each of 15 saves 0.05 MiB of a token, the last one nothing."""
    cost = model()
    cost.memory["base"] = COUNTED
    full = cost.memory_bytes("base", 0, 1000)
    for layers, room in ((0, full), (1, full - 49 * MIB), (2, full - 51 * MIB), (15, full - 750 * MIB)):
        assert cost.recomputed_layers("base", 0, 1000, 1, room) == layers
    assert cost.least_bytes("base", 0, 1000, 1, 1e12) == full - 750 * MIB
    assert model().recomputed_layers("base", 0, 1000, 1, 1.0) == 0, "of a base that was not counted nothing is known"
    assert cost.recompute_factor("base", 8) == recompute_factor(8, 16) > cost.recompute_factor("base", 0) == 1.0
    assert model().recompute_factor("base", 8) == 1.0


@pytest.mark.parametrize(("recompute", "layers"), [("auto", 0), ("none", 0), (4, 4), ("all", 16), (99, 16)])
def test_layers_that_are_ordered_count_in_all_that_is_predicted(recompute: Recompute, layers: int) -> None:
    """Also of a job alone, so that they slow nobody down against itself."""
    plain, cost = model(), model()
    plain.memory["base"], cost.memory["base"] = COUNTED, COUNTED.recomputing(recompute)
    factor = recompute_factor(layers, 16)
    for budget in (1024, 4096):
        slow, fast = (each.micro_batch_seconds("base", budget, 1, 1, 2) for each in (cost, plain))
        assert slow == pytest.approx(factor * fast) and cost.largest_micro_batch("base", slow, 1, 1, 2) == pytest.approx(budget)
    assert cost.alone_step_seconds("base", 3000, 1) == pytest.approx(factor * plain.alone_step_seconds("base", 3000, 1))
    saved = min(layers, 15) * 50 * MIB
    assert cost.memory_bytes("base", 0, 1000) == pytest.approx(plain.memory_bytes("base", 0, 1000) - saved)
    least, most = cost.least_bytes("base", 0, 1000, 1, 1e12), cost.memory_bytes("base", 0, 1000)
    assert least == pytest.approx(most if recompute != "auto" else most - 750 * MIB)
    assert cost.recompute_factor("base", layers) == pytest.approx(1.0)
