"""Which bases and targets are taken, which are refused, and in what words."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from bench.families import tiny
from tests.tiny import CHUNKED, FAMILIES, SHAPE, make_model, make_samples
from tests.tolerances import LOGITS, assert_close
from tlora.errors import ModelError
from tlora.job import LoraConfig
from tlora.supermodel import recurrent_layers
from tlora.supermodel.experts import Experts
from tlora.supermodel.inject import expert_modules, find_linears, resolve_targets
from tlora.supermodel.load import hidden_states, load_base, make_base, outline
from tlora.supermodel.lora_linear import LoraLinear
from tlora.supermodel.supermodel import SuperModel
from tlora.supermodel.text_model import leave_out_other_modalities

SMALL = {k: SHAPE[k] for k in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")}


def build(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


# -- bases ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_taken_and_frozen(family: str) -> None:
    model = make_model(family)
    expected = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)} - {"lm_head"}
    shared = SuperModel(make_base(model, family))
    assert {shape.module for shape in shared.layout(LoraConfig()).shapes} == expected
    assert all(isinstance(model.get_submodule(name), LoraLinear) for name in expected)
    assert not any(p.requires_grad for p in model.parameters()) and not model.training


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.RwkvConfig(**SMALL, num_hidden_layers=2, attention_hidden_size=64), "other logits than single ones"),
        (transformers.MambaConfig(**SMALL, num_hidden_layers=2, state_size=4), "cannot run packed samples"),
        (transformers.FalconConfig(**SHAPE, num_ln_in_parallel_attn=None), "cannot run packed samples"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_base_that_cannot_be_packed_is_refused(config: Any, words: str) -> None:
    with pytest.raises(ModelError, match=f"base_model some/name: .*{words}"):
        make_base(build(config), "some/name")


def test_a_class_that_leaves_out_what_its_text_model_does_to_logits_is_said() -> None:
    """Packed logits are right there, and the class's own are not."""
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(tiny(transformers.AyaVisionConfig))
    leave_out_other_modalities(model)
    with pytest.raises(ModelError, match=r"leaves out the logit_scale 0\.0625 of its text model.* as Cohere2ForCausalLM, and take that"):
        make_base(model, "aya")
    model.config.text_config.logit_scale = 1.0
    make_base(model, "aya")


@pytest.mark.skipif(tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23), reason="LFM2 mixes samples there by itself")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_short_convolution_without_bounds_is_refused_though_it_leaks_less_than_rounding(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])
    make_base(build(config, dtype), "lfm2")
    monkeypatch.setattr(recurrent_layers, "RECURRENCES", {})
    with pytest.raises(ModelError, match=r"gives packed samples other logits than single ones"):
        make_base(build(config, dtype), "lfm2")


