"""Experts of a mixture with many adapters on a GPU: the tables of a routing, made on the device, and launches over them.

The same mathematics as `experts.py`, which is the plain path. T tokens, k slots of each, S = T k rows sorted by (expert, sample,
position, slot), E experts, P samples (padding is the last), J jobs. Nothing waits for the device, and all shapes are known from T, k, E, P
and J, so that a pass over experts can be captured. What rows of experts others have changes no bit of a job's (`triton_experts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tlora.kernels.cards import CardClass
from tlora.kernels.device import launched_as
from tlora.kernels.experts import ExpertWeights
from tlora.kernels.lora_tables import ADDRESS_FIELDS, DA, DB, RANK, RUNS_STEP, A, B, copy_together
from tlora.kernels.tiles import SkinnyTile, Tile
from tlora.kernels.triton_experts import (
    add_slots_kernel,
    expert_gemm_kernel,
    expert_shrink_kernel,
    expert_sum_kernel,
    spread_slots_kernel,
    tile_kernel,
)

PIECE = 16  # ranks that a kernel takes at a time, the least that a product has
_TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class ExpertRows:
    """The jobs' rows at one parameter: int64 [J, 5] as `LoraTables.rows_LS5`, whose rank is one expert's, and scales, fp32 [J]."""

    rows_J5: Tensor
    scales_J: Tensor
    width: int  # of S: no rank is above it


@dataclass(frozen=True)
class ExpertBatch:
    """One micro-batch as experts see it. `places`: of each parameter in the tables; those that no job adapts are not there."""

    num_samples: int
    sample_T: Tensor  # int32: each token's
    runs_J: Tensor  # int32 [J + 1]: each job's first sample, and the one behind the last job's
    places: Mapping[str, int]
    rows_LJ5: Tensor
    scales_LJ: Tensor
    width: int
    buffer: Tensor  # uint8: all of the tensors are views of it

    @property
    def shape(self) -> tuple[object, ...]:
        """All that launches depend on, except the number of tokens and where the banks lie."""
        return self.num_samples, len(self.runs_J), tuple(self.places), self.width

    def rows(self, parameter: str) -> ExpertRows | None:
        """None where no job adapts it."""
        place = self.places.get(parameter)
        return None if place is None else ExpertRows(self.rows_LJ5[place], self.scales_LJ[place], self.width)


def make_batch(
    lengths: Sequence[Sequence[int]], num_tokens: int, rows: Mapping[str, tuple[np.ndarray, np.ndarray]], device: torch.device
) -> ExpertBatch:
    """`lengths`: of the samples of each job, one job's tokens behind another's; tokens behind the last are padding. `rows`: of each
    parameter that is adapted, int64 [J, 5] and scales [J]; a job that does not adapt it has rank 0. One copy; does not wait for the device.
    """
    samples = [length for own in lengths for length in own]
    padding = num_tokens - sum(samples)
    assert padding >= 0, f"samples of {sum(samples)} tokens in {num_tokens}"
    sample_T = np.repeat(np.arange(len(samples) + 1, dtype=np.int32), [*samples, padding])
    counts = [*(len(own) for own in lengths), *[0] * (-len(lengths) % RUNS_STEP)]  # tables of a parameter begin at multiples of 16 bytes
    rows_LJ5, scales_LJ = np.zeros((len(rows), len(counts), ADDRESS_FIELDS), np.int64), np.zeros((len(rows), len(counts)), np.float32)
    for place, (rows_J5, scales_J) in enumerate(rows.values()):
        rows_LJ5[place, : len(lengths)], scales_LJ[place, : len(lengths)] = rows_J5, scales_J
    runs_J = np.array([0, *accumulate(counts)], np.int32)
    buffer, (rows_t, scales_t, runs_t, sample_t) = copy_together([rows_LJ5, scales_LJ, runs_J, sample_T], device)
    width = -(-int(rows_LJ5[:, :, RANK].max(initial=1)) // PIECE) * PIECE
    return ExpertBatch(len(samples) + 1, sample_t, runs_t, {name: i for i, name in enumerate(rows)}, rows_t, scales_t, width, buffer)


@dataclass(frozen=True)
class ExpertRouting:
    """Which rows go where. `order_S`: of each sorted row, the number token * k + slot; `inverse_S` the other way round; the tables are
    `triton_experts.py`'s, with tiles of `tile_rows` rows.
    """

    slots: int
    num_experts: int
    num_samples: int
    tile_rows: int
    order_S: Tensor
    inverse_S: Tensor
    cells: Tensor
    tiles: Tensor
    runs_J: Tensor

    @property
    def num_runs(self) -> int:
        return len(self.runs_J) - 1


def route(experts_TK: Tensor, batch: ExpertBatch, num_experts: int, tile_rows: int) -> ExpertRouting:
    """Sort the rows of the tokens whose experts are given, int [T, k]; does not wait for the device."""
    tokens, slots = experts_TK.shape
    samples, device = batch.num_samples, experts_TK.device
    keys_S = (experts_TK.to(torch.int32) * samples + batch.sample_T[:tokens, None]).reshape(-1)
    sorted_S, order_S = torch.sort(keys_S, stable=True)
    places_S = torch.arange(len(order_S), device=device)
    inverse_S = torch.empty_like(order_S).scatter_(0, order_S, places_S)
    edges = torch.arange(num_experts * samples + 1, dtype=torch.int32, device=device)
    cells = torch.searchsorted(sorted_S, edges, out_int32=True)
    num_tiles = len(order_S) // tile_rows + num_experts
    tiles = torch.empty(num_tiles, 8, dtype=torch.int32, device=device)
    routing = ExpertRouting(slots, num_experts, samples, tile_rows, order_S, inverse_S, cells, tiles, batch.runs_J)
    list_tiles(routing)
    return routing


def list_tiles(routing: ExpertRouting) -> None:
    """Write `tiles`."""
    launch: Any = tile_kernel[(len(routing.tiles),)]
    launch(
        routing.cells, routing.runs_J, routing.tiles, routing.num_experts, routing.num_samples, routing.num_runs,
        BM=routing.tile_rows, EXPERTS=triton.next_power_of_2(routing.num_experts),
        RUNS=triton.next_power_of_2(max(routing.num_runs, 1)), num_warps=1,
    )  # fmt: skip


def tile_rows_for(rows: int, num_experts: int, dtype: torch.dtype) -> int:
    """Rows of a tile, for so many rows in all: no row's bits depend on it. 128 is faster from 64 rows an expert on (H200)."""
    return 64 if dtype.itemsize == 4 or rows < 48 * num_experts else 128


