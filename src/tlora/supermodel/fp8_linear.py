"""A base whose frozen linears are held in fp8 (`base_precision: fp8`): which devices can, and the change at load.

Embedding, head and norms keep the base's dtype. The products are `kernels/fused_linear.py`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tlora.errors import ConfigError, ModelError
from tlora.kernels.device import capability_of, class_of, name_of
from tlora.kernels.frozen import FrozenLinear

DTYPE = torch.float8_e4m3fn


def check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError where a base of `dtype` cannot run in fp8 on `device`."""
    if device.type != "cuda":
        has = f"this run's device is {device}"
    elif (card := class_of(capability_of(device))) is None or not card.fp8:
        has = f"{name_of(device)} has {capability_of(device) / 10}"
    elif dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(f"base_precision fp8 needs a base in 16 bits, and this one is {str(dtype)[6:]}. Set dtype: bfloat16")
    else:
        return
    rule = "base_precision fp8 needs a GPU of compute capability 8.9 or above that the kernels are made for"
    raise ConfigError(f"{rule}, and {has}. Take base_precision out")


def has_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `check_fp8` would let a base of `dtype` pass."""
    try:
        check_fp8(device, dtype)
    except ConfigError:
        return False
    return True


def check_widths(name: str, in_features: int, out_features: int) -> None:
    """Raises ModelError for a linear of widths that the kernels do not take in fp8."""
    if in_features % 16 or out_features % 16:
        raise ModelError(
            f"base_precision fp8 needs widths that are multiples of 16, and {name} has {in_features} to {out_features}. Take it out"
        )


class Fp8Linear(nn.Module):
    """A frozen linear with an e4m3 weight [N, K] and an fp32 scale per row. By itself slow: it makes the weight anew each time."""

    def __init__(self, weight: Tensor, scale_N: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.scale_N: Tensor
        self.register_buffer("scale_N", scale_N, persistent=False)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, FrozenLinear(self.weight, None, self.scale_N).dense(x.dtype), self.bias)


@torch.no_grad()
def hold_in_fp8(model: nn.Module, names: list[str], device: torch.device) -> None:
    """Replace the linears `names` of `model` by fp8 ones on `device`, one after another: never two copies of all.

    On the meta device shapes alone are made. Raises ModelError for widths that the kernels do not take.
    """
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), f"{name} is {type(linear).__name__}"
        num_rows, inner = linear.weight.shape
        check_widths(name, inner, num_rows)
        if device.type == "meta":
            weight, scale_N = torch.empty(num_rows, inner, dtype=DTYPE, device=device), torch.empty(num_rows, device=device)
        else:
            from tlora.kernels.fp8 import quantize_rows  # brings triton, which not every CPU install has

            weight, scale_N = quantize_rows([linear.weight.to(device)])
        parent, _, child = name.rpartition(".")
        bias = None if linear.bias is None else linear.bias.detach().to(device)
        setattr(model.get_submodule(parent), child, Fp8Linear(weight, scale_N, bias))
