"""NF4 against bitsandbytes: nibbles, scales and values bit for bit, for whole groups, groups across rows and a short last one."""

from __future__ import annotations

from dataclasses import replace

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor

from tests.bitsandbytes_values import bitsandbytes_values
from tlora.kernels import nf4
from tlora.kernels.frozen import held_bytes
from tlora.kernels.packed_weight import PackedWeight, dequantize_in_torch, pack

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(48, 128), (16, 64), (5, 96), (3, 16)]  # rows of whole groups; of one; groups across rows; a short group


def weight_of(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of very different sizes, one of zeros, one with numbers on both sides of each midpoint."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=draw) * torch.logspace(-3, 2, shape[0])[:, None]
    table = torch.tensor(nf4.TABLE)
    near = ((table[:-1] + table[1:]) / 2)[None, :] * torch.tensor([[1.0], [1 + 2**-7], [1 - 2**-7]])
    weight[0], weight[1] = 0, torch.cat([near.flatten(), torch.ones(1)]).repeat(4)[: shape[1]]
    return weight.to(dtype)


def theirs(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nibbles and scales of bitsandbytes, and the values in fp32."""
    nibbles, state = bnb.quantize_4bit(weight, blocksize=nf4.GROUP, quant_type="nf4")
    return nibbles.flatten(), state.absmax, bitsandbytes_values(nibbles, state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nibbles_scales_and_values_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = weight_of(shape, dtype)
    nibbles, absmax, values = theirs(weight)
    found = nf4.quantize(weight, dtype)
    assert torch.equal(found.weight, nibbles) and torch.equal(found.scale, absmax)
    assert torch.equal(found.dense(dtype), values.to(dtype)) and found.operand().dtype == dtype
    assert held_bytes(found) == -(-weight.numel() // 2) + 4 * -(-weight.numel() // 64)


def test_values_are_rounded_to_the_checkpoints_dtype_whatever_computes() -> None:
    """A base in 16 bits that a CPU computes in fp32 stands for the same numbers."""
    weight = weight_of((48, 128), torch.bfloat16)
    narrow, wide = nf4.quantize(weight, torch.bfloat16), nf4.quantize(weight.float(), torch.bfloat16)
    assert torch.equal(narrow.dense(torch.bfloat16).float(), wide.operand()) and wide.operand().dtype == torch.float32
    unrounded = nf4.quantize(weight.float(), torch.float32).operand()
    assert not torch.equal(unrounded, wide.operand()) and torch.equal(unrounded.bfloat16().float(), wide.operand())


def test_many_chunks_are_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of((37, 48), torch.float32)
    whole = nf4.quantize(weight, torch.float32)
    values = whole.operand()
    monkeypatch.setattr(nf4, "_AT_ONCE", 3)
    monkeypatch.setattr("tlora.kernels.packed_weight._AT_ONCE", 100)
    found = nf4.quantize(weight, torch.float32)
    assert torch.equal(found.weight, whole.weight) and torch.equal(found.scale, whole.scale)
    assert torch.equal(found.operand(), values)


def test_nan_and_inf_stay_within_their_group_and_do_not_become_finite() -> None:
    weight = torch.ones(2, 128)
    weight[0, 3], weight[1, 70] = torch.nan, torch.inf
    found = nf4.quantize(weight, torch.float32).operand()
    assert not bool(found[0, :64].isfinite().any()) and not bool(found[1, 70].isfinite())
    assert bool((found[0, 64:] == 1).all()) and bool((found[1, :64] == 1).all())


def test_the_formula_for_any_table_and_group() -> None:
    """number i = (table[nibble i] - zero[i // group]) * scale[i // group]; the earlier number is the high nibble."""
    draw = torch.Generator().manual_seed(0)
    codes, scale = torch.randint(0, 16, (6 * 50,), generator=draw), torch.randn(10, generator=draw)
    table = tuple(torch.randn(16, generator=draw).tolist())
    packed = PackedWeight(pack(codes), scale, table, (6, 50), 32, torch.float32, torch.float32)
    true = torch.tensor(table)[codes] * scale.repeat_interleave(32)[:300]
    assert torch.equal(dequantize_in_torch(packed, torch.float32), true.view(6, 50))
    zero = torch.randint(0, 16, scale.shape, generator=draw, dtype=torch.uint8)
    true = (torch.tensor(table)[codes] - zero.repeat_interleave(32)[:300]) * scale.repeat_interleave(32)[:300]
    assert torch.equal(dequantize_in_torch(replace(packed, zero=zero), torch.float32), true.view(6, 50))
    assert held_bytes(replace(packed, zero=zero)) == held_bytes(packed) + 10
    assert int(packed.weight[0]) == int(codes[0]) * 16 + int(codes[1])
