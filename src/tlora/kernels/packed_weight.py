"""A frozen weight held in 4 bits: packed nibbles, a table of 16 numbers, and one scale for each group of neighbours.

The matrix is flattened row by row and cut into groups of equal length, so that a group may span the border of two rows; the last may be
short. Number i is table[nibble i] * scale[i // group], one fp32 product, rounded once to `value_dtype`. These are the bits of
bitsandbytes' CUDA kernels. With zero points it is (table[nibble i] - zero[i // group]) * scale[i // group], whose difference of whole
numbers is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from tlora.kernels.device import runs_kernels

E2M1 = tuple(sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""The numbers of 4 bits in FP4 formats, by their codes."""
_AT_ONCE = 1 << 20  # bytes of nibbles that torch unpacks at a time: 8 MiB of fp32 besides the result


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """`weight`: uint8 [ceil(N * K / 2)], the earlier number in the high nibble. `scale`: [ceil(N * K / group)] in fp32, or in uint8 as the
    exponents of `powers_of_two`. `table`: 16 numbers that fp32 has. `zero`: uint8, one for each scale, or none.

    `value_dtype`: of the checkpoint that the weight stands for. `dtype`: in which products compute, at least as wide.
    """

    weight: Tensor
    scale: Tensor
    table: tuple[float, ...]
    shape: tuple[int, int]
    group: int
    value_dtype: torch.dtype
    dtype: torch.dtype
    zero: Tensor | None = None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {"weight": self.weight, "scale": self.scale} | ({} if self.zero is None else {"zero": self.zero})

    def rows(self, first: int, last: int) -> dict[str, Tensor]:
        """What is held of rows [first, last), flat, where a row is whole groups."""
        return {name: tensor.view(self.shape[0], -1)[first:last].flatten() for name, tensor in self.tensors.items()}

    def cut(self, first: int, last: int) -> PackedWeight:
        """Rows [first, last), where a row is whole groups; nothing is copied."""
        return replace(self, shape=(last - first, self.shape[1]), **self.rows(first, last))

    def operand(self) -> Tensor:
        return self.dense(self.dtype)

    @property
    def row_scale_N(self) -> None:  # noqa: N802
        return None

    @property
    def scratch_bytes(self) -> int:
        """The matrix that is multiplied."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def dense(self, dtype: torch.dtype) -> Tensor:
        if self.scale.dtype == torch.uint8:
            return replace(self, scale=powers_of_two(self.scale)).dense(dtype)
        device = self.weight.device
        if device.type != "cuda" or not runs_kernels(device):
            return dequantize_in_torch(self, dtype)
        from tlora.kernels.packed import dequantize  # brings triton, which not every CPU install has

        return dequantize(self, table_on(self.table, device), dtype)


def without_numbers(
    shape: tuple[int, int],
    group: int,
    table: tuple[float, ...],
    value_dtype: torch.dtype,
    dtype: torch.dtype,
    has_zero: bool,
    scale_dtype: torch.dtype = torch.float32,
) -> PackedWeight:
    """A weight on the meta device, for products in `dtype`, of values in `value_dtype` as `rounded_to` takes it."""
    count = shape[0] * shape[1]
    nibbles = torch.empty(-(-count // 2), dtype=torch.uint8, device="meta")
    scale = torch.empty(-(-count // group), dtype=scale_dtype, device="meta")
    zero = torch.empty_like(scale, dtype=torch.uint8) if has_zero else None
    return PackedWeight(nibbles, scale, table, shape, group, rounded_to(value_dtype, dtype), dtype, zero)


@cache
def table_on(table: tuple[float, ...], device: torch.device) -> Tensor:
    """The same tensor each time: a CUDA graph has its address."""
    return torch.tensor(table, dtype=torch.float32, device=device)


def rounded_to(checkpoint: torch.dtype, products: torch.dtype) -> torch.dtype:
    """What values are rounded to first: the dtype of the checkpoint that they stand for, unless products compute in a narrower one. So a
    checkpoint in float16 is rounded to it, and then to bfloat16, as its plain form would be.
    """
    return checkpoint if checkpoint.itemsize <= products.itemsize else products


def powers_of_two(exponents: Tensor) -> Tensor:
    """fp32 scales of MX formats: 2 ** (exponent - 127) of uint8, of which 0 is a number below fp32's normal ones, and 255 infinity."""
    return torch.where(exponents == 0, 1 << 22, exponents.int() << 23).view(torch.float32)


def dequantize_in_torch(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype`, in plain torch operations."""
    count = packed.shape[0] * packed.shape[1]
    if packed.weight.is_meta:
        return torch.empty(packed.shape, dtype=dtype, device="meta")
    out = torch.empty(2 * len(packed.weight), dtype=dtype, device=packed.weight.device)
    table = table_on(packed.table, packed.weight.device)
    by_byte = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)
    by_group = packed.group // 2  # bytes
    step = max(_AT_ONCE // packed.group, 1) * packed.group  # bytes: whole groups
    for first in range(0, len(packed.weight), step):
        nibbles = packed.weight[first : first + step]
        groups = slice(first // by_group, -(-(first + len(nibbles)) // by_group))
        values = by_byte[nibbles.int()]
        if packed.zero is not None:
            values -= packed.zero[groups].float().repeat_interleave(by_group)[: len(nibbles), None]
        values *= packed.scale[groups].repeat_interleave(by_group)[: len(nibbles), None]
        out[2 * first : 2 * (first + len(nibbles))] = values.view(-1).to(packed.value_dtype)
    return out[:count].view(packed.shape)


def unpack_low_first(words: Tensor) -> Tensor:
    """uint8 codes [..., n * 2 * bytes of a number] of integers [..., n] that hold them in 4 bits each, the lowest bits first."""
    nibbles = words.contiguous().view(torch.uint8)
    return torch.stack([nibbles & 15, nibbles >> 4], -1).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """uint8 [ceil(n / 2)] of codes below 16 [n]: the earlier one is the high nibble."""
    padded = torch.nn.functional.pad(codes, (0, len(codes) % 2)).to(torch.uint8)
    return (padded[::2] << 4) | padded[1::2]
