"""Fills this rank's part of a shared base from whatever has the rows of its weights: files, a model that is loaded, or a seed."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from tlora.sharing.layout import BaseLayout, LayerLayout, Piece

_BLOCK_BYTES = 64 << 20  # of rows at a time
_SEEDED_ROWS = 1024  # rows that one seed gives, whoever asks for which of them

Rows = Callable[[str, int, int], Tensor]
"""Rows [first, last) of a linear's weight, in the base's dtype, on any device: [last - first, K]."""


@torch.no_grad()
def fill(own: Tensor, layout: BaseLayout, rank: int, rows: Rows) -> None:
    """Write the ranges of `rank` into `own`, its memory. In fp8 the bits are those that the whole base would have."""
    for layer in layout.layers:
        for piece in layer.pieces:
            first_row, last_row = piece.rows_within(*layer.range_of(rank))
            step = max(1, _BLOCK_BYTES // (4 * piece.row_length))
            for first in range(first_row, last_row, step):
                last = min(first + step, last_row)
                _write(own, layer, rank, piece, first, rows(piece.name, first, last).to(own.device))


def _write(own: Tensor, layer: LayerLayout, rank: int, piece: Piece, first: int, block: Tensor) -> None:
    """What the rank holds of a block of rows from `first` on."""
    scale = None
    if piece.scale_start is not None:
        from tlora.kernels.fp8 import quantize_rows  # brings triton, which not every CPU install has

        block, scale = quantize_rows([block.contiguous()])
    assert block.dtype == piece.dtype and block.shape[1] == piece.row_length, f"{piece.name}: {block.dtype} {tuple(block.shape)}"
    _place(own, layer, rank, piece.start + first * piece.row_bytes, block)
    if scale is not None and piece.scale_start is not None:
        _place(own, layer, rank, piece.scale_start + first * scale.element_size(), scale)


def _place(own: Tensor, layer: LayerLayout, rank: int, position: int, values: Tensor) -> None:
    """What the rank holds of `values`, which begin at byte `position` of the layer."""
    held_from, held_to = layer.range_of(rank)
    source = values.contiguous().view(-1).view(torch.uint8)
    low, high = max(held_from, position), min(held_to, position + source.numel())
    if low < high:
        at = layer.range_start + low - held_from
        own[at : at + high - low].copy_(source[low - position : high - position])


def random_rows(seed: int, layout: BaseLayout, dtype: torch.dtype, device: torch.device, std: float = 0.02) -> Rows:
    """Normally distributed weights, drawn on `device`: the same for any number of ranks."""

    def rows(name: str, first: int, last: int) -> Tensor:
        length = layout.places[name][1].row_length
        blocks = range(first // _SEEDED_ROWS, -(-last // _SEEDED_ROWS))
        found = torch.cat([_draw(seed, name, block, length, dtype, device) for block in blocks])
        return found[first - blocks[0] * _SEEDED_ROWS :][: last - first].mul_(std)

    return rows


def _draw(seed: int, name: str, block: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name} {block}".encode()))
    return torch.randn(_SEEDED_ROWS, length, generator=generator, dtype=dtype, device=device)
