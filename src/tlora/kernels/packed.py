"""Unpacks a weight of 4 bits (`packed_weight.py`) into the matrix that a GEMM reads: the Triton kernel and its launches."""

# Triton's own annotations say nothing of launch options:
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from tlora.kernels.packed_weight import PackedWeight


_BYTES = 1024  # of a program: each of its threads loads 8 and stores 32
_VALUES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def dequantize(packed: PackedWeight, table: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype`. The allocator gives its memory to the next one of its size: one scratch serves all layers, in a CUDA graph too."""
    out = torch.empty(packed.shape, dtype=dtype, device=packed.weight.device)
    launch_dequantize(packed, table, out)
    return out


def launch_dequantize(packed: PackedWeight, table: Tensor, out: Tensor) -> None:
    """The same into a contiguous `out` [N, K]."""
    count = out.numel()
    value = _VALUES[packed.value_dtype]
    dequantize_kernel[(triton.cdiv(len(packed.weight), _BYTES),)](
        packed.weight, packed.scale, packed.zero, table, out, count, GROUP=packed.group, VALUE=value, BLOCK=_BYTES, num_warps=4
    )


@triton.jit
def dequantize_kernel(weight_ptr, scale_ptr, zero_ptr, table_ptr, out_ptr, count, GROUP: tl.constexpr, VALUE: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    """out[i] = (table[nibble i] - zero[i // GROUP]) * scale[i // GROUP] in fp32, rounded to VALUE; without the difference where `zero_ptr`
    is None. Grid (blocks of so many bytes,).

    A number is a function of its nibble, its scale and its zero point alone, with one rounding, so it has the bits of
    `packed_weight.dequantize_in_torch`.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK  # 64 bits for the block's place, 32 within it
    left = tl.minimum(count - 2 * first, 2 * BLOCK).to(tl.int32)
    place = tl.arange(0, BLOCK)
    inside = 2 * place < left
    group = ((first % (GROUP // 2)).to(tl.int32) + place) // (GROUP // 2)
    byte = tl.load(weight_ptr + first + place, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + first // (GROUP // 2) + group, mask=inside, other=0.0)
    high, low = tl.load(table_ptr + (byte >> 4)), tl.load(table_ptr + (byte & 15))
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + first // (GROUP // 2) + group, mask=inside, other=0).to(tl.float32)
        high, low = high - zero, low - zero
    high, low = high * scale, low * scale
    i = tl.arange(0, 2 * BLOCK)
    tl.store(out_ptr + 2 * first + i, tl.interleave(high, low).to(VALUE).to(out_ptr.dtype.element_ty), mask=i < left)
