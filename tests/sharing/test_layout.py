"""Where the bytes of a shared base lie: nothing overlaps, everything is aligned, and the ranks' ranges together are the whole layer."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tlora.sharing.layout import ALIGNMENT, BaseLayout, lay_out
from tlora.sharing.shards import fill, random_rows

WIDTHS = st.sampled_from([16, 48, 272])
LAYERS = st.lists(st.lists(st.tuples(WIDTHS, WIDTHS), min_size=1, max_size=4), min_size=1, max_size=3)
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def layout_of(shapes: list[list[tuple[int, int]]], dtype: torch.dtype, fp8: bool, ranks: int) -> BaseLayout:
    return lay_out([{f"{i}.{j}": shape for j, shape in enumerate(layer)} for i, layer in enumerate(shapes)], dtype, fp8, ranks)


@given(LAYERS, DTYPES, st.booleans(), st.integers(1, 5))
def test_pieces_are_aligned_and_apart_and_the_ranges_are_equal_and_hold_them(
    shapes: list[list[tuple[int, int]]], dtype: torch.dtype, fp8: bool, ranks: int
) -> None:
    layout = layout_of(shapes, dtype, fp8, ranks)
    start = 0
    for layer in layout.layers:
        assert layer.range_start == start and layer.range_bytes % ALIGNMENT == 0
        start += layer.range_bytes
        end = 0
        for piece in layer.pieces:
            assert piece.start >= end and piece.start % ALIGNMENT == 0
            assert piece.stop - piece.start == piece.num_rows * piece.row_length * (1 if fp8 else dtype.itemsize)
            if fp8:
                assert piece.scale_start is not None and piece.scale_start >= piece.stop and piece.scale_start % ALIGNMENT == 0
                assert piece.end - piece.scale_start == 4 * piece.num_rows
            end = piece.end
        assert end <= ranks * layer.range_bytes < end + ranks * ALIGNMENT
    assert layout.rank_bytes == start


@given(LAYERS, DTYPES, st.booleans(), st.integers(1, 5))
def test_what_the_ranks_hold_put_together_is_every_weight_whoever_reads_which_rows(
    shapes: list[list[tuple[int, int]]], dtype: torch.dtype, fp8: bool, ranks: int
) -> None:
    layout, alone = layout_of(shapes, dtype, fp8, ranks), layout_of(shapes, dtype, fp8, 1)
    rows = random_rows(7, layout, dtype, torch.device("cpu"))
    parts, whole = (
        [torch.zeros(layout.rank_bytes, dtype=torch.uint8) for _ in range(ranks)],
        torch.zeros(alone.rank_bytes, dtype=torch.uint8),
    )
    for rank, part in enumerate(parts):
        fill(part, layout, rank, rows)
    fill(whole, alone, 0, rows)
    for layer, single in zip(layout.layers, alone.layers, strict=True):
        joined = torch.cat([part[layer.range_start : layer.range_start + layer.range_bytes] for part in parts])
        expected = whole[single.range_start : single.range_start + single.range_bytes]
        for piece in layer.pieces:
            assert torch.equal(joined[piece.start : piece.stop], expected[piece.start : piece.stop])
            if piece.scale_start is not None:
                assert torch.equal(joined[piece.scale_start : piece.end], expected[piece.scale_start : piece.end])
            else:
                weight = joined[piece.start : piece.stop].view(dtype).view(piece.num_rows, piece.row_length)
                assert torch.equal(weight, rows(piece.name, 0, piece.num_rows)) and bool(weight.any())


def test_a_rank_reads_no_rows_that_it_does_not_hold() -> None:
    layout = layout_of([[(64, 256), (32, 256)]], torch.float32, False, 3)
    read: list[tuple[str, int, int]] = []

    def rows(name: str, first: int, last: int) -> Tensor:
        read.append((name, first, last))
        return torch.zeros(last - first, 256)

    for rank in range(3):
        fill(torch.zeros(layout.rank_bytes, dtype=torch.uint8), layout, rank, rows)
    assert read == [("0.0", 0, 32), ("0.0", 32, 64), ("0.1", 0, 32)]
