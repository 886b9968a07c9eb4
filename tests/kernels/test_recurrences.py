"""The gated delta rule and the convolution over packed samples: as transformers computes each by itself, and NaN stays where it is."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from tests.kernels.interpreter import DEVICE, MARKS, interpreted
from tests.tolerances import KERNEL, assert_close
from tlora.kernels.chunk_layout import lay_out_tables, list_chunks
from tlora.kernels.delta_rule import CHUNK, gated_delta_rule, shifted_convolution

with interpreted():
    from tlora.kernels.delta_kernels import delta_rule_by_kernels
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


HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter multiplies no bfloat16
NAMES = ("q", "k", "v", "g", "beta")


def kernel_inputs(dtype: torch.dtype, lengths: tuple[int, ...], keys: int, values: int, alike: bool = False) -> list[Tensor]:
    """One key of two heads of v, g in fp32. `alike`: keys that differ by a hundredth, hardly any decay, and beta near 1."""
    tokens = sum(lengths)
    q, k, v, g, beta = drawn((tokens, 1, keys), (tokens, 1, keys), (tokens, 2, values), (tokens, 2), (tokens, 2), dtype=FP64, seed=2)
    if alike:
        k, g, beta = k[:1] + 0.01 * k, 0.001 * g, 4 + beta
    narrow = [x.to(dtype) for x in (q, k, v, beta.sigmoid())]
    return [x.requires_grad_() for x in (*narrow[:3], (-0.3 * g.abs()).to(torch.float32), narrow[3])]


def by_kernels(inputs: list[Tensor], lengths: tuple[int, ...], normalize: bool = True) -> Tensor:
    return delta_rule_by_kernels(*inputs, list_chunks(lengths, 64, DEVICE), normalize)


@pytest.mark.parametrize("alike", [False, True], ids=["random keys", "keys alike"])
@pytest.mark.parametrize(
    ("dtype", "keys", "values", "normalize"),
    [
        pytest.param(torch.float32, 16, 16, True, marks=[pytest.mark.skipif(DEVICE.type == "cuda", reason="no run takes fp32 on a GPU")]),
        (HALF, 24, 40, True),
        pytest.param(HALF, 16, 16, False, marks=pytest.mark.slow),
        pytest.param(HALF, 128, 128, True, marks=[pytest.mark.skipif(DEVICE.type == "cpu", reason="takes minutes in the interpreter")]),
    ],
    ids=["fp32", "half, sizes that are no powers of two", "half, as long as they are", "half, Qwen3.5-9B's sizes"],
)  # fmt: skip
def test_the_kernels_are_the_rule(dtype: torch.dtype, keys: int, values: int, normalize: bool, alike: bool) -> None:
    """Against fp64, forward and gradients. Where keys are alike each token takes back what the one before it wrote, so that the rounding of
    a chunk adds up; a series in place of the substitution would be off by thousands.
    """
    lengths = (70, 1, 2) if DEVICE.type == "cpu" else LENGTHS
    inputs = kernel_inputs(dtype, lengths, keys, values, alike)
    if not normalize:
        inputs = [x if name not in "qk" else (x * 0.2).detach().requires_grad_() for name, x in zip(NAMES, inputs, strict=True)]
    true_inputs = [x.detach().double().requires_grad_() for x in inputs]
    true, found = gated_delta_rule(*true_inputs, lengths, normalize), by_kernels(inputs, lengths, normalize)
    bound = KERNEL[dtype] * (15 if alike else 1)
    assert_close(found, true, bound, "out")
    for name, ours, theirs in zip(NAMES, gradients(found, inputs), gradients(true, true_inputs), strict=True):
        assert_close(ours, theirs, bound, f"gradient of {name}")


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_the_bits_of_a_sample_by_kernels_are_those_of_it_alone(bad: float) -> None:
    """Wherever it lies, and beside samples of anything."""
    lengths, mine = (3, 66, 1) if DEVICE.type == "cpu" else (130, 321, 64, 1), 1
    inputs = kernel_inputs(HALF, lengths, 16, 16)
    alone = [x.split(lengths)[mine].detach().clone().requires_grad_() for x in inputs]
    with torch.no_grad():
        for x in inputs:
            for sample, part in enumerate(x.split(lengths)):
                if sample != mine and bad != 0.0:
                    part.fill_(bad)
    out, own = by_kernels(inputs, lengths), by_kernels(alone, lengths[mine : mine + 1])
    pairs = [(out, own), *zip(gradients_of_sum(out, inputs), gradients_of_sum(own, alone), strict=True)]
    for name, (packed, by_itself) in zip(("out", *NAMES), pairs, strict=True):
        assert bool(by_itself.isfinite().all()), f"{name} is not finite alone"
        assert torch.equal(packed.split(lengths)[mine], by_itself), f"{name} has other bits in company"


def test_a_rule_that_is_computed_again_has_the_bits_of_one_that_keeps_its_inverse() -> None:
    """As a recomputed layer's: forward keeps nothing, and the inverses that backward reads are made by the kernels that made them."""
    lengths = (70, 1) if DEVICE.type == "cpu" else LENGTHS
    found, kept = list[list[Tensor]](), list[int]()
    for way in (by_kernels, partial(checkpoint, by_kernels, use_reentrant=False)):
        inputs, saved = kernel_inputs(HALF, lengths, 16, 16), list[Tensor]()
        with saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            out = way(inputs, lengths)
        kept.append(sum(x.numel() for x in saved if x.shape[-1] == CHUNK))
        found.append([out, *gradients(out, inputs)])
    assert kept == [sum(lengths) * 2 * CHUNK, 0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def gradients_of_sum(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(out.sum(), inputs))


def test_chunk_tables_say_where_each_chunk_lies() -> None:
    """Of 64: samples of 70, 0, 1 and 64 tokens; one entry in eight for what so many samples and tokens can have at most."""
    tables = list_chunks((70, 0, 1, 64), 64, torch.device("cpu"))
    assert tables.chunks.tolist() == [[0, 64, 0, 0], [64, 6, 1, 0], [70, 1, 2, 0], [71, 64, 3, 0], [0] * 4, [0] * 4]
    assert tables.samples.tolist() == [[0, 70, 0, 0], [71, 64, 3, 0], [70, 1, 2, 0], [70, 0, 2, 0]]
    assert tables.positions.tolist() == [*range(70), 0, *range(64)]
    assert all(part.data_ptr() % 16 == 0 for part in (tables.chunks, tables.samples, tables.positions))


def conv_inputs(dtype: torch.dtype, width: int) -> list[Tensor]:
    return drawn((sum(LENGTHS), 70), (70, width), (70,), dtype=dtype, seed=1)


@pytest.mark.parametrize(("width", "silu", "bias"), [(4, True, False), (3, False, True), (4, True, True)])
def test_the_convolution_is_that_of_transformers_sample_by_sample(width: int, silu: bool, bias: bool) -> None:
    x, weight, b = conv_inputs(torch.float32, width)
    positions = lay_out_tables(LENGTHS, 64, DEVICE).positions
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
    positions = lay_out_tables(LENGTHS, 64, DEVICE).positions
    spoilt = x.clone()
    for other in OTHERS:
        cut(spoilt, other).fill_(torch.nan)
    own = cut(x, MINE).clone().requires_grad_()
    alone = causal_convolution(own, weight, None, lay_out_tables(LENGTHS[MINE : MINE + 1], 64, DEVICE).positions, True)
    [alone_grad] = torch.autograd.grad(alone.sum(), [own])
    for packed in (x, spoilt):
        packed.requires_grad_()
        out = causal_convolution(packed, weight, None, positions, True)
        [grad] = torch.autograd.grad(out.sum(), [packed])
        assert torch.equal(cut(out, MINE), alone) and torch.equal(cut(grad, MINE), alone_grad)