def gemm_tile(rows: int, columns: int, dtype: torch.dtype, card: CardClass) -> Tile:
    """Of a product that gives `columns` in tiles of `rows` rows: `inner`, which bits depend on, is of the dtype and the card alone.

    Of those tried on an H200, and on one made to run sm_80's code, the fastest (bench/results/h200_03970e40_expert_kernels*.json).
    """
    if dtype.itemsize == 4:
        return Tile(rows, min(64, int(triton.next_power_of_2(columns))), 32, 3, 4)
    widest = 256 if card.sized and rows == 128 else 128
    width = min(widest, int(triton.next_power_of_2(columns)))
    if card.sized:
        return Tile(rows, width, 64, 4, 8 if width == 256 else 4)
    return Tile(rows, width, 32, 4, 4)


def shrink_tile(dtype: torch.dtype) -> SkinnyTile:
    """64 rows at a time are faster than 128, though jobs' rows are read more often (0.09 and 0.13 ms of x [8192, 2048] on an H200)."""
    return SkinnyTile(64, 32, 3, 4) if dtype.itemsize == 4 else SkinnyTile(64, 128, 3, 4)


def sum_tile(dtype: torch.dtype) -> SkinnyTile:
    """Its `tokens` and no more are part of the bits: where blocks of a sample's rows begin."""
    return SkinnyTile(32, 64, 1, 4) if dtype.itemsize == 4 else SkinnyTile(16, 128, 1, 4)


def all_tiles(columns: Iterable[int], dtype: torch.dtype, card: CardClass) -> tuple[object, ...]:
    """All that parameters that give so many columns, forward or back, can get: what a job's bits may depend on."""
    gemms = [gemm_tile(rows, each, dtype, card) for rows in (64, 128) for each in sorted(set(columns))]
    return (*gemms, shrink_tile(dtype), sum_tile(dtype), PIECE)


