"""Tiny random base models of each supported family, and samples for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV4Config,
    DeepseekV32Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GlmMoeDsaConfig,
    GPT2Config,
    GraniteMoeHybridConfig,
    InklingTextConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM3VLTextConfig,
    MistralConfig,
    ModernBertDecoderConfig,
    MptConfig,
    NemotronConfig,
    OpenAIGPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    Qwen4ExpTextConfig,
    StableLmConfig,
    ZayaConfig,
)

from tlora.data.dataset import Sample
from tlora.supermodel.batch import BatchRow, PackedBatch, collate

SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW: dict[str, Any] = {"sliding_window": 7}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=24, tie_word_embeddings=False),
    "mistral": MistralConfig(**SHAPE, **WINDOW),
    "gemma2": Gemma2Config(**SHAPE, **WINDOW, head_dim=16, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3": Gemma3TextConfig(**SHAPE, **WINDOW, head_dim=16, layer_types=["sliding_attention", "full_attention"]),
    "gemma3-capped": Gemma3TextConfig(
        **SHAPE, **WINDOW, head_dim=16, layer_types=["sliding_attention", "full_attention"], final_logit_softcapping=3.0
    ),
    "phi3": Phi3Config(**SHAPE, tie_word_embeddings=False),
}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
HYBRIDS: dict[str, PretrainedConfig] = {
    "qwen3.5": Qwen3_5TextConfig(**SHAPE, **LINEAR),
    "qwen3-next": Qwen3NextConfig(
        **SHAPE, **LINEAR, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "lfm2": Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "kimi-linear": KimiLinearConfig(
        **{**SHAPE, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_token": 2},
        layer_types=LINEAR["layer_types"],
        mlp_layer_types=["dense", "sparse"],
        linear_head_dim=16,
        linear_num_heads=4,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        moe_intermediate_size=32,
    ),
    "granite-4-h": GraniteMoeHybridConfig(
        **SHAPE,
        **MAMBA,
        layer_types=["mamba", "attention"],
        num_local_experts=0,
        shared_intermediate_size=96,
        position_embedding_type="nope",
    ),
}
"""Families with layers that carry something along a sample."""
CHUNKED: dict[str, PretrainedConfig] = {
    "llama4": Llama4TextConfig(
        **SHAPE,
        intermediate_size_mlp=96,
        head_dim=16,
        num_local_experts=4,
        moe_layers=[1],
        no_rope_layers=[1, 0],
        attention_chunk_size=16,
        floor_scale=8,
        attn_scale=0.5,
    ),
}
"""A chunked layer with rotary positions, and one that sees all and scales its queries by position."""
_LATENT: dict[str, Any] = {
    **SHAPE, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64,
}  # fmt: skip
INDEXED: dict[str, PretrainedConfig] = {
    "deepseek-v3.2": DeepseekV32Config(**_LATENT, mlp_layer_types=["dense", "dense"]),
    "glm-5": GlmMoeDsaConfig(**_LATENT, mlp_layer_types=["dense", "sparse"], indexer_types=["full", "shared"]),
    "minimax-m3": MiniMaxM3VLTextConfig(
        **SHAPE,
        dense_intermediate_size=96,
        shared_intermediate_size=32,
        num_local_experts=4,
        head_dim=16,
        rotary_dim=8,
        layer_types=["full_attention", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "dense"],
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=16,
        index_topk_blocks=4,
    ),
}
"""Attention that is dense in samples of up to 64 tokens. The second layer of GLM-5 takes the choice of the first one's indexer."""

