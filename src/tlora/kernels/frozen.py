"""The base's frozen weights as operations see them: looked up by name when they are read, in forward and again in backward.

No operation takes or keeps a base weight: the lookup decides where weights are stored and when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tlora.registry import BASE_PRECISIONS


class FrozenWeight(Protocol):
    """A linear's weight [N, K] in one of its forms: plain (`PlainWeight`), in fp8 (`fp8_weight.py`) or packed (`packed_weight.py`).

    A form is a frozen dataclass, whose fields of the names in `tensors` are what it holds.
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What is held, by the names of its fields. The matrix cut by rows, each of them is cut so too where it divides by N."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of `operand`."""
        ...

    def operand(self) -> Tensor:
        """[N, K], contiguous, as the GEMM kernels read it. Times `row_scale_N`, where there is one, it is the weight."""
        ...

    @property
    def row_scale_N(self) -> Tensor | None:  # noqa: N802
        """fp32 [N], where the GEMM multiplies by the scales of rows."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """What a product over it needs beyond what is held."""
        ...

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] that it stands for, in `dtype`."""
        ...


class WeightForm(Protocol):
    """How the linears of a base are held: a module, which `registry.BASE_PRECISIONS` names (`fp8_weight.py`, `nf4.py`)."""

    CARD: str
    """What an adapter's card says of the form: "It was trained over the base with its linear layers in ..."."""

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ConfigError where a base of `dtype` cannot be held so on `device`."""
        ...

    def check_widths(self, name: str, in_features: int, out_features: int, by_rows: bool) -> None:
        """Raises ModelError where the linear `name` cannot be held so. `by_rows`: in a base that is cut by rows, shared or streamed."""
        ...

    def quantize(self, weight_NK: Tensor, value_dtype: torch.dtype) -> FrozenWeight:
        """On the device of `weight_NK`; on the meta device shapes alone. `value_dtype`: what its values are rounded to."""
        ...


def form_of(precision: str) -> WeightForm:
    """The form that `base_precision: <precision>` names."""
    return cast("WeightForm", import_module(BASE_PRECISIONS[precision]))


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A weight as it is."""

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {"weight": self.weight}

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def operand(self) -> Tensor:
        return self.weight

    @property
    def row_scale_N(self) -> None:  # noqa: N802
        return None

    @property
    def scratch_bytes(self) -> int:
        return 0

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.weight


@dataclass(frozen=True, slots=True)
class FrozenLinear:
    """A weight [N, K], and `bias_N` [N] or none."""

    weight: FrozenWeight
    bias_N: Tensor | None = None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] that the weight stands for."""
        return self.weight.dense(dtype)


def held_bytes(weight: FrozenWeight) -> int:
    """Of all that a weight holds."""
    return sum(tensor.numel() * tensor.element_size() for tensor in weight.tensors.values())


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