def shrink(x: Tensor, routing: ExpertRouting, rows: ExpertRows, which: int, gathers: bool, tile: SkinnyTile | None = None) -> Tensor:
    """S [S, width], scaled (which A), or dS (which B). `gathers`: x has a row for each token, not for each sorted row."""
    s = torch.empty(len(routing.order_S), rows.width, dtype=x.dtype, device=x.device)
    tile = tile or shrink_tile(x.dtype)
    launch: Any = expert_shrink_kernel[(len(routing.tiles) * (routing.tile_rows // tile.tokens),)]
    launch(
        x, routing.order_S, s, routing.tiles, routing.cells, routing.runs_J, rows.rows_J5, rows.scales_J, x.shape[1],
        routing.num_samples, routing.num_runs, rows.width,
        WHICH=which, SLOTS=routing.slots if gathers else 0, R=PIECE, BM=routing.tile_rows, BT=tile.tokens, BK=tile.columns,
        MASKED=x.shape[1] % tile.columns != 0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return s


def multiply(
    x: Tensor, weights: ExpertWeights, routing: ExpertRouting, adapters: tuple[Tensor, ExpertRows] | None, gathers: bool,
    back: bool = False, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """y [S, N] of x [S, K] ([T, K] where it `gathers`), or `back`, dx [S, K] of dy [S, N]. `adapters`: S, and where rows lie."""
    weight: Any = weights.weight
    inner, columns = x.shape[1], weight.shape[1 if back == weights.transposed else 2]
    y = torch.empty(len(routing.order_S), columns, dtype=x.dtype, device=x.device)
    tile = tile or gemm_tile(routing.tile_rows, columns, x.dtype, launched_as(x.device))
    s, rows_J5 = (adapters[0], adapters[1].rows_J5) if adapters is not None else (None, None)
    bias = None if back else weights.bias_EN
    launch: Any = expert_gemm_kernel[(len(routing.tiles) * triton.cdiv(columns, tile.columns),)]
    launch(
        x, routing.order_S, weight, bias, y, s, routing.tiles, routing.cells, routing.runs_J, rows_J5,
        len(routing.tiles), columns, inner, routing.num_samples, routing.num_runs, PIECE if s is None else s.shape[1],
        WHICH=A if back else B, NK=back == weights.transposed, SLOTS=routing.slots if gathers else 0, R=PIECE,
        BM=routing.tile_rows, BN=tile.columns, BK=tile.inner, BAND=tile.band, MASKED=inner % tile.inner != 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def add_sums(
    x: Tensor, s: Tensor, routing: ExpertRouting, rows: ExpertRows, which: int, gathers: bool, tile: SkinnyTile | None = None
) -> None:
    """dA of x and dS (which DA), or dB of dy and S (which DB), added to what is there."""
    tile = tile or sum_tile(x.dtype)
    launch: Any = expert_sum_kernel[(triton.cdiv(x.shape[1], tile.columns), routing.num_runs, routing.num_experts)]
    launch(
        x, routing.order_S, s, routing.cells, routing.runs_J, rows.rows_J5, x.shape[1],
        routing.num_samples, routing.num_runs, s.shape[1],
        WHICH=which, SLOTS=routing.slots if gathers else 0, R=PIECE, BT=tile.tokens, BC=tile.columns,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def forward(
    x: Tensor, weights: ExpertWeights, routing: ExpertRouting, rows: ExpertRows | None, gathers: bool
) -> tuple[Tensor, Tensor | None]:
    """y [S, N], and the S that backward needs."""
    s = None if rows is None else shrink(x, routing, rows, A, gathers)
    return multiply(x, weights, routing, None if rows is None or s is None else (s, rows), gathers), s


def backward(
    dy_SN: Tensor,
    x: Tensor,
    s: Tensor | None,
    weights: ExpertWeights | None,
    routing: ExpertRouting,
    rows: ExpertRows | None,
    gathers: bool,
) -> Tensor | None:
    """dx of contiguous dy, as x has its rows; None without `weights`. Adds to the sums of the jobs' rows."""
    adapters = None
    assert (rows is None) == (s is None), "x @ A of this pass is gone"
    if rows is not None and s is not None:
        ds = shrink(dy_SN, routing, rows, B, gathers=False)
        add_sums(dy_SN, s, routing, rows, DB, gathers=False)
        add_sums(x, ds, routing, rows, DA, gathers)
        adapters = ds, rows
    if weights is None:
        return None
    dx_SK = multiply(dy_SN, weights, routing, adapters, gathers=False, back=True)
    return add_slots(dx_SK, None, routing) if gathers else dx_SK


def add_slots(y_SH: Tensor, weights_TK: Tensor | None, routing: ExpertRouting) -> Tensor:
    """out [T, H], as `experts.combine` gives it; without weights the sum of each token's rows."""
    tokens, width = len(y_SH) // routing.slots, y_SH.shape[1]
    out_TH = torch.empty(tokens, width, dtype=y_SH.dtype, device=y_SH.device)
    block = min(1024, triton.next_power_of_2(width))
    wide = y_SH.dtype if weights_TK is None else torch.promote_types(y_SH.dtype, weights_TK.dtype)
    launch: Any = add_slots_kernel[(tokens, triton.cdiv(width, block))]
    launch(y_SH, weights_TK, routing.inverse_S, out_TH, width, SLOTS=routing.slots, WIDE=_TRITON_TYPES[wide], BH=block, num_warps=4)
    return out_TH


def spread_slots(dout_TH: Tensor, y_SH: Tensor, weights_TK: Tensor, routing: ExpertRouting, weighs: bool) -> tuple[Tensor, Tensor | None]:
    """dy [S, H] and, where it `weighs`, dweights [T, k], of contiguous dout."""
    tokens, width = dout_TH.shape
    dy_SH = torch.empty_like(y_SH)
    dweights_TK = torch.empty_like(weights_TK) if weighs else None
    block = triton.next_power_of_2(width)
    launch: Any = spread_slots_kernel[(tokens,)]
    launch(
        dout_TH, y_SH, weights_TK, routing.inverse_S, dy_SH, dweights_TK, width, SLOTS=routing.slots, BH=block,
        num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return dy_SH, dweights_TK


def expert_linear(
    x: Tensor,
    base: Callable[[], ExpertWeights],
    routing: ExpertRouting,
    rows: ExpertRows | None,
    gathers: bool = False,
    anchor: Tensor | None = None,
) -> Tensor:
    """As `experts.expert_linear`. Where it `gathers`, x [T, K] is what `experts.dispatch` would make [S, K] of, and its gradient too."""
    return _ExpertLinear.apply(x, base, routing, rows, gathers, anchor)  # type: ignore[no-any-return]


class _ExpertLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        base: Callable[[], ExpertWeights],
        routing: ExpertRouting,
        rows: ExpertRows | None,
        gathers: bool,
        anchor: Tensor | None,
    ) -> Tensor:
        x = x.contiguous()
        y_SN, s = forward(x, base(), routing, rows, gathers)
        ctx.save_for_backward(*(() if s is None else (x, s)))
        ctx.base, ctx.routing, ctx.rows, ctx.gathers = base, routing, rows, gathers
        return y_SN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_SN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, s = ctx.saved_tensors or (dy_SN, None)
        weights = ctx.base() if ctx.needs_input_grad[0] else None
        dx = backward(dy_SN.contiguous(), x, s, weights, ctx.routing, ctx.rows, ctx.gathers)
        return dx, None, None, None, None, None


def combine(y_SH: Tensor, weights_TK: Tensor, routing: ExpertRouting) -> Tensor:
    """As `experts.combine`."""
    return _Combine.apply(y_SH, weights_TK, routing)  # type: ignore[no-any-return]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_SH: Tensor, weights_TK: Tensor, routing: ExpertRouting) -> Tensor:
        y_SH, weights_TK = y_SH.contiguous(), weights_TK.contiguous()
        ctx.save_for_backward(y_SH, weights_TK)
        ctx.routing = routing
        return add_slots(y_SH, weights_TK, routing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TH: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        y_SH, weights_TK = ctx.saved_tensors
        return *spread_slots(dout_TH.contiguous(), y_SH, weights_TK, ctx.routing, ctx.needs_input_grad[1]), None
