"""A frozen weight held in fp8: e4m3 numbers with one fp32 scale per row. Products over it are `fp8.py`'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn


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


def quantize(weight_NK: Tensor) -> Fp8Weight:
    """`weight_NK` in fp8, on its device; of the meta device shapes alone."""
    if weight_NK.is_meta:
        rows = len(weight_NK)
        return Fp8Weight(torch.empty_like(weight_NK, dtype=DTYPE), torch.empty(rows, dtype=torch.float32, device=weight_NK.device))
    from tlora.kernels.fp8 import quantize_rows  # brings triton, which not every CPU install has

    return Fp8Weight(*quantize_rows([weight_NK.contiguous()]))
