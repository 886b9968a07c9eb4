"""What experts that no job can adapt take of memory and time, counted without numbers beside what their own code keeps and multiplies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DbrxConfig, JetMoeConfig, Llama4TextConfig, LongcatFlashConfig, PretrainedConfig

from tests.tiny import SHAPE
from tlora.job import TrainConfig
from tlora.planning import memory
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.load import make_base, outline
from tlora.supermodel.multiply_adds import active_weights
from tlora.supermodel.supermodel import SuperModel

TOKENS = 64
HIDDEN = SHAPE["hidden_size"]


def longcat(identities: int) -> PretrainedConfig:
    latent = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8}
    experts = {"n_routed_experts": 4, "zero_expert_num": identities, "moe_topk": 2, "expert_ffn_hidden_size": 32}
    return LongcatFlashConfig(**SHAPE | latent | experts | {"num_layers": 2, "num_key_value_heads": SHAPE["num_attention_heads"]})


def dbrx() -> PretrainedConfig:
    narrow = {"d_model": HIDDEN, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": SHAPE["vocab_size"]}
    experts = {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": HIDDEN}
    return DbrxConfig(**narrow, attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}, ffn_config=experts)


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "jetmoe": lambda: JetMoeConfig(**SHAPE, kv_channels=16, num_local_experts=4, num_experts_per_tok=2),
    "longcat": lambda: longcat(0),
    "dbrx": dbrx,
    "llama4": lambda: Llama4TextConfig(**SHAPE, head_dim=16, num_local_experts=4, num_experts_per_tok=2, moe_layers=[1]),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_they_keep_what_is_counted(family: str, tmp_path: Path) -> None:
    """In a pass on the plain path, where the family's own code asks how many tokens each expert has."""
    config = CONFIGS[family]()
    config.save_pretrained(tmp_path)
    counted = SuperModel(outline(str(tmp_path), "float32"))
    torch.manual_seed(0)
    shared = SuperModel(make_base(AutoModelForCausalLM.from_config(config).eval(), family))
    assert not counted.experts.sizes and not shared.experts.sizes, "they are frozen"
    for model in (counted, shared):
        model.join("a", memory._probe_lora(counted, 16, False), TrainConfig(max_steps=1))
    kept: dict[int, torch.Tensor] = {}
    own = {t.untyped_storage()._cdata for t in (*shared.model.parameters(), *shared.model.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    batch = collate([BatchRow("a", np.arange(TOKENS, dtype=np.int32), np.ones(TOKENS, np.float32))], "cpu")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        shared.plain_path.decode(batch, shared.passes.weights, shared.bank, {}, True)
    found = sum(tensor.untyped_storage().nbytes() for number, tensor in kept.items() if number not in own)
    assert memory._saved_bytes(counted, "a", TOKENS, torch.device("cpu")) == pytest.approx(found, rel=0.03)
    assert active_weights(counted, False) == active_weights(shared, False)


def test_a_job_that_orders_them_is_counted_as_one_at_attention(tmp_path: Path) -> None:
    """It is refused by its own message, also where a plan counts the base for it first."""
    CONFIGS["jetmoe"]().save_pretrained(tmp_path)
    model, gpu = SuperModel(outline(str(tmp_path), "float32")), torch.device("cuda")
    assert memory.measure(model, 0, gpu, 16, True) == memory.measure(model, 0, gpu, 16)


def _block(model: Any, family: str) -> Any:
    if family == "dbrx":
        return model.transformer.blocks[-1].ffn
    layer = model.model.layers[-1]
    return layer.feed_forward if family == "llama4" else layer.mlp


@pytest.mark.parametrize("family", CONFIGS)
def test_a_token_is_multiplied_with_the_weights_that_are_counted(family: str, tmp_path: Path) -> None:
    """By the code of a layer's block; beside its experts it multiplies by its router, and in Llama 4 by a shared expert."""
    config = CONFIGS[family]()
    config.save_pretrained(tmp_path)
    counted = active_weights(SuperModel(outline(str(tmp_path), "bfloat16")), adapts_experts=False)
    model: Any = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    block = _block(model, family)
    (name,) = (name for name, module in model.named_modules() if module is block)
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        block(torch.randn(1, TOKENS, HIDDEN))
    beside = sum(p.numel() for key, p in block.named_parameters() if p.ndim == 2 and f"{name}.{key}" not in counted)
    assert flops.get_total_flops() == 2 * TOKENS * (beside + sum(n for key, n in counted.items() if key.startswith(f"{name}.")))


def test_identities_among_experts_multiply_nothing(tmp_path: Path) -> None:
    """A token that goes to experts by chance goes to as many of them as there are for all."""
    found: list[int] = []
    for identities in (0, 4):
        longcat(identities).save_pretrained(tmp_path)
        found.append(sum(active_weights(SuperModel(outline(str(tmp_path), "bfloat16")), adapts_experts=False).values()))
    assert found[0] == 2 * found[1] > 0
