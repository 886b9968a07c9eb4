"""What a token's experts gave, put together: the k slots in their order, forward and backward. Each token is one program's: no atomics."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_slots_kernel(y_ptr, weights_ptr, inverse_ptr, out_ptr, H, SLOTS: tl.constexpr, WIDE: tl.constexpr, BH: tl.constexpr):
    """out [T, H] = sum over slots of weight * y, each product rounded to WIDE, added up in fp32; without weights of y. Grid (T, H / BH)."""
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH + tl.arange(0, BH)
    total = tl.zeros((BH,), tl.float32)
    for slot in tl.static_range(SLOTS):
        row = tl.load(inverse_ptr + token * SLOTS + slot)
        y = tl.load(y_ptr + row * H + h, mask=h < H, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            y = (y * tl.load(weights_ptr + token * SLOTS + slot).to(tl.float32)).to(WIDE).to(tl.float32)
        total += y
    tl.store(out_ptr + token * H + h, total.to(out_ptr.dtype.element_ty), mask=h < H)


@triton.jit
def spread_slots_kernel(dout_ptr, y_ptr, weights_ptr, inverse_ptr, dy_ptr, dweights_ptr, H, SLOTS: tl.constexpr, BH: tl.constexpr):
    """dy [S, H] = weight * dout of the row's token; dweights [T, k] = dout . y, in fp32. Grid (T,); BH is the power of two from H on."""
    token, h = tl.program_id(0).to(tl.int64), tl.arange(0, BH)
    dout = tl.load(dout_ptr + token * H + h, mask=h < H, other=0.0).to(tl.float32)
    for slot in tl.static_range(SLOTS):
        place = token * SLOTS + slot
        row = tl.load(inverse_ptr + place)
        dy = dout * tl.load(weights_ptr + place).to(tl.float32)
        tl.store(dy_ptr + row * H + h, dy.to(dy_ptr.dtype.element_ty), mask=h < H)
        if dweights_ptr is not None:
            y = tl.load(y_ptr + row * H + h, mask=h < H, other=0.0).to(tl.float32)
            tl.store(dweights_ptr + place, tl.sum(dout * y, 0).to(dweights_ptr.dtype.element_ty))
