"""Outputs that layers keep beside those of their linears, in bf16 and by whole storages: the estimate beside torch's partitioner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DiffLlamaConfig,
    Exaone4Config,
    GraniteConfig,
    Olmo2Config,
    PhiConfig,
    Qwen3MoeConfig,
)

from tests.kernels.interpreter import MARKS, interpreted
from tests.planning.partitioned import TOKENS, hint, kept_by
from tests.tiny import FAMILIES, SHAPE
from tlora.planning.memory import measure
from tlora.supermodel.load import outline
from tlora.supermodel.structure import find_calls
from tlora.supermodel.supermodel import SuperModel

with interpreted():  # the path imports it late, when the variable may not be set any more
    from tlora.kernels import pass_operations  # noqa: F401

pytestmark = MARKS
GPU = torch.device("cuda")
_NARROWEST = 17  # elements; routers give less
KEPT: dict[str, Any] = {family: FAMILIES[family] for family in ("llama", "qwen3", "gemma2", "gemma3", "phi3")} | {
    "olmo2": Olmo2Config(**SHAPE),
    "granite": GraniteConfig(**SHAPE, residual_multiplier=0.5),
    "cohere": CohereConfig(**SHAPE),  # attention and MLP beside one another
    "phi": PhiConfig(**SHAPE),
    "diffllama": DiffLlamaConfig(**SHAPE),  # two attentions of the same queries, and a norm without weights of their difference
    "exaone4": Exaone4Config(**SHAPE, layer_types=["full_attention"] * 2),  # norms of queries without positions
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, head_dim=24, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
}


def _count(outputs: list[Any]) -> int:
    """Elements of a token, but for statistics of norms and attention, and what routers choose: each storage once and whole."""
    values = [node.meta["val"] for node in outputs if getattr(node, "op", "") == "call_function"]
    storages = {value.untyped_storage()._cdata: value.untyped_storage() for value in values if isinstance(value, torch.Tensor)}
    sizes = [hint(storage.nbytes()) // torch.bfloat16.itemsize // TOKENS for storage in storages.values()]
    return sum(size for size in sizes if size >= _NARROWEST)


@pytest.mark.parametrize("family", [each if each in ("qwen3", "gemma2") else pytest.param(each, marks=pytest.mark.slow) for each in KEPT])
def test_a_layer_keeps_what_is_counted(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of queries and keys keep what they read, beside what attention reads. Where a norm reads a block's output, or experts give it,
    the layer's output is kept as well. Of queries, keys and values of one linear its whole output is kept, for the values. Of outputs of
    attention and MLP that are added at once the sum alone is kept.
    """
    KEPT[family].save_pretrained(tmp_path)
    meta = SuperModel(outline(str(tmp_path), "bfloat16"))
    memory = measure(meta, 0, GPU)
    heads = KEPT[family].num_attention_heads * len(find_calls(meta.base).attentions) // SHAPE["num_hidden_layers"]
    shrunk = len(meta.targets()) // 2 * 2 * 16  # of each linear x @ A of two blocks of rows
    model = AutoModelForCausalLM.from_config(KEPT[family], dtype=torch.bfloat16).eval()
    assert kept_by(model, _count, monkeypatch) == memory.phases[-1].kept_per_layer / 2 - 2 * heads - shrunk
