"""Where the bytes of a shared base lie: nothing overlaps, everything is aligned, and the ranks' ranges together are the whole layer."""

from __future__ import annotations

from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bench.shared_models import random_rows
from tlora.job import BasePrecision
from tlora.kernels.frozen import FrozenWeight, PlainWeight
from tlora.sharing.layout import ALIGNMENT, BaseLayout, lay_out
from tlora.sharing.shards import fill
from tlora.supermodel.held_linear import quantized

WIDTHS = st.sampled_from([16, 48, 64, 192])
LAYERS = st.lists(st.lists(st.tuples(WIDTHS, WIDTHS), min_size=1, max_size=4), min_size=1, max_size=3)
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


PRECISIONS = st.sampled_from([None, "fp8", "nf4"])


def held(precision: BasePrecision | None, weight_NK: Tensor) -> FrozenWeight:
    """In NF4 only where rows are whole groups."""
    in_form = precision == "fp8" or (precision == "nf4" and weight_NK.shape[1] % 64 == 0)
    return quantized(weight_NK, precision, weight_NK.dtype) if precision and in_form else PlainWeight(weight_NK)


def layout_of(shapes: list[list[tuple[int, int]]], dtype: torch.dtype, precision: BasePrecision | None, ranks: int) -> BaseLayout:
    empty = [[torch.empty(shape, dtype=dtype, device="meta") for shape in layer] for layer in shapes]
    return lay_out([{f"{i}.{j}": held(precision, weight) for j, weight in enumerate(layer)} for i, layer in enumerate(empty)], ranks)


@given(LAYERS, DTYPES, PRECISIONS, st.integers(1, 5))
def test_pieces_are_aligned_and_apart_and_the_ranges_are_equal_and_hold_them(
    shapes: list[list[tuple[int, int]]], dtype: torch.dtype, precision: BasePrecision | None, ranks: int
) -> None:
    layout = layout_of(shapes, dtype, precision, ranks)
    start = 0
    for layer in layout.layers:
        assert layer.range_start == start and layer.range_bytes % ALIGNMENT == 0
        start += layer.range_bytes
        end = 0
        for piece in layer.pieces:
            weight = held(precision, torch.empty(piece.num_rows, piece.row_length, dtype=dtype, device="meta"))
            assert [part.name for part in piece.parts] == list(weight.tensors)
            for part in piece.parts:
                assert part.start >= end and part.start % ALIGNMENT == 0
                assert part.stop - part.start == weight.tensors[part.name].nbytes
                end = part.stop
            assert end == piece.end
        assert end <= ranks * layer.range_bytes < end + ranks * ALIGNMENT
    assert layout.rank_bytes == start


@given(LAYERS, DTYPES, PRECISIONS, st.integers(1, 5))
def test_what_the_ranks_hold_put_together_is_every_weight_whoever_reads_which_rows(
    shapes: list[list[tuple[int, int]]], dtype: torch.dtype, precision: BasePrecision | None, ranks: int
) -> None:
    layout, alone = layout_of(shapes, dtype, precision, ranks), layout_of(shapes, dtype, precision, 1)
    rows = random_rows(7, layout, dtype, torch.device("cpu"))
    parts, whole = (
        [torch.zeros(layout.rank_bytes, dtype=torch.uint8) for _ in range(ranks)],
        torch.zeros(alone.rank_bytes, dtype=torch.uint8),
    )
    for rank, part in enumerate(parts):
        fill(part, layout, rank, rows, partial(held, precision))
    fill(whole, alone, 0, rows, partial(held, precision))
    for layer, single in zip(layout.layers, alone.layers, strict=True):
        joined = torch.cat([part[layer.range_start : layer.range_start + layer.range_bytes] for part in parts])
        expected = whole[single.range_start : single.range_start + single.range_bytes]
        for piece in layer.pieces:
            true = held(precision, rows(piece.name, 0, piece.num_rows)).tensors
            for part in piece.parts:
                assert torch.equal(joined[part.start : part.stop], expected[part.start : part.stop])
                found = joined[part.start : part.stop].view(part.dtype).view(true[part.name].shape)
                assert torch.equal(found.view(torch.uint8), true[part.name].view(torch.uint8)) and bool(found.view(torch.uint8).any())


def test_a_rank_reads_no_rows_that_it_does_not_hold() -> None:
    layout = layout_of([[(64, 256), (32, 256)]], torch.float32, None, 3)
    read: list[tuple[str, int, int]] = []

    def rows(name: str, first: int, last: int) -> Tensor:
        read.append((name, first, last))
        return torch.zeros(last - first, 256)

    for rank in range(3):
        fill(torch.zeros(layout.rank_bytes, dtype=torch.uint8), layout, rank, rows)
    assert read == [("0.0", 0, 32), ("0.0", 32, 64), ("0.1", 0, 32)]
