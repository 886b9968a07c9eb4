"""The gated delta rule and the convolution over packed samples: as transformers computes each by itself, and NaN stays where it is."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from tests.kernels.interpreter import DEVICE, MARKS, interpreted
from tests.tolerances import KERNEL, assert_close
from tlora.kernels.chunk_layout import lay_out_chunks
from tlora.kernels.delta_rule import gated_delta_rule, shifted_convolution

with interpreted():
    from tlora.kernels.triton_conv import causal_convolution

pytestmark = MARKS
LENGTHS = (64, 1, 130, 63, 65, 2)
MINE, OTHERS = 2, (1, 3)  # a sample, and those beside it
FP64 = torch.float64


def cut(values: Tensor, sample: int) -> Tensor:
    return values.split(LENGTHS)[sample]


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=FP64).to(dtype).to(DEVICE) for shape in shapes]


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=FP64).to(out)
    return list(torch.autograd.grad((out * weights).sum(), inputs))


def rule_inputs(dtype: torch.dtype) -> list[Tensor]:
    tokens = sum(LENGTHS)
    q, k, v, g, beta = drawn((tokens, 2, 16), (tokens, 2, 16), (tokens, 4, 24), (tokens, 4), (tokens, 4), dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v, -g.abs(), beta.sigmoid())]


@pytest.mark.parametrize("dtype", [FP64, torch.float32])
def test_the_rule_is_that_of_transformers_sample_by_sample(dtype: torch.dtype) -> None:
    """Against fp64; transformers' own casts are taken out by `Tensor.to` leaving fp64 as it is here."""
    inputs = rule_inputs(dtype)
    found = gated_delta_rule(*inputs, LENGTHS, normalize=True)
    true_inputs = [x.detach().double().requires_grad_() for x in inputs]
    reference = inspect.unwrap(qwen.torch_chunk_gated_delta_rule)
    from tests.numerics.peft_oracle import fp64_throughout

    q, k, *others = true_inputs
    whole = [q.repeat_interleave(2, 1), k.repeat_interleave(2, 1), *others]  # not each release of transformers repeats them itself
    with fp64_throughout():
        parts = [
            reference(*(x[None] for x in sample), use_qk_l2norm_in_kernel=True)[0][0]
            for sample in zip(*(x.split(LENGTHS) for x in whole), strict=True)
        ]
    true = torch.cat(parts)
    assert_close(found, true, KERNEL[dtype], "out")
    for name, ours, theirs in zip(["q", "k", "v", "g", "beta"], gradients(found, inputs), gradients(true, true_inputs), strict=True):
        assert_close(ours, theirs, KERNEL[dtype], f"gradient of {name}")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_rule_lets_nothing_of_a_sample_into_another(bad: float) -> None:
    clean, spoilt = rule_inputs(torch.float32), rule_inputs(torch.float32)
    with torch.no_grad():
        for x in spoilt:
            for other in OTHERS:
                cut(x, other).fill_(bad)
    first, second = (gated_delta_rule(*inputs, LENGTHS, normalize=True) for inputs in (clean, spoilt))
    pairs = [(first, second), *zip(gradients(first, clean), gradients(second, spoilt), strict=True)]
    for ours, theirs in pairs:
        assert torch.equal(cut(ours, MINE), cut(theirs, MINE)) and bool(cut(theirs, MINE).isfinite().all())


def conv_inputs(dtype: torch.dtype, width: int) -> list[Tensor]:
    return drawn((sum(LENGTHS), 70), (70, width), (70,), dtype=dtype, seed=1)


@pytest.mark.parametrize(("width", "silu", "bias"), [(4, True, False), (3, False, True), (4, True, True)])
def test_the_convolution_is_that_of_transformers_sample_by_sample(width: int, silu: bool, bias: bool) -> None:
    x, weight, b = conv_inputs(torch.float32, width)
    positions = lay_out_chunks(LENGTHS, 64, DEVICE).positions
    x.requires_grad_()
    true_x = x.detach().double().requires_grad_()
    reference: Any = inspect.unwrap(qwen.causal_conv1d_fn)
    bias_d = b.double() if bias else None
    parts = [reference(part.t()[None], weight.double(), bias_d, "silu" if silu else None)[0].t() for part in true_x.split(LENGTHS)]
    true = torch.cat(parts)
    for operation in (causal_convolution, shifted_convolution):
        found = operation(x, weight, b if bias else None, positions, silu)
        assert_close(found, true, KERNEL[torch.float32], operation.__name__)
        [ours], [theirs] = gradients(found, [x]), gradients(torch.cat(parts), [true_x]) if operation is causal_convolution else [None]
        if theirs is not None:
            assert_close(ours, theirs, KERNEL[torch.float32], "gradient")


def test_the_convolution_of_a_sample_has_its_bits_anywhere_and_beside_nan() -> None:
    x, weight, _ = conv_inputs(torch.bfloat16, 4)
    positions = lay_out_chunks(LENGTHS, 64, DEVICE).positions
    spoilt = x.clone()
    for other in OTHERS:
        cut(spoilt, other).fill_(torch.nan)
    own = cut(x, MINE).clone().requires_grad_()
    alone = causal_convolution(own, weight, None, lay_out_chunks(LENGTHS[MINE : MINE + 1], 64, DEVICE).positions, True)
    [alone_grad] = torch.autograd.grad(alone.sum(), [own])
    for packed in (x, spoilt):
        packed.requires_grad_()
        out = causal_convolution(packed, weight, None, positions, True)
        [grad] = torch.autograd.grad(out.sum(), [packed])
        assert torch.equal(cut(out, MINE), alone) and torch.equal(cut(grad, MINE), alone_grad)
