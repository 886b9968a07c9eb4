"""A base whose frozen linears are held in fewer bits (`base_precision`): the change at load, in any form.

Embedding, head and norms keep the base's dtype. The forms are in `kernels/`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from tlora.errors import ConfigError, ModelError
from tlora.job import BasePrecision
from tlora.kernels.frozen import FrozenLinear, FrozenWeight, form_of, frozen_linear
from tlora.kernels.packed_weight import rounded_to, without_numbers
from tlora.registry import BASE_PRECISIONS


def check_precision(precision: BasePrecision | None, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError where a base of `dtype` cannot be held in `precision` on `device`."""
    if precision is not None:
        form_of(precision).check(device, dtype)


def precisions_on(device: torch.device, dtype: torch.dtype) -> list[BasePrecision]:
    """Those that `check_precision` lets a base of `dtype` have on `device`."""
    precisions: list[BasePrecision] = []
    for precision in BASE_PRECISIONS:
        try:
            check_precision(precision, device, dtype)
        except ConfigError:
            continue
        precisions.append(precision)
    return precisions


def check_rows(name: str, in_features: int, group: int) -> None:
    """Raises ModelError for a packed linear whose rows are no whole groups: a base that is shared or streamed is cut by rows."""
    if in_features % group:
        raise ModelError(
            f"a packed base in parts or streamed needs input widths that are multiples of its groups of {group}, and {name} has "
            f"{in_features}. Use GPUs that hold the whole base"
        )


def quantized(weight_NK: Tensor, precision: BasePrecision, value_dtype: torch.dtype) -> FrozenWeight:
    """`weight_NK` held in `precision`, on its device. `value_dtype`: of the checkpoint (`packed_weight.rounded_to`)."""
    return form_of(precision).quantize(weight_NK, rounded_to(value_dtype, weight_NK.dtype))


class HeldLinear(nn.Module):
    """A frozen linear whose weight is in any form: a parameter for each tensor that the form holds."""

    def __init__(self, weight: FrozenWeight, bias: Tensor | None) -> None:
        super().__init__()
        held = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in weight.tensors.items()}
        for name, parameter in held.items():
            self.register_parameter(name, parameter)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._frozen = FrozenLinear(replace(weight, **held), self.bias)  # type: ignore[type-var]
        self.out_features, self.in_features = weight.shape

    @property
    def form(self) -> FrozenWeight:
        """The weight: of one that is held here, itself."""
        return self._frozen.weight

    def look_up(self) -> FrozenLinear:
        """The linear as it lies now."""
        return self._frozen

    def forward(self, x: Tensor) -> Tensor:
        return frozen_linear(x, self.look_up)


@torch.no_grad()
def hold(
    model: nn.Module, names: list[str], device: torch.device, precision: BasePrecision, value_dtype: torch.dtype | None = None
) -> None:
    """Replace the linears `names` of `model` by those that are held in `precision` on `device`, one after another: never two copies of all.

    `value_dtype` as in `quantized`; by default the dtype that the model has. On the meta device shapes alone are made. Raises ModelError
    for widths that the form cannot have.
    """
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), f"{name} is {type(linear).__name__}"
        form_of(precision).check_widths(name, linear.in_features, linear.out_features, by_rows=False)
        weight = quantized(linear.weight.detach().to(device), precision, value_dtype or linear.weight.dtype)
        parent, _, child = name.rpartition(".")
        bias = None if linear.bias is None else linear.bias.detach().to(device)
        setattr(model.get_submodule(parent), child, HeldLinear(weight, bias))


def hold_packed(model: nn.Module, names: list[str], group: int | None, value_dtype: torch.dtype, has_zero: bool) -> None:
    """On the meta device: the same for linears that a checkpoint holds packed in 4 bits, a scale, and a zero point if `has_zero`, for
    `group` numbers or for a row.
    """
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear) and linear.weight.is_meta, f"{name} is {type(linear).__name__}"
        shape = linear.out_features, linear.in_features
        weight = without_numbers(shape, group or shape[1], (), value_dtype, linear.weight.dtype, has_zero)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, HeldLinear(weight, None if linear.bias is None else linear.bias.detach()))
