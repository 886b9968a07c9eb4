"""The base's frozen weights as operations see them: looked up by name when they are read, in forward and again in backward.

No operation takes or keeps a base weight: the lookup decides where weights are stored and when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True)
class FrozenLinear:
    """`weight_NK` [N, K]; `bias_N` [N] or none; `scale_N` fp32 [N], one for each row, where the weight is held in fp8."""

    weight_NK: Tensor
    bias_N: Tensor | None = None
    scale_N: Tensor | None = None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] that it stands for: itself, or made anew from fp8 in `dtype`."""
        return self.weight_NK if self.scale_N is None else (self.weight_NK.float() * self.scale_N[:, None]).to(dtype)


BaseWeights = Callable[[str], FrozenLinear]
"""The linear of a dotted name, as it lies now. Good until the next call."""


def frozen_linear(x: Tensor, base: Callable[[], FrozenLinear]) -> Tensor:
    """x [..., K] @ weight.T + bias, as `torch.nn.functional.linear`; the gradient of x alone."""
    return _FrozenLinear.apply(x, base)  # type: ignore[no-any-return]


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Callable[[], FrozenLinear]) -> Tensor:
        ctx.base = base
        linear = base()
        return torch.nn.functional.linear(x, linear.dense(x.dtype), linear.bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dy @ ctx.base().dense(dy.dtype), None