def test_a_processor_whose_products_mix_rows_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As oneDNN's in bfloat16 with AMX do, at rows of other lengths than multiples of 32: the sum reads on into the next row, times 0."""
    own = nn.functional.linear

    def mixing(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = own(x, weight, bias)
        if x.dtype == torch.bfloat16 and x.shape[-1] % 32:
            y[..., :-1, :] += 0 * x[..., 1:, :1]
        return y

    monkeypatch.setattr(nn.functional, "linear", mixing)
    with pytest.raises(ModelError, match="products of 40 numbers in bfloat16 let a NaN of one row into another.* Set dtype: float32"):
        make_base(make_model("llama", torch.bfloat16, intermediate_size=40), "tiny")
    make_base(make_model("llama", torch.float32, intermediate_size=40), "tiny")  # the remedy


def test_layers_that_are_not_linear_are_refused() -> None:
    with pytest.raises(ModelError, match=r"Sequential has no nn\.Linear layer to adapt"):
        find_linears(nn.Sequential(nn.Embedding(131, 64), nn.LayerNorm(64)))


def test_a_head_that_is_not_linear_is_refused() -> None:
    model = make_model()
    model.lm_head = nn.Sequential(nn.Linear(64, 131))
    with pytest.raises(ModelError, match="output head is Sequential"):
        make_base(model, "odd")


def test_a_model_whose_decoder_is_nowhere_is_refused() -> None:
    model = make_model()
    del model.model
    with pytest.raises(ModelError, match="LlamaForCausalLM .*'model'"):
        make_base(model, "odd")


def test_paths(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Give a directory with config\.json"):
        load_base(str(tmp_path / "absent"))
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_base(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_base(str(tmp_path))
    (tmp_path / "config.json").write_text(FAMILIES["llama"].to_json_string())
    with pytest.raises(ModelError, match="has no weights"):
        load_base(str(tmp_path))


def test_from_a_directory(tmp_path: Path) -> None:
    make_model("qwen2").save_pretrained(tmp_path)
    model = SuperModel.from_pretrained(str(tmp_path), dtype="float64")
    assert model.bank.dtype == torch.float64 and model.base.vocab_size == 131 and model.base.name == str(tmp_path)


@pytest.mark.skipif(find_spec("timm") is not None, reason="is of one that is not installed")
def test_a_package_that_transformers_needs_is_named(tmp_path: Path) -> None:
    transformers.Gemma3nConfig().save_pretrained(tmp_path)
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    for make in (outline, load_base):
        with pytest.raises(ModelError, match=r"makes no model of it without another package: .*pip install timm"):
            make(str(tmp_path))


def test_a_checkpoint_of_several_text_models_is_refused(tmp_path: Path) -> None:
    transformers.MusicgenConfig().save_pretrained(tmp_path)
    for make in (outline, load_base):
        with pytest.raises(ModelError, match="MusicgenConfig is no causal language model. Choose one with a causal head"):
            make(str(tmp_path))


# -- attention beyond what a few tokens show --------------------------------------------------------------------------

LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
LATENT_SHAPE = {
    **SHAPE,
    "num_key_value_heads": 4,
    **LATENT,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}


WINDOWED = {
    "mistral": FAMILIES["mistral"],
    "gemma2": FAMILIES["gemma2"],
    "gemma3": FAMILIES["gemma3"],
    "gemma4": transformers.Gemma4TextConfig(
        **SHAPE,
        **ALTERNATING,
        sliding_window=7,
        head_dim=16,
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=131,
    ),
    "qwen2": transformers.Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=16, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "cohere2": transformers.Cohere2Config(**SHAPE, **ALTERNATING, sliding_window=7),
    "olmo3": transformers.Olmo3Config(**SHAPE, **ALTERNATING, sliding_window=7),
    "exaone4": transformers.Exaone4Config(**SHAPE, **ALTERNATING, sliding_window=7),
    "ministral": transformers.MinistralConfig(**SHAPE, sliding_window=7, head_dim=16),
    "phi3": transformers.Phi3Config(**SHAPE, sliding_window=7),
    "starcoder2": transformers.Starcoder2Config(**SHAPE, sliding_window=7),
    "mixtral": transformers.MixtralConfig(**SHAPE, sliding_window=7, num_local_experts=4, num_experts_per_tok=2),
    "ministral3": transformers.Ministral3Config(  # queries are scaled by their position in the sample
        **SHAPE,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "llama4": CHUNKED["llama4"],
    "deepseek-v3": transformers.DeepseekV3Config(**LATENT_SHAPE, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1),
}


@pytest.mark.parametrize("config", WINDOWED.values(), ids=WINDOWED)
def test_samples_longer_than_the_window_get_the_logits_that_transformers_gives_each_alone(config: Any) -> None:
    base, lengths = make_base(build(config), "windowed"), (97, 5, 64)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, base.vocab_size, (n,), generator=generator) for n in lengths]
    with torch.no_grad():
        packed = base.head.logits(hidden_states(base, torch.cat(ids), torch.cat([torch.arange(n) for n in lengths]), lengths))
        base.model.set_attn_implementation("eager")
        alone = torch.cat([base.model(input_ids=i[None], use_cache=False).logits[0] for i in ids])
    assert_close(packed, alone.double(), LOGITS[torch.float32], "logits")


class _OwnMask(nn.Module):
    """An attention that narrows the mask it was given, as a family might whose code is not in transformers."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: Any, attention_mask: Any = None, **keywords: Any) -> Any:
        return self.attention(hidden_states=hidden_states, attention_mask=attention_mask * 1, **keywords)


def test_a_layer_with_a_mask_of_its_own_is_refused() -> None:
    model = make_model()
    model.model.layers[1].self_attn = _OwnMask(model.model.layers[1].self_attn)
    with pytest.raises(ModelError, match=r"LlamaAttention .*attention mask"):
        make_base(model, "odd")


def test_an_attention_that_is_not_causal_is_refused() -> None:
    model = make_model()
    attend = partial(model.model.layers[1].self_attn.forward, is_causal=False)
    model.model.layers[1].self_attn.forward = attend
    with pytest.raises(ModelError, match=r"LlamaAttention is not causal"):
        make_base(model, "odd")


# -- targets -------------------------------------------------------------------------------------------------------------


def targets_of(model: Any, **lora: Any) -> dict[str, tuple[int, int]]:
    return resolve_targets(model, find_linears(model), Experts(model), LoraConfig(**lora))


def test_literal_targets_match_whole_names_or_their_ends() -> None:
    model = make_model()
    assert set(targets_of(model, target_modules=["v_proj"])) == {f"model.layers.{i}.self_attn.v_proj" for i in (0, 1)}
    assert set(targets_of(model, target_modules=["layers.1.mlp.up_proj"])) == {"model.layers.1.mlp.up_proj"}
    assert targets_of(model, target_modules=["down_proj"])["model.layers.0.mlp.down_proj"] == (96, 64)
    with pytest.raises(ModelError, match="'proj' is not in this base model"):
        targets_of(model, target_modules=["proj"])  # no part of a name, as in PEFT


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "q_prj",
            "'q_prj' is not in this base model. Did you mean q_proj\\? It has: down_proj, gate_proj, k_proj, o_proj, q_proj",
        ),
        ("query_key_value", "'query_key_value' is not .*It has: down_proj.*or write all-linear"),
        ("lm_head", "'lm_head' is no inner linear layer"),
        (".*_proj", "is not in this base model"),
    ],
)
def test_unknown_targets_are_named_beside_those_that_exist(target: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        targets_of(make_model(), target_modules=["v_proj", target])


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_matches_nothing_adapted_is_refused(pattern: str) -> None:
    with pytest.raises(ModelError, match="'up_proj' in rank_pattern"):
        targets_of(make_model(), target_modules=["q_proj"], **{pattern: {"up_proj": 3}})


EXPERTS = {
    "mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": transformers.Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
}


@pytest.mark.parametrize("config", EXPERTS.values(), ids=EXPERTS)
def test_all_linear_leaves_experts_out_and_the_attention_beside_them_is_adapted(config: Any) -> None:
    model = build(config)
    expected = {f"model.layers.{i}.self_attn.{end}_proj" for i in (0, 1) for end in "qkvo"}
    assert set(targets_of(model)) == expected
    assert len(targets_of(model, target_modules=["q_proj"])) == 2
    shared = SuperModel(make_base(model, "experts"))
    assert shared.left_out(LoraConfig()) == [
        "all-linear adapts k_proj, o_proj, q_proj, v_proj: 2 layers have a mixture of experts, and mlp of all layers is left as it is"
    ]
    assert shared.left_out(LoraConfig(target_modules=["q_proj"])) == []
    assert expert_modules(make_model()) == []


def test_all_linear_adapts_attention_beside_experts_of_its_own_and_no_router() -> None:
    """JetMoE's queries and outputs are experts, with a router of their own; its MLP's experts have another name."""
    model = build(transformers.JetMoeConfig(**SHAPE, kv_channels=16, num_local_experts=4, num_experts_per_tok=2))
    expected = {f"model.layers.{i}.self_attention.kv_proj" for i in (0, 1)}
    assert set(targets_of(model)) == set(targets_of(model, target_modules=["kv_proj"])) == expected
    with pytest.raises(ModelError, match=r"mlp is a mixture of experts, .* Name the attention's linears .* instead: kv_proj$"):
        targets_of(model, target_modules=["layer"])
    assert SuperModel(make_base(model, "experts")).left_out(LoraConfig()) == [
        "all-linear adapts kv_proj: 2 layers have a mixture of experts, and experts and mlp of all layers are left as they are"
    ]


def test_a_linear_inside_the_experts_is_refused_by_name() -> None:
    model = make_model()
    model.model.layers[1].mlp.experts = nn.ModuleList([nn.Linear(64, 64)])
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp .*experts"):
        targets_of(model, target_modules=["up_proj"])


def test_samples_for_the_tiny_models_fit_their_vocabulary() -> None:
    assert all(
        s.input_ids.min() >= 3 and s.input_ids.max() < SHAPE["vocab_size"] and not s.loss_weights[0] for s in make_samples(50, low=3)
    )
