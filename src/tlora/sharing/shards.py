"""Fills this rank's part of a shared base from any source of its weights' rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora.kernels.frozen import FrozenWeight, PlainWeight
from tlora.sharing.layout import BaseLayout, LayerLayout, Piece

_BLOCK_BYTES = 64 << 20  # of rows at a time
_READERS = 4  # threads, each with a block

Found = Tensor | Mapping[str, Tensor]
Rows = Callable[[str, int, int], Found]
"""Rows [first, last) of a linear's weight, on any device: in the base's dtype, [last - first, K], or where the weight is in its form
already, what that holds of them, flat.
"""


@torch.no_grad()
def fill(
    own: Tensor,
    layout: BaseLayout,
    rank: int,
    rows: Rows,
    held: Callable[[Tensor], FrozenWeight] = PlainWeight,
    whole: Container[str] = (),
) -> None:
    """Write the ranges of `rank` into `own`, its memory. `held` gives rows their form, with the bits that the whole matrix would give.

    `rows` is called from several threads: one alone reads a file at 1 to 5 GB/s. Of the linears in `whole` it is asked once, for all rows
    that the rank needs.
    """
    pending: deque[tuple[_Block, Future[Found]]] = deque()
    with ThreadPoolExecutor(_READERS) as pool:
        for block in _blocks(layout, rank, whole):
            pending.append((block, pool.submit(rows, block.piece.name, block.first, block.last)))
            if len(pending) > _READERS:
                _write(own, rank, *_next(pending), held)
        while pending:
            _write(own, rank, *_next(pending), held)


@dataclass(frozen=True)
class _Block:
    """Rows [first, last) of a piece of a layer."""

    layer: LayerLayout
    piece: Piece
    first: int
    last: int


def _blocks(layout: BaseLayout, rank: int, whole: Container[str]) -> Iterator[_Block]:
    """What `rank` has to read, in blocks of bounded size, but for pieces of the names in `whole`."""
    for layer in layout.layers:
        for piece in layer.pieces:
            first_row, last_row = piece.rows_within(*layer.range_of(rank))
            step = last_row if piece.name in whole else max(1, _BLOCK_BYTES // (4 * piece.row_length))
            for first in range(first_row, last_row, step or 1):
                yield _Block(layer, piece, first, min(first + step, last_row))


def _next(pending: deque[tuple[_Block, Future[Found]]]) -> tuple[_Block, Found]:
    block, future = pending.popleft()
    return block, future.result()


def _write(own: Tensor, rank: int, block: _Block, found: Found, held: Callable[[Tensor], FrozenWeight]) -> None:
    """What `rank` holds of the rows of a block."""
    tensors = held(found).tensors if isinstance(found, Tensor) else found
    for part in block.piece.parts:
        tensor, count = tensors[part.name], (block.last - block.first) * part.row_length
        assert tensor.dtype == part.dtype and tensor.numel() == count, f"{block.piece.name}: {tensor.dtype} {tuple(tensor.shape)}"
        _place(own, block.layer, rank, part.start + block.first * part.row_bytes, tensor)


def _place(own: Tensor, layer: LayerLayout, rank: int, position: int, values: Tensor) -> None:
    """What the rank holds of `values`, which begin at byte `position` of the layer."""
    held_from, held_to = layer.range_of(rank)
    source = values.contiguous().view(-1).view(torch.uint8)
    low, high = max(held_from, position), min(held_to, position + source.numel())
    if low < high:
        at = layer.range_start + low - held_from
        own[at : at + high - low].copy_(source[low - position : high - position])
