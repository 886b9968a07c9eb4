"""What a scheduler counts of stages is what a worker counts, which refuses jobs by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from tests.kernels.interpreter import interpreted
from tests.tiny import SHAPE
from tlora.job import Recompute
from tlora.planning.base_parts import count_parts
from tlora.planning.memory import ACTIVATION_RANK, count_base
from tlora.planning.memory_bound import MemoryBound
from tlora.shape.base_parts import BaseParts, with_stages
from tlora.shape.cost import CostModel
from tlora.shape.memory import ADAPTER_BYTES, BaseMemory
from tlora.shape.predicted_constants import live_constants
from tlora.shape.stages import LayerRange
from tlora.supermodel.load import outline
from tlora.supermodel.supermodel import SuperModel

with interpreted():
    from tlora.kernels import pass_operations  # noqa: F401  (found late by the functions under test, when the variable is not set)

PLENTY, PARAMETERS, DEPTHS = 1 << 50, 10**6, range(33)
OF_8B: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
SHAPES: dict[str, tuple[LlamaConfig, str]] = {
    "a large head": (LlamaConfig(**SHAPE | {"num_hidden_layers": 16, "vocab_size": 65536}), "cuda"),
    "8B": (LlamaConfig(**OF_8B, num_hidden_layers=32, vocab_size=128256), "cuda"),
    "nine layers on CPUs": (LlamaConfig(**SHAPE | {"num_hidden_layers": 9}), "cpu"),
}


@pytest.fixture(scope="module", params=SHAPES)
def counted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[SuperModel, str, BaseParts, BaseMemory]:
    directory: Path = tmp_path_factory.mktemp("base")
    config, device = SHAPES[request.param]
    config.save_pretrained(directory)
    model = SuperModel(outline(str(directory), "bfloat16"))
    parts = count_parts(model, torch.device(device), ACTIVATION_RANK)
    return model, device, parts, with_stages(count_base(model, torch.device(device), "stages"), parts, ordered=True)


@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize(("ordered", "depths"), [("auto", (0, 99)), ("none", (0, 0)), (3, (3, 3)), ("all", (99, 99))])
def test_a_scheduler_counts_what_the_fullest_stage_of_a_worker_takes(
    ordered: Recompute, depths: tuple[int, int], stages: int, counted: tuple[SuperModel, str, BaseParts, BaseMemory]
) -> None:
    """Without recomputation, and with as much of it as there may be. It counted up to a third too little."""
    model, device, parts, whole = counted
    cost, memory = CostModel({"base": live_constants(1e9)}), whole.recomputing(ordered)
    cost.memory["base"] = memory
    cuts = parts.cut_for_any([1.0] * stages, [PLENTY] * stages)
    bound = MemoryBound(model, 0, torch.device(device), [PLENTY] * stages, [LayerRange(*cut, len(parts.layers)) for cut in cuts])
    for tokens in (1024, 3000, 16384):
        taken = [max(each.total_bytes([], tokens, depth) for each in bound._memories([])) + ADAPTER_BYTES * PARAMETERS for depth in DEPTHS]
        first, last = (min(depth, DEPTHS[-1]) for depth in depths)
        assert cost.memory_bytes("base", PARAMETERS, tokens, stages) == pytest.approx(taken[first], abs=1)
        assert cost.least_bytes("base", PARAMETERS, tokens, stages, PLENTY) == pytest.approx(taken[last], abs=1)
        room = (taken[first] + taken[last]) / 2
        deep = next(depth for depth in DEPTHS[first:] if taken[depth] <= room)
        layers = min(memory.num_layers, deep * stages) if deep > first else memory.ordered_layers
        assert cost.recomputed_layers("base", PARAMETERS, tokens, stages, room) == layers
