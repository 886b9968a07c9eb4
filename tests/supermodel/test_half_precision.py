"""A float16 base: gradients of large global batches are those of float32, on the plain path and on the kernels; what overflows is said."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BlenderbotSmallConfig, BlenderbotSmallForCausalLM, XLMConfig, XLMWithLMHeadModel

from bench.families import tiny
from tests.kernels.interpreter import DEVICE, MARKS, interpret
from tests.tiny import make_model, make_samples
from tlora.errors import ModelError
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel import supermodel
from tlora.supermodel.batch import BatchRow, collate, grad_scale
from tlora.supermodel.load import make_any_base, make_base
from tlora.supermodel.supermodel import SuperModel
from tlora.wording.dtypes import dtype_name

ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
LORA = LoraConfig(r=8)
TRAIN = TrainConfig(lr_scheduler_type="constant", max_grad_norm=0)
NORMALIZERS = (100.0, 65_000.0, 1e6)


def make_shared(dtype: torch.dtype, fast: bool = False) -> SuperModel:
    """The same weights in either dtype: those of float16 are exact in float32."""
    with pytest.MonkeyPatch.context() as patch:
        if fast:
            interpret(patch)
        else:
            patch.setattr(supermodel, "why_not_fused", lambda *_: "this test takes the plain path")
        shared = SuperModel(make_base(make_model("llama", **ONE_LAYER).half().to(DEVICE, dtype), "llama"))
    assert (shared.fast_path is not None) == fast
    return shared


def rows_of(job_id: str, normalizer: float, seed: int = 0) -> list[BatchRow]:
    return [BatchRow(job_id, s.input_ids, s.loss_weights, normalizer) for s in make_samples(3, seed=seed, low=8)]


def gradient(shared: SuperModel, batches: Sequence[Sequence[BatchRow]], job_id: str = "a") -> Tensor:
    """Of `job_id` over all `batches`, in fp64."""
    for name in dict.fromkeys(row.job_id for batch in batches for row in batch):
        shared.join(name, LORA, TRAIN)
    for batch in batches:
        shared.forward_backward(collate(batch, DEVICE))
    found = shared.gradient(job_id).double()
    for name in shared.bank.jobs():
        shared.leave(name)
    return found


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.cosine_similarity(a, b, dim=0))


@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=MARKS)], ids=["plain", "kernels"])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_a_large_batch_loses_no_gradient(normalizer: float, fast: bool) -> None:
    """In size too, not in direction alone."""
    with torch.compiler.set_stance("force_eager"):
        found = gradient(make_shared(torch.float16, fast), [rows_of("a", normalizer)])
        expected = gradient(make_shared(torch.float32), [rows_of("a", normalizer)])
    assert cosine(found, expected) > 0.999
    assert float(found.norm() / expected.norm()) == pytest.approx(1, rel=1e-2)


def test_gradients_of_several_micro_batches_add_up_whatever_their_normalizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a job of another size, and where the sums are read, replaced and taken up again in between."""
    normalizers = (7.0, 1e6, 500.0)
    shared, wide = make_shared(torch.float16), make_shared(torch.float32)
    batches = [[*rows_of("a", n, seed), *rows_of("b", 3.0, seed)] for seed, n in enumerate(normalizers)]
    expected = gradient(wide, batches)
    assert cosine(gradient(shared, batches), expected) > 0.999
    shared.join("a", LORA, TRAIN)
    for seed, normalizer in enumerate(normalizers):
        shared.forward_backward(collate(rows_of("a", normalizer, seed), DEVICE))
        shared.set_gradient("a", shared.gradient("a"))
    assert cosine(shared.gradient("a").double(), expected) > 0.999
    shared.zero_grad_of("a")
    assert not shared.gradient("a").any()


