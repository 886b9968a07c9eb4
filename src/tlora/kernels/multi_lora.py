"""A frozen linear with any number of adapters, as one differentiable operation.

Weight gradients do not travel through autograd: backward adds them to the adapters' own buffers, rows of one slot each, because
a dense gradient of the whole bank per micro-batch would touch every resident adapter, present or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tlora.kernels.frozen import FrozenLinear
from tlora.kernels.gemm import linear
from tlora.kernels.reference import Segments, check_segments, lora_backward_, lora_forward_


@dataclass(frozen=True)
class LoraWeights:
    """All slots' rows at one linear: `a_RK` [R, K] and `b_RN` [R, N] in the compute dtype, gradient sums in full precision."""

    a_RK: Tensor
    b_RN: Tensor
    da_RK: Tensor
    db_RN: Tensor
    module_key: int = 0


def multi_lora_linear(
    x_TK: Tensor,
    base: Callable[[], FrozenLinear],
    lora: LoraWeights,
    segments: Segments,
    keys_T: Tensor | None = None,
    anchor: Tensor | None = None,
) -> Tensor:
    """y = x @ weight.T + bias of `base`, and for every segment y[t0:t1] += scale * (drop(x[t0:t1]) @ a[r0:r1].T) @ b[r0:r1].

    Shapes: x [T, K], weight [N, K], y [T, N]. `keys_T` int32 [T] are dropout's token keys. `anchor` is any tensor that requires
    a gradient: with it, backward reaches the adapters of a first layer whose x needs none. The base gets no gradient; it is looked up
    again in backward.
    """
    return _MultiLoraLinear.apply(x_TK, base, lora, segments, keys_T, anchor)  # type: ignore[no-any-return]


class _MultiLoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        base: Callable[[], FrozenLinear],
        lora: LoraWeights,
        segments: Segments,
        keys_T: Tensor | None,
        anchor: Tensor | None,
    ) -> Tensor:
        if __debug__:  # torch cuts a slice that leaves its tensor short without a word
            check_segments(segments, x_TK.shape[0], lora.a_RK.shape[0])
        frozen = base()
        y_TN = linear(x_TK, frozen.dense(x_TK.dtype), frozen.bias_N)
        shrunk = lora_forward_(y_TN, x_TK, lora.a_RK, lora.b_RN, segments, keys_T, lora.module_key)
        ctx.save_for_backward(x_TK, *shrunk)
        ctx.base, ctx.lora, ctx.segments, ctx.keys_T = base, lora, segments, keys_T
        return y_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TK, *shrunk = ctx.saved_tensors
        lora: LoraWeights = ctx.lora
        dx_TK = linear(dy_TN, ctx.base().dense(dy_TN.dtype).t()) if ctx.needs_input_grad[0] else None
        lora_backward_(dx_TK, dy_TN, x_TK, shrunk, lora.a_RK, lora.b_RN, lora.da_RK, lora.db_RN, ctx.segments, ctx.keys_T, lora.module_key)
        return dx_TK, None, None, None, None, None
