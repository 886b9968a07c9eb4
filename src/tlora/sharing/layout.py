"""Where the bytes of a shared base lie: each decoder layer's linears in one flat buffer, and the buffer cut into one range for each rank.

Arithmetic alone. A layer's buffer holds the weights [N, K] of its linears one after another, and behind an fp8 weight the fp32 scales [N]
of its rows. Every rank holds one range of every layer, all ranges of a layer being equally long, so that each rank holds as many bytes
and a range lies at the same place in each rank's memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch

ALIGNMENT = 256  # bytes: 16 are what a tensor-map load needs, 256 what torch's own allocations on a GPU have at least
_SCALE_BYTES = 4
NO_OFFSETS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Piece:
    """One linear's weight [N, K] in a layer's buffer: byte `start`, and the byte of its fp32 scales where it is fp8."""

    name: str
    start: int
    num_rows: int
    row_length: int
    dtype: torch.dtype
    scale_start: int | None = None

    @property
    def row_bytes(self) -> int:
        return self.row_length * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """The byte behind the weight."""
        return self.start + self.num_rows * self.row_bytes

    @property
    def end(self) -> int:
        """The byte behind weight and scales."""
        return self.stop if self.scale_start is None else self.scale_start + _SCALE_BYTES * self.num_rows

    def rows_within(self, first: int, last: int) -> tuple[int, int]:
        """The rows, from one up to another, that a rank must have read to know bytes [first, last) of the layer. (0, 0) for none."""
        found = list[tuple[int, int]]()
        low, high = max(first, self.start), min(last, self.stop)
        if low < high:
            found.append(((low - self.start) // self.row_bytes, -(-(high - self.start) // self.row_bytes)))
        if self.scale_start is not None:
            low, high = max(first, self.scale_start), min(last, self.end)
            if low < high:
                found.append(((low - self.scale_start) // _SCALE_BYTES, -(-(high - self.scale_start) // _SCALE_BYTES)))
        return (min(low for low, _ in found), max(high for _, high in found)) if found else (0, 0)


@dataclass(frozen=True)
class LayerLayout:
    """One decoder layer: its linears in order, how long each rank's range is, and where that range lies in each rank's memory."""

    pieces: tuple[Piece, ...]
    range_bytes: int
    range_start: int

    def range_of(self, rank: int) -> tuple[int, int]:
        """Bytes of the layer's buffer that `rank` holds."""
        return rank * self.range_bytes, (rank + 1) * self.range_bytes


@dataclass(frozen=True)
class BaseLayout:
    """All layers of a base that `world_size` ranks share."""

    layers: tuple[LayerLayout, ...]
    world_size: int
    fp8: bool

    @property
    def rank_bytes(self) -> int:
        """Of the memory that each rank gives."""
        return sum(layer.range_bytes for layer in self.layers)

    @property
    def slot_bytes(self) -> int:
        """Of a slot that can hold any layer."""
        return max((layer.range_bytes for layer in self.layers), default=0) * self.world_size

    @cached_property
    def places(self) -> dict[str, tuple[int, Piece]]:
        """Of each linear: its layer and its piece of that."""
        return {piece.name: (number, piece) for number, layer in enumerate(self.layers) for piece in layer.pieces}


def lay_out(
    layers: Sequence[Mapping[str, tuple[int, int]]], dtype: torch.dtype, fp8: bool, world_size: int, offsets: Mapping[str, int] = NO_OFFSETS
) -> BaseLayout:
    """The layout of `layers`, each with the weights [N, K] of its linears by name, in `dtype` or in fp8 with scales.

    A weight starts at a multiple of ALIGNMENT, and those that `offsets` names so many bytes behind one.
    """
    found, range_start = list[LayerLayout](), 0
    for layer in layers:
        pieces, end = list[Piece](), 0
        for name, (num_rows, row_length) in layer.items():
            piece = Piece(name, _align(end) + offsets.get(name, 0), num_rows, row_length, torch.float8_e4m3fn if fp8 else dtype)
            if fp8:
                piece = Piece(name, piece.start, num_rows, row_length, piece.dtype, _align(piece.stop))
            pieces.append(piece)
            end = piece.end
        range_bytes = _align(math.ceil(end / world_size))
        found.append(LayerLayout(tuple(pieces), range_bytes, range_start))
        range_start += range_bytes
    return BaseLayout(tuple(found), world_size, fp8)


def _align(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
