"""A causal depthwise convolution over packed samples, with frozen weights: forward, and the gradient of its input.

Each token reads the taps in its own sample alone, by its place in it. The order of a sum is that of the taps, wherever the token lies.
A program goes along its tokens, and has in registers what the next ones read of the last W - 1.
"""

# pyright: reportGeneralTypeIssues=false
# ruff: noqa: RUF005
# (Triton's language has no starred items)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_TOKENS, _CHANNELS = 16, 512  # of a program


@triton.jit
def _load_row(ptr, t, T, c, C):
    """fp32 [channels] of token t; 0 where there is none."""
    return tl.load(ptr + t.to(tl.int64) * C + c, mask=(c < C) & (t >= 0) & (t < T), other=0.0).to(tl.float32)


@triton.jit
def _load_taps(w_ptr, c, C, W: tl.constexpr):
    """A tuple of W fp32 [channels]."""
    taps = ()
    for tap in tl.static_range(W):
        taps = taps + (tl.load(w_ptr + c * W + tap, mask=c < C, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _rows_before(x_ptr, t, T, c, C, W: tl.constexpr):
    """x of the W - 1 tokens before t, of whatever samples."""
    rows = ()
    for back in tl.static_range(W - 1):
        rows = rows + (_load_row(x_ptr, t - (W - 1) + back, T, c, C),)
    return rows


@triton.jit
def _before_activation(rows, taps, bias, position, W: tl.constexpr, BIAS: tl.constexpr):
    """fp32 [channels] at a token that has `position` in its sample, of x there and in the W - 1 `rows` before."""
    z = tl.zeros_like(taps[0])
    for tap in tl.static_range(W):
        z += tl.where(position >= W - 1 - tap, rows[tap], 0.0) * taps[tap]
    if BIAS:
        z += bias
    return z


@triton.jit(do_not_specialize=["T"])
def convolve_kernel(x_ptr, w_ptr, b_ptr, position_ptr, y_ptr, T, C, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
                    BIAS: tl.constexpr, SILU: tl.constexpr):  # fmt: skip
    """y [T, C] of x [T, C], weight [C, W] and bias [C]. Grid (T / BT, C / BC). Token after token: x is read once."""
    first, c = tl.program_id(0) * BT, tl.program_id(1) * BC + tl.arange(0, BC)
    taps, bias = _load_taps(w_ptr, c, C, W), 0.0
    if BIAS:
        bias = tl.load(b_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    rows = _rows_before(x_ptr, first, T, c, C, W)
    for step in tl.static_range(BT):
        t = first + step
        rows = rows + (_load_row(x_ptr, t, T, c, C),)
        z = _before_activation(rows, taps, bias, tl.load(position_ptr + t, mask=t < T, other=0), W, BIAS)
        if SILU:
            z = z * tl.sigmoid(z)
        tl.store(y_ptr + t.to(tl.int64) * C + c, z.to(y_ptr.dtype.element_ty), mask=(c < C) & (t < T))
        rows = rows[1:]


@triton.jit(do_not_specialize=["T"])
def convolve_back_kernel(dy_ptr, x_ptr, w_ptr, b_ptr, position_ptr, dx_ptr, T, C, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
                         BIAS: tl.constexpr, SILU: tl.constexpr):  # fmt: skip
    """dx [T, C]: of each token that reads t, in its own sample, the gradient before the activation, which is computed again: once for each
    token, and for the W - 1 behind the program's own.
    """
    first, c = tl.program_id(0) * BT, tl.program_id(1) * BC + tl.arange(0, BC)
    taps, bias = _load_taps(w_ptr, c, C, W), 0.0
    if BIAS:
        bias = tl.load(b_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    rows, dzs, positions = _rows_before(x_ptr, first, T, c, C, W), (), ()
    for step in tl.static_range(BT + W - 1):
        reader = first + step
        position = tl.load(position_ptr + reader, mask=reader < T, other=0)
        dz = _load_row(dy_ptr, reader, T, c, C)
        if SILU:
            rows = rows + (_load_row(x_ptr, reader, T, c, C),)
            z = _before_activation(rows, taps, bias, position, W, BIAS)
            gate = tl.sigmoid(z)
            dz = dz * (gate * (1 + z * (1 - gate)))
            rows = rows[1:]
        dzs, positions = dzs + (dz,), positions + (position,)
        if step >= W - 1:
            t, dx = reader - (W - 1), tl.zeros_like(dz)
            for ahead in tl.static_range(W):  # NaN of another sample is selected away, not multiplied by 0
                dx += tl.where(positions[ahead] >= ahead, dzs[ahead] * taps[W - 1 - ahead], 0.0)
            tl.store(dx_ptr + t.to(tl.int64) * C + c, dx.to(dx_ptr.dtype.element_ty), mask=(c < C) & (t < T))
            dzs, positions = dzs[1:], positions[1:]


def convolve(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, positions_T: Tensor, silu: bool) -> Tensor:
    """y [T, C] as `delta_rule.shifted_convolution`. x is in fp32 or 16 bits."""
    x_TC, weight_CW = x_TC.contiguous(), weight_CW.contiguous()
    y_TC = torch.empty_like(x_TC)
    launch: Any = convolve_kernel[_grid(x_TC)]
    launch(x_TC, weight_CW, bias_C, positions_T, y_TC, *x_TC.shape, *_constants(weight_CW, bias_C, silu))
    return y_TC


def convolve_back(dy_TC: Tensor, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, positions_T: Tensor, silu: bool) -> Tensor:
    """The gradient of x, contiguous."""
    x_TC, weight_CW = x_TC.contiguous(), weight_CW.contiguous()
    dx_TC = torch.empty_like(x_TC)
    launch: Any = convolve_back_kernel[_grid(x_TC)]
    launch(dy_TC.contiguous(), x_TC, weight_CW, bias_C, positions_T, dx_TC, *x_TC.shape, *_constants(weight_CW, bias_C, silu))
    return dx_TC


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, positions_T: Tensor, silu: bool) -> Tensor:
        x_TC = x_TC.contiguous()
        ctx.save_for_backward(x_TC, weight_CW, bias_C, positions_T)
        ctx.silu = silu
        return convolve(x_TC, weight_CW, bias_C, positions_T, silu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TC, weight_CW, bias_C, positions_T = ctx.saved_tensors
        return convolve_back(dy_TC, x_TC, weight_CW, bias_C, positions_T, ctx.silu), None, None, None, None


def all_tiles() -> tuple[int, int]:
    """Of all its launches."""
    return _TOKENS, _CHANNELS


def _grid(x_TC: Tensor) -> tuple[int, int]:
    return -(-x_TC.shape[0] // _TOKENS), -(-x_TC.shape[1] // _CHANNELS)


def _constants(weight_CW: Tensor, bias_C: Tensor | None, silu: bool) -> tuple[int | bool, ...]:
    return weight_CW.shape[1], _TOKENS, _CHANNELS, bias_C is not None, silu


def causal_convolution(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, positions_T: Tensor, silu: bool) -> Tensor:
    """As `delta_rule.shifted_convolution`; weight and bias get no gradient. x is in fp32 or 16 bits."""
    return _Convolution.apply(x_TC, weight_CW, bias_C, positions_T, silu)  # type: ignore[no-any-return]
