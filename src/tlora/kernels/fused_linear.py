"""Launches of the multi-adapter kernels for one group of linears that read the same x (q/k/v; gate/up; or one linear by itself)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tlora.kernels.cards import Loads
from tlora.kernels.fp8 import quantize_rows, transpose
from tlora.kernels.lora_tables import DA, DB, TILE, WIDEST_PIECE, A, B, LoraTables
from tlora.kernels.tile_files import table_of
from tlora.kernels.tiles import LARGEST_TOGETHER, Kernel, Key, SkinnyTile, Tile, TileTable
from tlora.kernels.triton_gemm import gemm_kernel
from tlora.kernels.triton_lora import add_dropped_kernel, shrink_kernel, sum_kernel

Operand = TensorDescriptor | tuple[Tensor, int] | tuple[Tensor, int, int]


def operand(matrix: Tensor, block: list[int], loads: Loads) -> Operand:
    """`matrix` [rows, columns] with adjacent elements in a row, of which a program takes `block` at a time."""
    if loads == "descriptor":
        return TensorDescriptor.from_tensor(matrix, block)
    assert matrix.stride(1) == 1, f"strides {matrix.stride()}"
    return matrix, matrix.stride(0)


def bank_operand(rows: Tensor, block: list[int], loads: Loads) -> Operand:
    """The same of a bank's rows, with their number: a block may reach beyond the last."""
    return operand(rows, block, loads) if loads == "descriptor" else (rows, rows.stride(0), rows.shape[0])


LARGEST_GROUP = LARGEST_TOGETHER
_ONE_TILE_EACH = 1 << 30
"""Programs of a GEMM by pointer: as many as there are tiles. Two or three of its small blocks share a processor, so that one begins while
another ends; a program that stays, with bulk copies that run ahead into its next tile, would leave the others no room."""
_DROPPED = SkinnyTile(TILE, 64, 2, 4)  # of `add_dropped_kernel`: tokens and columns of dx
_POINTER_PIECE = 16
"""Ranks of the adapters that a GEMM by pointer takes at a time: 32 or more would spill registers, as they pass through them."""
Item = TypeVar("Item")


@dataclass(frozen=True)
class LinearGroup:
    """M linears that read the same x. `first` is the group's place among the tables' linears; `widths` their out features.

    Where nothing that learns lies before x, `passes_back` is false: backward then spares itself the product, and gives zeros as dx.
    Where no backward reads y, not even of what is made of it within the decoder layer, `feeds_backward` is false: a layer that runs again
    for its backward leaves y undefined.
    """

    first: int
    widths: tuple[int, ...]
    in_features: int
    programs: int  # of a GEMM
    weight_scale_N: Tensor | None = None  # fp32, of all linears concatenated, where their weights are fp8 (`fp8.py`)
    tiles: TileTable = field(default_factory=TileTable)
    passes_back: bool = True
    feeds_backward: bool = True

    @property
    def size(self) -> int:
        return len(self.widths)

    @property
    def loads(self) -> Loads:
        return self.tiles.card.loads


def make_group(
    first: int, widths: tuple[int, ...], in_features: int, device: torch.device, weight_scale_N: Tensor | None = None
) -> LinearGroup:
    """Widths must be multiples of 16: other linears take the reference path. Raises ConfigError for a damaged table of tiles."""
    assert all(w % 16 == 0 for w in (*widths, in_features)), f"widths {widths} and {in_features} must be multiples of 16"
    assert len(widths) <= LARGEST_GROUP, f"{len(widths)} linears in one group; the kernels take {LARGEST_GROUP}"
    return LinearGroup(first, widths, in_features, programs_of(device), weight_scale_N, table_of(device))


def programs_of(device: torch.device) -> int:
    """How many programs a GEMM has on `device`, each of which stays and takes one tile after another: one for each SM of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def forward(
    x_TK: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], group: LinearGroup, tables: LoraTables, s: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """y [T, N_m] of each linear = x @ weight.T + bias + every run's adapters, and the scaled S that backward needs.

    `weights` [N_m, K]; `biases` [N_m], or none at all. `s`: what an earlier call made of the same x.
    """
    s = shrink([x_TK], group, tables, A) if s is None else s
    return multiply(x_TK, weights, biases, s, group, tables), s


def multiply(
    x_TK: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], s: Tensor, group: LinearGroup, tables: LoraTables
) -> list[Tensor]:
    """`forward` behind the shrink."""
    ys = [torch.empty(x_TK.shape[0], width, dtype=x_TK.dtype, device=x_TK.device) for width in group.widths]
    x, x_scale_T, weight_scales = x_TK, None, [None] * group.size
    if group.weight_scale_N is not None:
        x, x_scale_T = quantize_rows([x_TK])
        weight_scales = group.weight_scale_N.split(group.widths)
    for slot, (weight, y) in enumerate(zip(weights, ys, strict=True)):
        product = _Product(B, [x], [weight], y, biases[slot] if biases else None, True, x_scale_T, weight_scales[slot])
        _gemm(product, s, group, slot, tables)
    return ys


def backward(dys: Sequence[Tensor], x_TK: Tensor, s: Tensor, weights: Sequence[Tensor], group: LinearGroup, tables: LoraTables) -> Tensor:
    """dx [T, K] of contiguous dy [T, N_m] of each linear; adds to the gradient sums of every run's rows."""
    ds = shrink(dys, group, tables, B)
    if group.passes_back:
        dx_TK = multiply_back(dys, weights, ds, group, tables)
    else:
        dx_TK = torch.zeros_like(x_TK, memory_format=torch.contiguous_format)
    add_sums(dys, s, group, tables, DB)
    add_sums([x_TK], ds, group, tables, DA)
    return dx_TK


