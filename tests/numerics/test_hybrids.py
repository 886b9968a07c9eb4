"""Layers that carry something along a sample, in all linears adapted: together = alone = PEFT, and what sees another sample is refused."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import JambaConfig, JambaForCausalLM
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from tests.numerics import checks, poisons
from tests.numerics.two_jobs import edges_and_late
from tests.numerics.world import Job, super_model
from tests.tiny import HYBRIDS, SHAPE, make_model
from tlora.errors import ModelError
from tlora.job import LoraConfig
from tlora.supermodel import recurrent_layers
from tlora.supermodel.load import make_base
from tlora.supermodel.recurrent_layers import RECURRENCES, by_sample

WIDER = (("hidden_size", 256), ("mamba_n_heads", 32))
"""A product's bits depend on how many rows it has from here on. The latter is granite's alone."""
LENGTHS = (1, 63, 64, 65, 2, 3)
TARGETS: dict[str, list[str]] = {
    "granite-4-h": ["in_proj", "q_proj", "o_proj"],  # PEFT adapts no out_proj of Mamba layers
    "qwen3-next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "v_proj"],
    "kimi-linear": ["q_proj", "k_proj", "v_proj", "o_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj"],
}
"""Where it is not all-linear: PEFT's takes experts too."""
EXPERTS = ("qwen3-next", "kimi-linear")  # whose products of experts take no fp64


def targets(family: str) -> list[str] | str:
    return TARGETS.get(family, "all-linear")


def jobs(family: str, short: bool = False) -> list[Job]:
    return edges_and_late(targets(family), LENGTHS[-3:] if short else LENGTHS)


@pytest.mark.parametrize("family", [pytest.param(name, marks=[] if name == "qwen3.5" else pytest.mark.slow) for name in HYBRIDS])
def test_fp64_equals_peft_and_alone(family: str) -> None:
    checks.check_in_fp64(family, jobs(family), jobs(family, short=True), torch.float32 if family in EXPERTS else torch.float64)


@pytest.mark.parametrize("family", [pytest.param(name, marks=[] if name == "qwen3.5" else pytest.mark.slow) for name in HYBRIDS])
def test_fp32_equals_alone_beside_nan(family: str) -> None:
    model, found = super_model(family, torch.float32, WIDER), jobs(family, short=True)
    checks.check_l3(model, found, packing_seed=13)
    alone = checks.all_alone(model, found)
    checks.check_l1(model, found, 14, alone)
    for poison in poisons.POISONS:
        if poison.name in ("NaN gradient", "3e38 activations"):
            shaped = replace(poison, shape=lambda job: replace(job, lora=job.lora.model_copy(update={"target_modules": targets(family)})))
            checks.check_l2(model, found, shaped, alone, routed_alike=family not in EXPERTS or poison.name == "NaN gradient")


@pytest.mark.parametrize("family", ["qwen3.5", pytest.param("lfm2", marks=pytest.mark.slow)])
def test_all_samples_in_one_call_as_on_a_gpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations that a GPU takes, on a CPU: PEFT's numbers, and alone to the last bit where each unit is computed by itself."""
    monkeypatch.setattr(recurrent_layers, "takes_all_at_once", lambda _: True)
    checks.check_in_fp64(family, jobs(family), jobs(family, short=True))


