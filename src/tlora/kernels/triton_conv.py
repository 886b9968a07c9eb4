"""A causal depthwise convolution over packed samples, with frozen weights: forward, and the gradient of its input.

Each token reads the taps in its own sample alone, by its place in it. The order of a sum is that of the taps, wherever the token lies.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_TOKENS, _CHANNELS = 32, 64  # of a program


@triton.jit
def _before_activation(x_ptr, w_ptr, b_ptr, t, c, position, T, C, W: tl.constexpr, BIAS: tl.constexpr):
    """fp32 [tokens, channels] at tokens t, whose places in their samples are `position`."""
    z = tl.zeros((t.shape[0], c.shape[0]), tl.float32)
    inside = c < C
    for tap in tl.static_range(W):
        back = W - 1 - tap
        mask = ((t < T) & (position >= back))[:, None] & inside[None, :]
        x = tl.load(x_ptr + (t - back).to(tl.int64)[:, None] * C + c[None, :], mask=mask, other=0.0)
        z += x.to(tl.float32) * tl.load(w_ptr + c * W + tap, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        z += tl.load(b_ptr + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit(do_not_specialize=["T"])
def convolve_kernel(x_ptr, w_ptr, b_ptr, position_ptr, y_ptr, T, C, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
                    BIAS: tl.constexpr, SILU: tl.constexpr):  # fmt: skip
    """y [T, C] of x [T, C], weight [C, W] and bias [C]. Grid (T / BT, C / BC)."""
    t, c = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * BC + tl.arange(0, BC)
    position = tl.load(position_ptr + t, mask=t < T, other=0)
    z = _before_activation(x_ptr, w_ptr, b_ptr, t, c, position, T, C, W, BIAS)
    if SILU:
        z = z * tl.sigmoid(z)
    tl.store(y_ptr + t.to(tl.int64)[:, None] * C + c[None, :], z.to(y_ptr.dtype.element_ty), mask=(t < T)[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=["T"])
def convolve_back_kernel(dy_ptr, x_ptr, w_ptr, b_ptr, position_ptr, dx_ptr, T, C, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
                         BIAS: tl.constexpr, SILU: tl.constexpr):  # fmt: skip
    """dx [T, C]: of each token that reads t, in its own sample, the gradient before the activation, which is computed again."""
    t, c = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    dx = tl.zeros((BT, BC), tl.float32)
    for ahead in tl.static_range(W):
        reader = t + ahead
        position = tl.load(position_ptr + reader, mask=reader < T, other=0)
        reads = (reader < T) & (position >= ahead)
        mask = reads[:, None] & inside[None, :]
        dz = tl.load(dy_ptr + reader.to(tl.int64)[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if SILU:
            z = _before_activation(x_ptr, w_ptr, b_ptr, reader, c, position, T, C, W, BIAS)
            gate = tl.sigmoid(z)
            dz = dz * (gate * (1 + z * (1 - gate)))
        w = tl.load(w_ptr + c * W + (W - 1 - ahead), mask=inside, other=0.0).to(tl.float32)
        dx += tl.where(mask, dz * w[None, :], 0.0)  # NaN of another sample is selected away, not multiplied by 0
    tl.store(dx_ptr + t.to(tl.int64)[:, None] * C + c[None, :], dx.to(dx_ptr.dtype.element_ty), mask=(t < T)[:, None] & inside[None, :])


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
