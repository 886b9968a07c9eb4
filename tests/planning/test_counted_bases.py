"""What hybrids and mixtures take of a GPU's memory and time, beside what their own code and our kernels allocate and multiply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Llama4TextConfig

from tests.kernels.interpreter import interpreted
from tests.tiny import SHAPE
from tlora.planning.memory import measure
from tlora.supermodel.load import outline
from tlora.supermodel.multiply_adds import active_weights
from tlora.supermodel.supermodel import SuperModel

with interpreted():
    from tlora.kernels import pass_operations  # noqa: F401  (found late by the function under test)

GPU = torch.device("cuda")


def test_a_token_is_multiplied_with_all_experts_of_llama_4_where_no_job_adapts_them(tmp_path: Path) -> None:
    """By the family's own code, which takes each token to each expert; what its block multiplies is counted as it runs."""
    config = Llama4TextConfig(**SHAPE, head_dim=16, num_local_experts=8, num_experts_per_tok=1, moe_layers=[1])
    config.save_pretrained(tmp_path)
    model = SuperModel(outline(str(tmp_path), "bfloat16"))
    block: Any = AutoModelForCausalLM.from_config(config).model.layers[1].feed_forward
    x_TH, (attention, experts) = torch.randn(1, 10, SHAPE["hidden_size"]), (active_weights(model, adapted) for adapted in (False, True))
    with FlopCounterMode(display=False) as flops:
        block(x_TH)
    beside = block.router.weight.numel() + sum(p.numel() for p in block.shared_expert.parameters())
    assert flops.get_total_flops() == 2 * 10 * (sum(attention.values()) + beside) and sum(attention.values()) == 8 * sum(experts.values())
    assert measure(model, 0, GPU, 16).layer_weights - measure(model, 0, GPU, 16, True).layer_weights == 7 * sum(experts.values()) // 2


def test_a_token_keeps_what_all_experts_of_llama_4_give_it_where_no_job_adapts_them(tmp_path: Path) -> None:
    kept: list[float] = []
    for count in (2, 8):
        Llama4TextConfig(**SHAPE, head_dim=16, num_local_experts=count, num_experts_per_tok=1, moe_layers=[1]).save_pretrained(tmp_path)
        model = SuperModel(outline(str(tmp_path), "bfloat16"))
        kept.append(measure(model, 0, GPU).phases[-1].kept_per_layer)
    of_one = 2 * sum(size.product[1] for size in model.experts.sizes.values())
    assert (kept[1] - kept[0]) * SHAPE["num_hidden_layers"] == pytest.approx(6 * of_one)
