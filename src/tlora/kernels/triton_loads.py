"""How a kernel reads and writes a tile of a matrix: by tensor descriptor, or by pointer. One constexpr of the card's class decides.

A matrix is a descriptor, or the pair (pointer, elements between two rows) of `fused_linear.py`. By descriptor, what lies beyond an edge is
zero. By pointer it is the matrix's last row again, or its first columns, so that a loop over full blocks has no masks. What a kernel makes
of such rows and columns it never stores, or it multiplies them by zeros: both ways give the same bits.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(matrix, row, column, row_end, column_end, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOADS: tl.constexpr,
              MASKED: tl.constexpr = False):  # fmt: skip
    """[ROWS, COLUMNS] from (row, column) on; `column` and `column_end` are multiples of 16.

    By pointer an end that is None is not looked for: the caller knows that the tile lies within. MASKED gives zeros beyond the ends.
    """
    if LOADS == "descriptor":
        tile = matrix.load([row, column])
    else:
        i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        mask = None
        if MASKED:
            inside_rows, inside_columns = row + i < row_end, column + j < column_end
            mask = inside_rows[:, None] & inside_columns[None, :]
        else:
            if row_end is not None:
                i = tl.minimum(i, row_end - 1 - row)
            if column_end is not None:
                j = tl.where(column + j < column_end, j, j % 16 - column)
                j = tl.max_contiguous(tl.multiple_of(j, 16), 16)
        stride = matrix[1]
        # 64 bits for the tile's place, 32 within it: the loop over K then keeps offsets in registers, and moves one number
        at = matrix[0] + row * tl.cast(stride, tl.int64) + tl.multiple_of(column, 16)
        tile = tl.load(at + (i[:, None] * stride + j[None, :]), mask=mask, other=0.0 if MASKED else None)
    return tile


@triton.jit
def store_tile(matrix, tile, row, column, row_end, column_end, LOADS: tl.constexpr, HALVES: tl.constexpr):
    """What lies beyond the ends is not stored. HALVES: by descriptor in two, or the staging takes the shared memory of a stage."""
    if LOADS == "descriptor":
        if HALVES:
            left, right = tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))
            matrix.store([row, column], left.to(matrix.dtype))
            matrix.store([row, column + tile.shape[1] // 2], right.to(matrix.dtype))
        else:
            matrix.store([row, column], tile.to(matrix.dtype))
    else:
        i, j = tl.arange(0, tile.shape[0]), tl.arange(0, tile.shape[1])
        stride = matrix[1]
        at = matrix[0] + row * tl.cast(stride, tl.int64) + tl.multiple_of(column, 16)
        mask = (row + i < row_end)[:, None] & (column + j < column_end)[None, :]
        tl.store(at + (i[:, None] * stride + j[None, :]), tile.to(matrix[0].dtype.element_ty), mask=mask)