WITHOUT_KEYWORDS: dict[str, PretrainedConfig] = {"stablelm": StableLmConfig(**SHAPE), "nemotron": NemotronConfig(**SHAPE)}
"""Layers take keywords, and hand their attention none."""
_GPT: dict[str, Any] = {
    "vocab_size": 131, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TRANSPOSED: dict[str, PretrainedConfig] = {"gpt2": GPT2Config(**_GPT)}
"""`Conv1D`s in the place of linears."""
BEFORE_HEAD: dict[str, PretrainedConfig] = {
    "modernbert-decoder": ModernBertDecoderConfig(
        **SHAPE, local_attention=14, layer_types=["sliding_attention", "full_attention"], decoder_bias=True, cls_token_id=1, sep_token_id=2
    ),
    "bert": BertConfig(**SHAPE, is_decoder=True),
}
"""Between decoder and head there is a dense layer with a norm."""
_OF_QWEN4 = Qwen4ExpTextConfig().layer_types or []  # one of its two kinds has another name in each version
_FALCON: dict[str, Any] = {**SHAPE, "ffn_hidden_size": 96}
ONE_BY_ONE: dict[str, PretrainedConfig] = {
    "qwen4-exp": Qwen4ExpTextConfig(
        **{**SHAPE, **LINEAR, "layer_types": ["linear_attention", *(set(_OF_QWEN4) - {"linear_attention"})]},
        **dict.fromkeys(("num_experts", "hc_count"), 4),
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        hc_lowrank=8,
        ple_layer_ids=[1],
        ngram_vocab_size_base=64,
        split_ngram_parts=1,
        heads_per_ngram=2,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=16,
        indexer_compress_ratio=4,
    ),
    "deepseek-v4": DeepseekV4Config(
        **SHAPE,
        head_dim=16,
        moe_intermediate_size=96,
        q_lora_rank=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        mlp_layer_types=["hash_moe", "moe"],
        sliding_window=7,
        partial_rotary_factor=0.5,
    ),
    "jamba": JambaConfig(**SHAPE, num_experts=1, mamba_d_state=8, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1),
    "mpt": MptConfig(d_model=64, n_heads=4, n_layers=2, max_seq_len=256, vocab_size=131, expansion_ratio=2),
    "gpt": OpenAIGPTConfig(**_GPT),
    "zaya": ZayaConfig(**SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=32),
    "inkling": InklingTextConfig(
        **{**SHAPE, "vocab_size": 137},
        unpadded_vocab_size=131,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_layer_types=["dense", "sparse"],
    ),
    "falcon": FalconConfig(**_FALCON, multi_query=True, parallel_attn=True, bias=True),
    "falcon-40b": FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-rw": FalconConfig(**_FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True),
}
"""Samples of these cannot share a pass: an indexer over pooled keys and embeddings of several tokens, compressed keys, state-space layers
that get no lengths, positions counted in the batch, masks of its own over `Conv1D`s,
attention that no other can replace.
"""


def make_model(family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A random causal LM of `family`; `changes` override its config."""
    kind = {**FAMILIES, **HYBRIDS, **CHUNKED, **INDEXED, **WITHOUT_KEYWORDS, **TRANSPOSED, **BEFORE_HEAD, **ONE_BY_ONE}[family]
    config = type(kind)(**{**kind.to_dict(), **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():  # random norms and biases: a path that forgets one must not pass
            for p in model.parameters():
                if p.ndim == 1:
                    p.add_(torch.randn_like(p) * 0.1)
    return model.eval()


def make_samples(count: int, seed: int = 0, low: int = 2, high: int = 24, vocab: int = 131) -> list[Sample]:
    """Random samples whose first third is a prompt without loss."""
    rng = np.random.default_rng(seed)
    found: list[Sample] = []
    for length in rng.integers(low, high + 1, count):
        weights = np.ones(length, np.float32)
        weights[: length // 3] = 0
        found.append(Sample(rng.integers(3, vocab, length).astype(np.int32), weights))
    return found


def make_batch(samples: dict[str, list[Sample]], step: int | None = None, seed: int = 0, device: torch.device | str = "cpu") -> PackedBatch:
    """One batch with each job's samples as its whole global batch; with `step`, dropout is on."""
    rows: list[BatchRow] = []
    for job_id, own in samples.items():
        normalizer = float(sum(s.loss_weights[1:].sum() for s in own))
        for i, s in enumerate(own):
            rows.append(BatchRow(job_id, s.input_ids, s.loss_weights, normalizer, None if step is None else (seed, step, i)))
    return collate(rows, device)
