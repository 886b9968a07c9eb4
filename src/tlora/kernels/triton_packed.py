"""Unpacks a weight of 4 bits (`packed_weight.py`) into the matrix that a GEMM reads, as a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dequantize_kernel(weight_ptr, scale_ptr, zero_ptr, table_ptr, out_ptr, count, GROUP: tl.constexpr, VALUE: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    """out[i] = (table[nibble i] - zero[i // GROUP]) * scale[i // GROUP] in fp32, rounded to VALUE; without the difference where `zero_ptr`
    is None. Grid (blocks of so many bytes,).

    A number is a function of its nibble, its scale and its zero point alone, with one rounding, so it has the bits of
    `packed_weight.dequantize_in_torch`.
    """
    first = tl.program_id(0) * BLOCK
    place = first + tl.arange(0, BLOCK)
    inside = 2 * place < count
    byte = tl.load(weight_ptr + place, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + place // (GROUP // 2), mask=inside, other=0.0)
    high, low = tl.load(table_ptr + (byte >> 4)), tl.load(table_ptr + (byte & 15))
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + place // (GROUP // 2), mask=inside, other=0).to(tl.float32)
        high, low = high - zero, low - zero
    high, low = high * scale, low * scale
    i = 2 * first + tl.arange(0, 2 * BLOCK)
    tl.store(out_ptr + i, tl.interleave(high, low).to(VALUE).to(out_ptr.dtype.element_ty), mask=i < count)
