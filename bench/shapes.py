"""The bases that the benchmarks run on: shapes of well-known models with random weights, made on the device. No hub."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

DEMO_BASE = Path(__file__).parent.parent / "demo" / "base"


def qwen3(
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int = 151936,
    num_hidden_layers: int = 28,
    num_attention_heads: int = 16,
    tied: bool = True,
) -> PretrainedConfig:
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=tied,
        pad_token_id=0,
    )


def llama_3_70b(layers: int, **changes: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        pad_token_id=0,
        **changes,
    )


def qwen2_5_32b(layers: int, **changes: Any) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=layers,
        num_attention_heads=40,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=False,
        pad_token_id=0,
        **changes,
    )


def qwen3_moe(hidden_size: int, moe_intermediate_size: int, num_experts: int, per_token: int, **changes: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,  # of no layer: all have experts
        moe_intermediate_size=moe_intermediate_size,
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        initializer_range=_SMALL,
        tie_word_embeddings=False,
        pad_token_id=0,
        **changes,
    )


def gpt_oss(num_local_experts: int, per_token: int, **changes: Any) -> GptOssConfig:
    """Layers in turn of a sliding window and of full attention, both with sinks."""
    return GptOssConfig(
        num_local_experts=num_local_experts,
        num_experts_per_tok=per_token,
        initializer_range=_SMALL,
        tie_word_embeddings=False,
        pad_token_id=0,
        **changes,
    )


def qwen3_5(**changes: Any) -> Qwen3_5TextConfig:
    """Three layers of the gated delta rule, then one of attention. The class's defaults are the text model of Qwen3.5-9B."""
    return Qwen3_5TextConfig(
        rope_parameters={"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        initializer_range=0.01,
        tie_word_embeddings=False,
        pad_token_id=0,
        **changes,
    )


_SMALL = 0.005  # rounding would grow over many layers, and tokens would become alike, so that all go to the same experts
_TINY: dict[str, Any] = {"vocab_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_GPT_OSS_20B = gpt_oss(32, 4, num_hidden_layers=24)
_TINY_GPT_OSS = gpt_oss(4, 2, **_TINY, hidden_size=64, intermediate_size=64, sliding_window=32, max_position_embeddings=2048)

SHAPES: dict[str, PretrainedConfig] = {
    "llama-3-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        pad_token_id=0,
    ),
    "llama-3-70b": llama_3_70b(80, initializer_range=0.01),  # by 0.02 rounding grows to 13 % of the logits, and the base is refused
    "llama-3-70b-quarter": llama_3_70b(20),
    "qwen2.5-32b": qwen2_5_32b(64, initializer_range=0.01),  # as above
    "qwen2.5-32b-quarter": qwen2_5_32b(16),
    "qwen3-0.6b": qwen3(1024, 3072),
    "qwen3-1.7b": qwen3(2048, 6144),
    "qwen3-1.7b-layer": qwen3(2048, 6144, vocab_size=3072, num_hidden_layers=1),
    "qwen3-30b-a3b": qwen3_moe(
        2048, 768, 128, 8, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, max_position_embeddings=40960
    ),
    "gpt-oss-20b": _GPT_OSS_20B,
    "gpt-oss-20b-mxfp4": _GPT_OSS_20B,
    "qwen3.5-9b": qwen3_5(),
    "tiny-qwen3-moe": qwen3_moe(64, 32, 8, 2, **_TINY, max_position_embeddings=2048),
    "tiny-gpt-oss": _TINY_GPT_OSS,
    "tiny-gpt-oss-mxfp4": _TINY_GPT_OSS,
    "tiny-qwen3.5": qwen3_5(
        **_TINY | {"num_hidden_layers": 4},
        hidden_size=64,
        intermediate_size=96,
        max_position_embeddings=2048,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "tiny": LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=0,
    ),
}
PACKED = ("gpt-oss-20b-mxfp4", "tiny-gpt-oss-mxfp4")
"""Shapes whose files have their experts in MXFP4; as models they are plain."""
EXPERT_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def experts_per_token(config: PretrainedConfig) -> int:
    """To how many experts a token goes; 0 of a shape without."""
    return getattr(config, "num_experts_per_tok", 0)


def shape_of(name: str, layers: int | None) -> PretrainedConfig:
    """A copy of a shape, with another number of layers if one is given."""
    config = copy.deepcopy(SHAPES[name])
    config.num_hidden_layers = layers or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * config.num_hidden_layers)[: config.num_hidden_layers]
    return config


def make_model(shape: str, device: torch.device, dtype: torch.dtype, layers: int | None = None) -> Any:
    """A causal LM of `shape` with random weights, drawn on `device` itself: 8 billion of them in seconds, where a CPU takes minutes.

    Attention is sdpa, or eager where the family has sinks. In a mixture embeddings are as large as what layers add to them is small, so
    that tokens differ and spread over the experts.
    """
    torch.manual_seed(0)
    config = shape_of(shape, layers)
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if experts_per_token(config):
            torch.nn.init.normal_(model.get_input_embeddings().weight)
    odd = sorted(name for name, p in model.named_parameters() if p.device.type != device.type or p.dtype != dtype)
    assert not odd, f"{odd[0]} is not {dtype} on {device}"
    return model.eval()


def write_base(shape: str, directory: Path, device: torch.device) -> Path:
    """Such a model in bf16 as files, with the demo's tokenizer, for benchmarks of whole processes."""
    make_model(shape, device, torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_BASE / name, directory)
    return directory


def matmul_parameters(model: Any) -> int:
    """Weights that a token is multiplied with: all linears, its experts and the head, tied or not, but no embedding.

    A token's useful work is 4 of them in FLOP: 2 in the forward, 2 for the input gradients; a frozen weight needs no gradient.
    """
    head = model.get_output_embeddings()
    inner = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head)
    experts = [p for name, p in model.named_parameters() if name.endswith(EXPERT_PARAMETERS)]
    per_token = experts_per_token(model.config)
    return inner + head.weight.numel() + sum(p.numel() // p.shape[0] * per_token for p in experts)
