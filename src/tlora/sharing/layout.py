"""Where the bytes of a shared base lie: each decoder layer's linears in one flat buffer, and the buffer cut into one range for each rank.

Arithmetic alone. A layer's buffer holds the weights [N, K] of its linears one after another, each as the tensors that its form holds,
which can be cut by rows. Every rank holds one range of every layer, all ranges of a layer being equally long, so that each rank holds as
many bytes and a range lies at the same place in each rank's memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from tlora.kernels.frozen import FrozenWeight

ALIGNMENT = 256  # bytes: 16 are what a tensor-map load needs, 256 what torch's own allocations on a GPU have at least


@dataclass(frozen=True)
class Part:
    """One tensor of a linear's weight, `row_length` numbers for each row of the matrix, from byte `start` of a layer's buffer on."""

    name: str
    start: int
    num_rows: int
    row_length: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.row_length * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """The byte behind it."""
        return self.start + self.num_rows * self.row_bytes


@dataclass(frozen=True)
class Piece:
    """One linear's weight [N, K] in a layer's buffer: the tensors that its form holds, one after another."""

    name: str
    num_rows: int
    row_length: int
    parts: tuple[Part, ...]

    @property
    def end(self) -> int:
        """The byte behind all parts."""
        return self.parts[-1].stop

    def rows_within(self, first: int, last: int) -> tuple[int, int]:
        """The rows, from one up to another, that a rank must have read to know bytes [first, last) of the layer. (0, 0) for none."""
        ranges = list[tuple[int, int]]()
        for part in self.parts:
            low, high = max(first, part.start), min(last, part.stop)
            if low < high:
                ranges.append(((low - part.start) // part.row_bytes, -(-(high - part.start) // part.row_bytes)))
        return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else (0, 0)


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

    @property
    def rank_bytes(self) -> int:
        """Of the memory that each rank gives."""
        return sum(layer.range_bytes for layer in self.layers)

    @property
    def slot_bytes(self) -> int:
        """Of a slot that can hold any layer."""
        return max((layer.range_bytes for layer in self.layers), default=0) * self.world_size

    @property
    def weight_bytes(self) -> int:
        """Of all parts, without the gaps between them."""
        return sum(part.stop - part.start for layer in self.layers for piece in layer.pieces for part in piece.parts)

    @cached_property
    def places(self) -> dict[str, tuple[int, Piece]]:
        """Of each linear: its layer and its piece of that."""
        return {piece.name: (number, piece) for number, layer in enumerate(self.layers) for piece in layer.pieces}


def lay_out(layers: Sequence[Mapping[str, FrozenWeight]], world_size: int) -> BaseLayout:
    """The layout of `layers`, each with the weights of its linears by name, of which only shapes are looked at.

    A tensor starts at a multiple of ALIGNMENT. Each must divide into the rows of its matrix.
    """
    layouts, range_start = list[LayerLayout](), 0
    for layer in layers:
        pieces, end = list[Piece](), 0
        for name, weight in layer.items():
            (num_rows, row_length), parts = weight.shape, list[Part]()
            for key, tensor in weight.tensors.items():
                assert tensor.numel() % num_rows == 0, f"{name}: {key} of {tensor.numel()} numbers for {num_rows} rows"
                parts.append(Part(key, _align(end), num_rows, tensor.numel() // num_rows, tensor.dtype))
                end = parts[-1].stop
            pieces.append(Piece(name, num_rows, row_length, tuple(parts)))
        range_bytes = _align(math.ceil(end / world_size))
        layouts.append(LayerLayout(tuple(pieces), range_bytes, range_start))
        range_start += range_bytes
    return BaseLayout(tuple(layouts), world_size)


def _align(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
