"""The tensors of one weight that compressed-tensors has packed in 4 bits: int4 with a scale for each group or row, NVFP4, MXFP4.

int4 (`pack-quantized`): `X.weight_packed` has 8 numbers plus 8 in an int32, the lowest bits first, `X.weight_scale` [N, K / group], and
`X.weight_shape`; without symmetry also `X.weight_zero_point` [N / 8, K / group], whose int32 have the zero points plus 8 of 8 rows. NVFP4
(`nvfp4-pack-quantized`): two e2m1 codes in a byte, the low nibble first, scales of 16 numbers in fp8, and `X.weight_global_scale`, by
which they are divided in fp32. MXFP4 (`mxfp4-pack-quantized`) has these codes too, and scales of 32 numbers that are powers of 2, of which
the exponent plus 127 is held (E8M0 of the OCP's specification of microscaling). The library multiplies int4 in the scales' dtype; a
product of 5 and 8 or 11 bits is exact in fp32, so that one rounding of the fp32 product gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora.kernels.packed_weight import unpack_low_first
from tlora.supermodel.packed_format import PackedTensor
from tlora.supermodel.tensor_files import StoredTensor

INT4, NVFP4, MXFP4 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_E2M1 = tuple(sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
_ENDS = {INT4: ("_packed", "_scale", "_shape"), NVFP4: ("_packed", "_scale", "_global_scale"), MXFP4: ("_packed", "_scale")}
_SCALES = {INT4: (torch.bfloat16, torch.float16, torch.float32), NVFP4: (torch.float8_e4m3fn,), MXFP4: (torch.uint8,)}


@dataclass(frozen=True)
class Scheme:
    """A library's format, numbers of a scale (None for a row), and whether there are zero points."""

    layout: str
    group: int | None
    has_zero: bool


def find_weight(key: str, scheme: Scheme, stored: Mapping[str, StoredTensor]) -> PackedTensor:
    """Raises KeyError for what is missing, ValueError for what does not fit together."""
    ends = (*_ENDS[scheme.layout], *(["_zero_point"] if scheme.has_zero else []))
    tensors = {end: stored[key + end] for end in ends}
    for end in {"_zero_point", "_g_idx"} - {*ends}:
        if key + end in stored:
            raise ValueError(f"it has {key}{end}, and by config.json it has none")
    codes, scales = tensors["_packed"], tensors["_scale"]
    if len(codes.shape) != 2:
        raise ValueError(f"{codes.name} is {list(codes.shape)}, and no matrix")
    is_int4 = scheme.layout == INT4
    shape = tuple(tensors["_shape"].whole().tolist()) if is_int4 else (codes.shape[0], 2 * codes.shape[1])
    if len(shape) != 2 or min(shape) < 1 or shape[1] % 2:
        raise ValueError(f"the shape {list(shape)} is no matrix with an even number of columns")
    group = scheme.group or shape[1]
    dtype, width = (torch.int32, -(-shape[1] // 8)) if is_int4 else (torch.uint8, shape[1] // 2)
    if codes.dtype != dtype or codes.shape != (shape[0], width):
        raise ValueError(f"{list(codes.shape)} in {codes.dtype} is not half a byte for each of {list(shape)}")
    if shape[1] % group or group % 2 or scales.shape != (shape[0], shape[1] // group) or scales.dtype not in _SCALES[scheme.layout]:
        raise ValueError(f"scales {list(scales.shape)} in {scales.dtype} for {list(shape)} in groups of {group}")
    if scheme.layout == NVFP4 and (tensors["_global_scale"].shape != (1,) or tensors["_global_scale"].dtype != torch.float32):
        raise ValueError(f"{tensors['_global_scale'].name} is not one number in fp32")
    if scheme.has_zero:
        zeros, wanted = tensors["_zero_point"], (-(-shape[0] // 8), scales.shape[1])
        if zeros.shape != wanted or zeros.dtype != torch.int32:
            raise ValueError(f"zero points {list(zeros.shape)} in {zeros.dtype} for {list(scales.shape)} scales")
    parts = _Parts(scheme, shape, tensors)
    names = frozenset(tensor.name for tensor in tensors.values())
    return PackedTensor(shape, parts.value_dtype, names, group, parts.table, scheme.has_zero, parts.read)


@dataclass(frozen=True)
class _Parts:
    """The tensors of one weight [N, K], by the end of their names."""

    scheme: Scheme
    shape: tuple[int, int]
    tensors: Mapping[str, StoredTensor]

    @property
    def value_dtype(self) -> torch.dtype:
        """That the library dequantises to."""
        return self.tensors["_scale"].dtype if self.scheme.layout == INT4 else torch.bfloat16

    def read(self) -> dict[str, Tensor]:
        """What a `PackedWeight` holds."""
        codes = self.tensors["_packed"].whole().view(torch.uint8)[:, : self.shape[1] // 2]
        tensors = {"weight": ((codes << 4) | (codes >> 4)).flatten(), "scale": self._scales()}
        return tensors | ({"zero": self._zero_points()} if self.scheme.has_zero else {})

    @property
    def table(self) -> tuple[float, ...]:
        middle = 0 if self.scheme.has_zero else 8  # zero points count from the lowest code
        return tuple(float(code - middle) for code in range(16)) if self.scheme.layout == INT4 else _E2M1

    def _scales(self) -> Tensor:
        scales = self.tensors["_scale"].whole().flatten()
        if self.scheme.layout == MXFP4:  # the exponent's bits of fp32, of which 0 means a number below the normal ones
            return torch.where(scales == 0, 1 << 22, scales.int() << 23).view(torch.float32)
        scales = scales.float()
        return scales / self.tensors["_global_scale"].whole() if self.scheme.layout == NVFP4 else scales

    def _zero_points(self) -> Tensor:
        by_group = unpack_low_first(self.tensors["_zero_point"].whole().T)
        return by_group[:, : self.shape[0]].T.flatten()
