"""A parameter of a mixture's experts that is no plain tensor: its matrices are made, or looked up, one expert at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from tlora.kernels.frozen import FrozenWeight
from tlora.kernels.packed_weight import PackedWeight


class HeldExperts(nn.Module):
    """In place of a frozen parameter of `shape` [E, A, B], which it is indexed like: by an expert's number, for its matrix [A, B].

    `form`: the rows of all experts as one matrix, [E * A, B], or where each is held `transposed`, [E * B, A]. `look_up`: where that lies
    now, as in a base in parts; by default here, as a parameter for each of its tensors.
    """

    def __init__(
        self, form: FrozenWeight, shape: tuple[int, int, int], transposed: bool, look_up: Callable[[], FrozenWeight] | None = None
    ) -> None:
        super().__init__()
        assert math.prod(form.shape) == math.prod(shape), f"{form.shape} for {shape}"
        for name, tensor in form.tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.form: FrozenWeight = replace(form, **{name: tensor.to("meta") for name, tensor in form.tensors.items()})  # type: ignore[type-var]
        self.shape, self.dtype, self.transposed = shape, form.dtype, transposed
        self._look_up = look_up or self._own

    def _own(self) -> FrozenWeight:
        return replace(self.form, **dict(self.named_parameters()))  # type: ignore[type-var]

    def __getitem__(self, expert: int | Tensor) -> Tensor:
        weight, count = self._look_up(), self.form.shape[0] // self.shape[0]
        first = int(expert) * count
        own = weight.cut(first, first + count) if isinstance(weight, PackedWeight) else weight.dense(self.dtype)[first : first + count]
        matrix = own.dense(self.dtype) if isinstance(own, PackedWeight) else own
        return matrix.t().contiguous() if self.transposed else matrix

    def dense(self) -> Tensor:
        """All matrices, [E, A, B], in the layout of the plain parameter: packed ones are made for as long as what is given is held."""
        experts, rows, columns = self.shape
        matrices = self._look_up().dense(self.dtype)
        return matrices.view(experts, columns, rows).transpose(1, 2).contiguous() if self.transposed else matrices.view(self.shape)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Of a family that multiplies all matrices at once (Llama 4): those of the plain parameter."""
        return func(*[arg.dense() if isinstance(arg, cls) else arg for arg in args], **(kwargs or {}))

    def scratch_bytes(self, at_once: bool) -> int:
        """Of one expert's matrix, or all `at_once`, and of its transpose, where they are made."""
        return (1 + self.transposed) * self.form.scratch_bytes // (1 if at_once else self.shape[0])


def held_experts(model: nn.Module) -> list[HeldExperts]:
    """Those of a model; none of a plain one, and of one without experts."""
    return [module for module in model.modules() if isinstance(module, HeldExperts)]