def multiply_back(dys: Sequence[Tensor], weights: Sequence[Tensor], ds: Tensor, group: LinearGroup, tables: LoraTables) -> Tensor:
    """dx [T, K] of `backward`, behind the shrink."""
    dx_TK = torch.empty(dys[0].shape[0], weights[0].shape[1], dtype=dys[0].dtype, device=dys[0].device)
    product = _Product(A, dys, weights, dx_TK, None, transposed=False)
    if group.weight_scale_N is not None:  # one scale per token for all dy: they are one sum
        q_TN, scale_T = quantize_rows(dys, group.weight_scale_N)
        product = _Product(A, q_TN.split(group.widths, 1), [transpose(w) for w in weights], dx_TK, None, True, scale_T)
    _gemm(product, ds, group, 0, tables)
    if tables.has_dropout:
        _add_dropped(dx_TK, ds, group, tables)
    return dx_TK


def _add_dropped(dx_TK: Tensor, ds: Tensor, group: LinearGroup, tables: LoraTables) -> None:
    """dx of the runs with dropout, whose adapters the GEMM left out: their inputs were masked, linear by linear."""
    num_tokens, num_columns = dx_TK.shape
    tile = _DROPPED
    launch: Any = add_dropped_kernel[(triton.cdiv(num_columns, tile.columns), triton.cdiv(num_tokens, tile.tokens))]
    launch(
        dx_TK, ds, tables.runs_S4, tables.tiles_X2, tables.rows_LS5, tables.thresholds_S, tables.module_keys_L, tables.keys_T, group.first,
        num_tokens, num_columns, tables.num_runs, ds.stride(0),
        WHICH=A, M=group.size, W=tables.width, R=min(tables.width, WIDEST_PIECE), BT=tile.tokens, BC=tile.columns,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _three(items: Sequence[Item], filler: Item) -> list[Item]:
    """As the kernels take them; what is not there is never read."""
    return [*items, *[filler] * (LARGEST_GROUP - len(items))]


def shrink(xs: Sequence[Tensor], group: LinearGroup, tables: LoraTables, which: int) -> Tensor:
    """The scaled S of one x for all linears (which A), or dS of one dy for each (which B)."""
    x = xs[0]
    # The GEMM reads all of S: ranks above a run's own, and tokens of no run, must be zeros.
    s = torch.zeros(x.shape[0], group.size * tables.width, dtype=x.dtype, device=x.device)
    splits = tables.has_dropout and which == A
    for slot, x, together in _launches(xs, group.size, tables):
        tile = group.tiles.shrink(x.dtype, x.shape[1], together)
        assert tile.tokens == TILE, f"{tile} is of other tiles than the tables"
        launch: Any = shrink_kernel[(len(tables.items_I2), together + 1 if splits else 1)]
        launch(
            operand(x, [tile.tokens, tile.columns], group.loads), s, tables.runs_S4, tables.items_I2, tables.rows_LS5,
            tables.scales_LS, tables.thresholds_S, tables.module_keys_L, tables.keys_T, group.first + slot, slot, x.shape[1],
            tables.num_runs, s.stride(0),
            WHICH=which, M=together, W=tables.width, BT=tile.tokens, BK=tile.columns, SPLIT=splits,
            LOADS=group.loads, MASKED=_ends_within(group.loads, [x.shape[1]], tile.columns),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return s


def add_sums(xs: Sequence[Tensor], s: Tensor, group: LinearGroup, tables: LoraTables, which: int) -> None:
    """dA of one x for all linears (which dA), or dB of one dy for each (which dB)."""
    piece, splits = min(tables.width, WIDEST_PIECE), tables.has_dropout and which == DA
    for slot, x, together in _launches(xs, group.size, tables):
        tile = group.tiles.sum(x.dtype, x.shape[1], together)
        grid = (triton.cdiv(x.shape[1], tile.columns), tables.num_runs, together + 1 if splits else 1)
        launch: Any = sum_kernel[grid]
        launch(
            operand(x, [tile.tokens, tile.columns], group.loads), operand(s, [tile.tokens, piece], group.loads),
            tables.runs_S4, tables.order_S, tables.samples_P2, tables.rows_LS5, tables.thresholds_S, tables.module_keys_L, tables.keys_T,
            group.first + slot, slot, x.shape[1], tables.num_runs,
            WHICH=which, M=together, W=tables.width, R=piece, BT=tile.tokens, BC=tile.columns, SPLIT=splits,
            LOADS=group.loads, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def _launches(xs: Sequence[Tensor], size: int, tables: LoraTables) -> list[tuple[int, Tensor, int]]:
    """(first linear, x, how many linears share it)."""
    if not tables.num_runs:
        return []
    return [(slot, x, 1) for slot, x in enumerate(xs)] if len(xs) == size else [(0, xs[0], size)]


@dataclass(frozen=True)
class _Product:
    """y = sum of x @ weight.T (`transposed`), or of x @ weight, over the pairs, times the scales of rows and columns; plus bias.

    `which` of the adapters' rows are added: B in the forward, A in the input gradient.
    """

    which: int
    xs: Sequence[Tensor]
    weights: Sequence[Tensor]
    y: Tensor
    bias: Tensor | None
    transposed: bool
    row_scale_T: Tensor | None = None
    column_scale_N: Tensor | None = None


def _gemm(product: _Product, s: Tensor, group: LinearGroup, slot: int, tables: LoraTables) -> None:
    """The base's product with the expand of the group's linears `slot`, `slot + 1`, … inside, as many as there are pairs."""
    x, y, m, linear = product.xs[0], product.y, len(product.xs), group.first + slot
    num_tokens, num_columns = y.shape
    kernel: Kernel = "forward" if product.which == B else "input_gradient"
    tile = group.tiles.gemm(Key(kernel, x.dtype, num_columns, sum(x.shape[1] for x in product.xs), m), num_tokens, group.programs)
    num_tiles = triton.cdiv(num_tokens, tile.rows) * triton.cdiv(num_columns, tile.columns)
    epilogue = (product.bias, product.row_scale_T, product.column_scale_N)
    inners = [x.shape[1] for x in product.xs]
    drops = product.which == A and tables.has_dropout  # `add_dropped_kernel` adds what runs with dropout give to dx
    expands = tables.runs_in_a_tile > 0 and any(tables.weights[linear : linear + m]) and not (drops and tables.all_dropout)
    piece = min(tables.width, WIDEST_PIECE if group.loads == "descriptor" else _POINTER_PIECE)
    rows = _banks(tables, linear, product.which, m, [piece, tile.columns], group.loads) if expands else [None] * m
    step = group.programs if group.loads == "descriptor" else _ONE_TILE_EACH
    programs = min(step, num_tiles)
    launch: Any = gemm_kernel[(programs,)]
    launch(
        *_operands(product, tile, group.loads), operand(s, [tile.rows, piece], group.loads), *_three(rows, None), *epilogue,
        tables.runs_S4, tables.tiles_X2, tables.starts_LS[linear], tables.thresholds_S, num_tokens, num_columns, *_three(inners, 0),
        tables.num_runs, slot * tables.width,
        M=m, ADAPTERS=expands, MANY=expands and (tables.many or drops), SKIP=expands and drops, W=tables.width, R=piece,
        NK=product.transposed, SCALED=product.row_scale_T is not None, HALVES=tile.halves, FIRST=tile.first and product.row_scale_T is None,
        IMPRECISE=tile.inner if tile.promote else None, BM=tile.rows, BN=tile.columns, BK=tile.inner, BAND=tile.band,
        PROGRAMS=step, LOADS=group.loads, MASKED=_ends_within(group.loads, inners, tile.inner),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _operands(product: _Product, tile: Tile, loads: Loads) -> list[Operand | None]:
    """x and weight of up to three linears, and y."""
    weight_block = [tile.columns, tile.inner] if product.transposed else [tile.inner, tile.columns]
    return [
        *_three([operand(x, [tile.rows, tile.inner], loads) for x in product.xs], None),
        *_three([operand(w, weight_block, loads) for w in product.weights], None),
        operand(product.y, [tile.rows, tile.columns // (2 if tile.halves else 1)], loads),
    ]


def _ends_within(loads: Loads, inners: Sequence[int], block: int) -> bool:
    """Whether a loop over blocks needs masks at the end of a sum. A descriptor reads zeros there by itself."""
    return loads == "pointers" and any(inner % block for inner in inners)


def _banks(tables: LoraTables, linear: int, which: int, count: int, block: list[int], loads: Loads) -> list[Operand]:
    """The adapter rows that S of each linear is multiplied by. A linear without adapters has S = 0, so any finite rows will do."""
    banks = [bank[which] if bank else None for bank in tables.weights[linear : linear + count]]
    present = next(rows for rows in banks if rows is not None)
    return [bank_operand(present if rows is None else rows, block, loads) for rows in banks]