def test_steps_see_the_gradient_and_not_its_scale() -> None:
    norms: dict[torch.dtype, list[float]] = {}
    for dtype in (torch.float16, torch.float32):
        shared = make_shared(dtype)
        shared.join("a", LORA, TRAIN)
        norms[dtype] = []
        for step in range(2):
            shared.forward_backward(collate(rows_of("a", 65_000.0, step), DEVICE))
            norms[dtype].append(shared.optim_step(["a"])["a"].grad_norm)
    assert norms[torch.float16] == pytest.approx(norms[torch.float32], rel=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_are_not_scaled(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = make_shared(dtype)
    shared.join("a", LORA, TRAIN)
    monkeypatch.setattr(shared.bank, "scale_sums", lambda _, scale: pytest.fail(f"scaled by {scale}"))
    shared.forward_backward(collate(rows_of("a", 1e6), DEVICE))


def test_a_scale_is_a_power_of_two_that_follows_from_the_normalizer_alone() -> None:
    for normalizer in (0.3, 1.0, 7.0, 100.0, 65_000.0, 1e9):
        scale = grad_scale(normalizer)
        assert np.frexp(scale)[0] == 0.5 and 8 < scale / normalizer <= 16
    alone = collate(rows_of("a", 9.0)[:1]).spans[0]
    beside = collate([*rows_of("b", 1e6), *rows_of("a", 9.0)]).spans[1]
    assert alone.grad_scale == beside.grad_scale == grad_scale(9.0)


# -- a base that overflows ---------------------------------------------------------------------------------------------


def overflowing(model: Any) -> None:
    """Finite weights, and logits beyond 65,504."""
    model.model.norm.weight.data.fill_(3e4)
    model.lm_head.weight.data.mul_(100)


def beyond_half(model: Any) -> None:
    model.model.norm.weight.data.fill_(1e6)


def broken(model: Any) -> None:
    model.model.norm.weight.data[3] = float("nan")


@pytest.mark.parametrize(
    ("spoil", "dtype", "words", "heals"),
    [
        (overflowing, torch.float16, "it overflows in float16, which ends at 65,504", [torch.bfloat16, torch.float32]),
        (beyond_half, torch.float16, "1 of its tensors hold NaN or Inf in float16 (model.norm.weight)", [torch.float32]),
        (broken, torch.float32, "1 of its tensors hold NaN or Inf in float32 (model.norm.weight)", []),
        (broken, torch.float16, "1 of its tensors hold NaN or Inf in float16 (model.norm.weight)", []),
    ],
)
def test_a_base_whose_logits_are_not_finite_is_told_so(
    spoil: Callable[[Any], None], dtype: torch.dtype, words: str, heals: list[torch.dtype]
) -> None:
    """`heals`: the dtypes that the message names."""
    model = make_model("llama", **ONE_LAYER)
    spoil(model)
    with pytest.raises(ModelError, match=re.escape(words)) as refused:
        make_base(make_copy(model, dtype), "some/name")
    assert "other logits" not in str(refused.value)
    for wider in heals:
        assert dtype_name(wider) in str(refused.value)
        make_base(make_copy(model, wider), "some/name")


def make_copy(model: Any, dtype: torch.dtype) -> Any:
    copy = make_model("llama", **ONE_LAYER)
    copy.load_state_dict(model.state_dict())
    return copy.to(dtype)


def test_a_head_that_a_family_keeps_in_float32_is_held_in_the_layers_dtype() -> None:
    """As HY-V4's in bfloat16: adapters are in one dtype, and the first pass ended with another's products."""

    def found(head: torch.dtype) -> Tensor:
        model = make_model("llama", **ONE_LAYER).to(torch.bfloat16)
        model.lm_head.to(head)
        return gradient(SuperModel(make_base(model, "llama")), [rows_of("a", 100.0)])

    assert torch.equal(found(torch.float32), found(torch.bfloat16))


def test_code_that_mixes_dtypes_is_refused_with_the_one_that_helps() -> None:
    """As DeepSeek-V4's in bfloat16, in an earlier transformers."""
    model = make_model("llama", **ONE_LAYER).to(torch.bfloat16)
    model.model.layers[0].mlp.down_proj.float()
    with pytest.raises(ModelError, match=r"^base_model mixed: LlamaForCausalLM does not run in bfloat16: .*dtype.*\. Set dtype: float32$"):
        make_any_base(model, "mixed")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_positions_that_go_on_in_the_next_sample_are_seen_in_every_dtype(dtype: torch.dtype) -> None:
    """Blenderbot small's change its logits by 0.02, less than rounding in bfloat16 may: it was packed there, on wrong positions."""
    torch.manual_seed(0)
    model = BlenderbotSmallForCausalLM(tiny(BlenderbotSmallConfig)).to(dtype)
    why = make_any_base(model, "counted on").why_one_by_one
    assert re.match(r"BlenderbotSmallForCausalLM gives (packed samples other logits|a sample other hidden states behind others) ", why), why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_plant_that_is_smaller_than_rounding_between_kernels_is_seen(dtype: torch.dtype) -> None:
    """What comes of a token's place among all, in a family that packs rightly."""
    model = make_model("llama", **ONE_LAYER).to(dtype)
    assert make_any_base(model, "sound").why_one_by_one == ""

    def by_place(_module: object, _args: object, embedded_1TH: Tensor) -> Tensor:
        return embedded_1TH * (1 + 0.002 * torch.arange(embedded_1TH.shape[1])[:, None]).to(dtype)

    model.get_input_embeddings().register_forward_hook(by_place)
    assert make_any_base(model, "planted").why_one_by_one != ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tokens_that_see_those_behind_them_are_seen_in_every_dtype(dtype: torch.dtype) -> None:
    """XLM's change by 0.008 so, and were taken for a decoder's in bfloat16."""
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="XLMWithLMHeadModel lets tokens see those behind them, so it is no decoder"):
        make_any_base(XLMWithLMHeadModel(tiny(XLMConfig)).to(dtype), "an encoder")