def test_all_linears_of_these_layers_are_adapted_and_all_else_is_frozen() -> None:
    model = super_model("qwen3.5", torch.float32, ())
    names = {shape.module for shape in model.layout(LoraConfig()).shapes}
    inner = {name.rsplit(".", 1)[1] for name in names if ".linear_attn." in name}
    assert inner == {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"}
    assert not any(p.requires_grad for p in model.base.model.parameters())


@pytest.mark.parametrize("bug", ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"])
def test_a_layer_that_sees_other_samples_is_refused_at_load(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution without the samples' bounds; chunks of the delta rule across samples."""
    left = {name: recurrence for name, recurrence in RECURRENCES.items() if name != bug}
    monkeypatch.setattr(recurrent_layers, "RECURRENCES", left)
    with pytest.raises(ModelError, match="gives packed samples other logits than single ones"):
        make_base(make_model("qwen3.5"), "qwen3.5")


def test_a_family_whose_code_hands_no_lengths_on_is_refused_with_the_remedy() -> None:
    config = JambaConfig(**SHAPE, num_experts=1, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=8)
    said = f"cannot run packed samples: in transformers {re.escape(transformers.__version__)} its code hands causal_conv1d_fn no lengths"
    with pytest.raises(ModelError, match=f"{said}.* Install a newer transformers, .*LFM2's from 5.23 on"):
        make_base(JambaForCausalLM(config), "jamba")


def inputs(tokens: int, name: str) -> dict[str, Any]:
    """Of an operation by its name, with random numbers for each token."""
    draw = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    if name == "causal_conv1d_fn":
        return {"hidden_states": random(1, 32, tokens), "weight": random(32, 4), "bias": random(32), "activation": "silu"}
    if name == "mamba2_chunk_scan":
        return {
            "hidden_states": random(1, tokens, 4, 8), "dt": random(1, tokens, 4), "A": -random(4).abs(), "B": random(1, tokens, 1, 8),
            "C": random(1, tokens, 1, 8), "chunk_size": 16, "D": random(4), "dt_bias": random(4), "dt_softplus": True,
        }  # fmt: skip
    if name == "mamba_selective_scan":
        return {
            "hidden_states": random(1, 16, tokens), "dt": random(1, 16, tokens), "A": -random(16, 8).abs(), "B": random(1, 8, tokens),
            "C": random(1, 8, tokens), "delta_softplus": True,
        }  # fmt: skip
    gate = (1, tokens, 4, 16) if "kimi" in name else (1, tokens, 4)
    heads = {key: random(1, tokens, 4, 16) for key in ("query", "key", "value")}
    return {**heads, "g": -random(*gate).abs(), "beta": random(1, tokens, 4).sigmoid(), "use_qk_l2norm_in_kernel": True}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (qwen, "causal_conv1d_fn"),
        (qwen, "torch_chunk_gated_delta_rule"),
        (kimi, "chunk_kimi_delta_attention"),
        (granite, "mamba2_chunk_scan"),
        (mamba, "mamba_selective_scan"),
    ],
)
def test_each_operation_packed_is_alone_to_the_last_bit_also_beside_nan(module: Any, name: str) -> None:
    """Forward and the gradient of each input that has tokens."""
    operation, recurrence = inspect.unwrap(getattr(module, name)), RECURRENCES[name]
    each = [inputs(length, name) for length in LENGTHS]
    fixed = {key: value for key, value in each[0].items() if key not in recurrence.inputs}

    def run(parts: list[dict[str, Any]], lengths: tuple[int, ...] | None) -> tuple[Tensor, list[Tensor]]:
        tokens = {
            key: torch.cat([part[key] for part in parts], recurrence.time).requires_grad_() for key in parts[0] if key in recurrence.inputs
        }
        out = by_sample(name, operation)(**tokens, **fixed, sequence_lengths=lengths)
        out = out if isinstance(out, Tensor) else out[0]
        out.sin().sum().backward()
        return out.detach(), [values.grad for values in tokens.values() if values.grad is not None]

    spoilt = [
        part if i in (1, 3) else {key: value * torch.nan if key in recurrence.inputs else value for key, value in part.items()}
        for i, part in enumerate(each)
    ]
    for packed in (run(each, LENGTHS), run(spoilt, LENGTHS)):
        for i in (1, 3):
            first, cut = sum(LENGTHS[:i]), LENGTHS[i]
            alone = run([each[i]], None)
            for found, own in zip([packed[0], *packed[1]], [alone[0], *alone[1]], strict=True):
                assert torch.equal(found.narrow(recurrence.time, first, cut), own), f"sample {i} of {name}"
