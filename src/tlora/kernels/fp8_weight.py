"""A frozen weight held in fp8: e4m3 numbers with one fp32 scale per row. Products over it are `fp8.py`'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora.errors import ConfigError, ModelError
from tlora.kernels.device import capability_of, class_of, name_of

DTYPE = torch.float8_e4m3fn
CARD = "fp8 (e4m3, a scale for each output)."


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """`weight` [N, K] in e4m3 and `scale_N` fp32 [N]; their product is the matrix."""

    weight: Tensor
    scale_N: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {"weight": self.weight, "scale_N": self.scale_N}

    @property
    def dtype(self) -> torch.dtype:
        return DTYPE

    def operand(self) -> Tensor:
        return self.weight

    @property
    def row_scale_N(self) -> Tensor:  # noqa: N802
        return self.scale_N

    @property
    def scratch_bytes(self) -> int:
        """The transposed weight of a backward."""
        return self.weight.numel()

    def dense(self, dtype: torch.dtype) -> Tensor:
        return (self.weight.float() * self.scale_N[:, None]).to(dtype)


def check(device: torch.device, dtype: torch.dtype) -> None:
    """As `frozen.WeightForm.check`: products in 8 bits take a GPU that has them."""
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


def check_widths(name: str, in_features: int, out_features: int, by_rows: bool) -> None:
    """As `frozen.WeightForm.check_widths`."""
    if in_features % 16 or out_features % 16:
        raise ModelError(
            f"base_precision fp8 needs widths that are multiples of 16, and {name} has {in_features} to {out_features}. Take it out"
        )


def quantize(weight_NK: Tensor, value_dtype: torch.dtype) -> Fp8Weight:
    """`weight_NK` in fp8, on its device; of the meta device shapes alone. `value_dtype` changes nothing: numbers are rounded to fp8."""
    if weight_NK.is_meta:
        rows = len(weight_NK)
        return Fp8Weight(torch.empty_like(weight_NK, dtype=DTYPE), torch.empty(rows, dtype=torch.float32, device=weight_NK.device))
    from tlora.kernels.fp8 import quantize_rows  # brings triton, which not every CPU install has

    return Fp8Weight(*quantize_rows([weight_NK.contiguous()]))
