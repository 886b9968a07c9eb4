"""One model of seconds: what a live scheduler begins with is what the planner predicts, and both agree with what was measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tlora.planning.layout_units import Device
from tlora.shape.base_parts import BaseParts
from tlora.shape.cost import CostModel
from tlora.shape.gpu_models import GpuModel, find_gpu
from tlora.shape.hardware import LIVE_GPU, cost_model, extrapolated_fields
from tlora.shape.memory import MemoryModel, Phase
from tlora.shape.predicted_constants import is_predicted, live_constants, live_stage_rates, predicted_constants

# Layers, weights and features of one, those of the head, width, whether products are in 8 bits, bytes: as counted from these bases.
SHAPES = {
    "llama-3-8b": (32, 218_103_808, 81_920, 525_336_576, 132_352, 4096, False, 16_060_522_496),
    "llama-3-70b": (80, 855_638_016, 161_792, 1_050_673_152, 136_448, 8192, True, 72_683_241_472),
    "qwen3-1.7b": (28, 50_331_648, 38_912, 311_164_928, 153_984, 2048, False, 3_441_149_952),
    "qwen3-0.6b": (28, 15_728_640, 22_528, 155_582_464, 152_960, 1024, False, 1_192_099_840),
}
H200, CARD = find_gpu("h200"), find_gpu("rtx4090")


def parts_of(name: str, base_bytes: int | None = None) -> BaseParts:
    layers, weights, features, head, head_features, width, in_8_bits, num_bytes = SHAPES[name]
    memory = MemoryModel(base_bytes or num_bytes, (Phase(0.0, 1.0),), layers, 2, 4, layer_weights=weights, layer_features=features)
    names, each = tuple(f"layers.{number}" for number in range(layers)), (weights,) * layers
    sizes = tuple(2 * own for own in each)
    return BaseParts(memory, names, sizes, each, (features,) * layers, 0, 2 * head, head, head_features, width, in_8_bits, (), None, {})


def planned_seconds(parts: BaseParts, gpu: GpuModel, tokens: float) -> float:
    """Of a micro-batch, by the planner, without attention."""
    device = Device(gpu, parts, 1 << 50)
    return tokens * device.token_seconds * device.cost(parts.memory).products(tokens, 0)


@pytest.mark.parametrize("gpu", [H200, CARD, find_gpu("a100-80")], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("name", SHAPES)
def test_a_scheduler_begins_with_the_planners_seconds(name: str, gpu: GpuModel) -> None:
    parts = parts_of(name)
    cost = CostModel({"base": predicted_constants(parts, gpu, cost_model(LIVE_GPU).constants[name])})
    for tokens in (128, 1024, 8192):
        found, planned = cost.micro_batch_seconds("base", tokens, 1, 1, 1), planned_seconds(parts, gpu, tokens)
        assert planned < found < 1.06 * planned, "attention of 512 tokens"


@pytest.mark.parametrize("name", SHAPES)
def test_the_planner_agrees_with_constants_that_were_fitted_to_measurements(name: str) -> None:
    """Else there would be two models. From 1,024 tokens on; below, the planner knows of no floor, and predicts as little as half."""
    fitted = cost_model(LIVE_GPU)
    for tokens in (1024, 2048, 4096, 8192):
        ratio = planned_seconds(parts_of(name), H200, tokens) / fitted.micro_batch_seconds(name, tokens, 1, 1, 1)
        assert ratio == pytest.approx(1.0, abs=0.09), f"{tokens} tokens"


def test_a_base_in_4_bits_is_not_as_fast_as_one_of_its_bytes() -> None:
    """5.6 GB of an 8B are next to a 1.7B, which is 3.8 times as fast."""
    nf4 = int(5.6e9)
    found = live_constants(nf4, parts_of("llama-3-8b", nf4), H200)
    assert is_predicted(found) and found.tokens_per_second == pytest.approx(17_700, rel=0.03)
    assert live_constants(nf4, None, H200).tokens_per_second > 60_000, "where only its bytes are known"


def test_what_was_measured_goes_before_what_is_predicted() -> None:
    measured = cost_model(LIVE_GPU).constants["llama-3-8b"]
    own = {"exchange_between_nodes_seconds": measured.exchange_between_nodes_seconds, "source": measured.source}
    parts = parts_of("llama-3-8b")
    found = live_constants(parts.memory.base_bytes, parts, H200)
    assert replace(found, **own) == measured and found == live_constants(1.6e10, parts, find_gpu("h100"))
    assert live_constants(1.6e10) == found, "a CPU"
    slower = live_constants(1.6e10, None, CARD)
    assert slower.tokens_per_second == pytest.approx(measured.tokens_per_second * CARD.flops / H200.flops)
    assert slower.launch_seconds == measured.launch_seconds
    plain = live_constants(1.6e10, None, replace(CARD, capability=75))
    assert plain.tokens_per_second == pytest.approx(0.15 / 0.78 * slower.tokens_per_second), "on the plain path"


def test_a_measured_gpu_is_predicted_by_its_measurements() -> None:
    faster = replace(CARD, training_tflops=300.0, layer_seconds=1e-4)
    parts = parts_of("llama-3-8b")
    found = live_constants(parts.memory.base_bytes, parts, faster)
    assert found.tokens_per_second > 1.5 * live_constants(parts.memory.base_bytes, parts, CARD).tokens_per_second
    assert found.launch_seconds == pytest.approx(32e-4, rel=0.35), "layers, and the head"


def test_a_live_scheduler_counts_the_bytes_between_hosts() -> None:
    """168 MB of gradients of rank 16 over an 8B take 0.134 s on 10 Gb/s. The constants that it begins with count 40 GB/s."""
    cost, shipped = live_constants(16e9), cost_model(LIVE_GPU).constants["llama-3-8b"]
    assert cost.exchange(2, 1) == shipped.exchange(2, 1) and cost.exchange(8, 1) == pytest.approx(shipped.exchange(8, 1))
    assert cost.exchange(2, 2) - cost.exchange(8, 1) == pytest.approx(0.134, rel=0.01)
    assert "1.25 GB/s" in extrapolated_fields(cost)["exchange_between_nodes_seconds"]


def test_a_live_scheduler_knows_that_a_small_step_leaves_a_gpu_idle() -> None:
    """Two jobs of 700 tokens a step over a base of 1.7 B parameters take little more time together than one alone (measured: 31 ms)."""
    cost = CostModel({"mine": live_constants(3.4e9)})
    alone = cost.alone_step_seconds("mine", 700.0, 1)
    assert 0.015 < alone < 0.04 and cost.micro_batch_seconds("mine", 1400.0, 1, 1, 2) < 1.5 * alone


def test_stages_send_as_the_planner_has_it_and_between_hosts_over_a_line_of_ten_gigabits() -> None:
    assert live_stage_rates(H200) == (350e9, 1.25e9) and live_stage_rates(H200, "host") == (50e9, 1.25e9)
    assert live_stage_rates(CARD) == live_stage_rates(CARD, "host") == (25e9, 1.25e9)
    slow = replace(CARD, link_gb_per_second=1.0)
    assert live_stage_rates(slow) == (1e9, 1e9), "a line between hosts is no faster than the link to it"
    assert live_stage_rates(None) == (math.inf, 1.25e9)
