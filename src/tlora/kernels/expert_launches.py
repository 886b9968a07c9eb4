"""The launches over experts that a run will make, on tensors without memory: what `compile_ahead.py` compiles before the first step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tlora.kernels.cards import CardClass
from tlora.kernels.compile_request import ExpertRequest, RowsRequest
from tlora.kernels.expert_kernels import (
    ExpertRouting,
    ExpertRows,
    add_slots,
    add_sums,
    gemm_tile,
    list_tiles,
    make_batch,
    multiply,
    shrink,
    spread_slots,
)
from tlora.kernels.experts import ExpertWeights
from tlora.kernels.lora_tables import ADDRESS_FIELDS, DA, DB, A, B
from tlora.kernels.row_operations import launch_rows

META = torch.device("meta")
TOKENS = 128


def rows_launches(request: RowsRequest) -> list[Callable[[], object]]:
    """Forward and back."""
    empty = partial(torch.empty, dtype=getattr(torch, request.dtype), device=META)
    weight, bias = empty(request.out_features, request.in_features), empty(request.out_features) if request.bias else None
    return [
        partial(launch_rows, empty(TOKENS, request.in_features), weight, bias, True),
        partial(launch_rows, empty(TOKENS, request.out_features), weight, None, False),
    ]


def expert_launches(request: ExpertRequest, dtype: torch.dtype, card: CardClass) -> list[Callable[[], object]]:
    """One of each kernel, for few rows an expert and for many."""
    launches: list[Callable[[], object]] = []
    for tile_rows in (64,) if dtype.itemsize == 4 else (64, 128):
        launches += _of_tiles(request, dtype, card, tile_rows)
    return launches


def _of_tiles(request: ExpertRequest, dtype: torch.dtype, card: CardClass, tile_rows: int) -> list[Callable[[], object]]:
    routing, rows = empty_routing(request, tile_rows)
    matrix = (request.in_features, request.out_features) if request.transposed else (request.out_features, request.in_features)
    empty = partial(torch.empty, dtype=dtype, device=META)
    bias = empty(request.experts, request.out_features) if request.bias else None
    weights = ExpertWeights(empty(request.experts, *matrix), bias, request.transposed)
    sorted_rows = TOKENS * request.slots
    x = empty(TOKENS if request.gathers else sorted_rows, request.in_features)
    dy, s = empty(sorted_rows, request.out_features), empty(sorted_rows, rows.width)
    forward_tile, back_tile = (gemm_tile(tile_rows, n, dtype, card) for n in (request.out_features, request.in_features))
    launches: list[Callable[[], object]] = [partial(list_tiles, routing)]
    for adapters in (None, (s, rows)):
        launches.append(partial(multiply, x, weights, routing, adapters, request.gathers, tile=forward_tile))
        launches.append(partial(multiply, dy, weights, routing, adapters, False, back=True, tile=back_tile))
    return [*launches, *_of_adapters(request, routing, rows, (x, dy, s))]


def _of_adapters(
    request: ExpertRequest, routing: ExpertRouting, rows: ExpertRows, tensors: tuple[Tensor, Tensor, Tensor]
) -> list[Callable[[], object]]:
    x, dy, s = tensors
    weights = torch.empty(TOKENS, request.slots, dtype=getattr(torch, request.weights_dtype), device=META)
    dout = torch.empty(TOKENS, dy.shape[1], dtype=dy.dtype, device=META)
    return [
        partial(shrink, x, routing, rows, A, request.gathers),
        partial(shrink, dy, routing, rows, B, False),
        partial(add_sums, x, s, routing, rows, DA, request.gathers),
        partial(add_sums, dy, s, routing, rows, DB, False),
        partial(add_slots, torch.empty_like(dy), None if request.gathers else weights, routing),
        *([] if request.gathers else [partial(spread_slots, dout, dy, weights, routing, True)]),
    ]


def empty_routing(request: ExpertRequest, tile_rows: int) -> tuple[ExpertRouting, ExpertRows]:
    """Of one job's tokens."""
    batch = make_batch([(TOKENS,)], TOKENS, {"": (np.full((1, ADDRESS_FIELDS), 16), np.ones(1))}, META)
    count, rows = TOKENS * request.slots, batch.rows("")
    assert rows is not None
    order, inverse = (torch.empty(count, dtype=torch.int64, device=META) for _ in range(2))
    cells = torch.empty(request.experts * batch.num_samples + 1, dtype=torch.int32, device=META)
    tiles = torch.empty(count // tile_rows + request.experts, 8, dtype=torch.int32, device=META)
    return ExpertRouting(request.slots, request.experts, batch.num_samples, tile_rows, order, inverse, cells, tiles, batch.runs_J), rows
