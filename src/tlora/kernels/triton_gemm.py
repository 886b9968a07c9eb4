"""The base product with the adapters' expand inside: y = x W^T + S B for each row's own adapter. One persistent Triton GEMM.

After its own K loop each tile adds one small product per run of tokens in it. The order of K is fixed by the shape of the base alone, so
a row's bits depend neither on the number of rows, by which a tile's size goes, nor on its place, nor on its neighbours. A neighbour's S
never enters a row; where rows of its B do, they meet exact zeros, which is safe because a bank holds finite numbers only
(`adapters/bank.py`).
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from tlora.kernels.triton_dot import LARGEST, dot
from tlora.kernels.triton_loads import load_tile, store_tile
from tlora.kernels.triton_lora import PLACES
from tlora.kernels.triton_tables import first_run, in_run, runs_of_tiles


@triton.jit
def _product(acc, x, w, m0, n0, T, N, K, NK: tl.constexpr, BK: tl.constexpr, IMPRECISE: tl.constexpr, LOADS: tl.constexpr,
             MASKED: tl.constexpr):  # fmt: skip
    """acc + x[m0:] @ (w^T if NK else w)[:, n0:]. MASKED: by pointer, K ends within a block, and zeros fill it up."""
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    end = K if MASKED else None
    for i in range(tl.cdiv(K, BK)):
        a = load_tile(x, m0, i * BK, T, end, BM, BK, LOADS, MASKED)
        if NK:
            acc = dot(a, load_tile(w, n0, i * BK, N, end, BN, BK, LOADS, MASKED).T, acc, IMPRECISE)
        else:
            acc = dot(a, load_tile(w, i * BK, n0, end, N, BK, BN, LOADS, MASKED), acc, ACROSS=True)
    return acc


@triton.jit
def _place(tile, num_row_tiles, num_column_tiles, BAND: tl.constexpr):
    """Row and column of a tile: BAND rows of tiles at a time, so that they share columns of the weight in L2."""
    band = tile // (BAND * num_column_tiles)
    height = min(num_row_tiles - band * BAND, BAND)
    return band * BAND + (tile % (BAND * num_column_tiles)) % height, (tile % (BAND * num_column_tiles)) // height


@triton.jit
def _add(acc, s_BR, rows, row, n0, N, LOADS: tl.constexpr):
    """acc + S @ R rows of the bank from `row` on. Rows beyond the run's own meet zeros of S."""
    end = None if LOADS == "descriptor" else rows[2]
    rows_RN = load_tile(rows, row, n0, end, N, s_BR.shape[1], acc.shape[1], LOADS)
    if rows_RN.dtype == tl.float32:  # finite ones must stay so when they are split: zero times Inf is NaN
        rows_RN = tl.minimum(tl.maximum(rows_RN, -LARGEST), LARGEST)
    return dot(s_BR, rows_RN, acc)


@triton.jit
def _expand_piece(acc, s, r0, r1, r2, at, num_runs, column, first, m0, n0, T, N,
                  M: tl.constexpr, W: tl.constexpr, R: tl.constexpr, LOADS: tl.constexpr):  # fmt: skip
    """acc + S @ R rows of each of M linears, those from `first` on, for a tile whose tokens are one run's, or no run's with zeros in S."""
    acc = _add(acc, load_tile(s, m0, column, T, None, acc.shape[0], R, LOADS), r0, tl.load(at) + first, n0, N, LOADS)
    if M > 1:
        s_BR = load_tile(s, m0, column + W, T, None, acc.shape[0], R, LOADS)
        acc = _add(acc, s_BR, r1, tl.load(at + num_runs) + first, n0, N, LOADS)
    if M > 2:
        s_BR = load_tile(s, m0, column + 2 * W, T, None, acc.shape[0], R, LOADS)
        acc = _add(acc, s_BR, r2, tl.load(at + 2 * num_runs) + first, n0, N, LOADS)
    return acc


@triton.jit
def _expand_one(acc, s, r0, r1, r2, tiles_ptr, starts_ptr, num_runs, s_column, m0, n0, T, N,
                M: tl.constexpr, W: tl.constexpr, R: tl.constexpr, LOADS: tl.constexpr):  # fmt: skip
    """The same for all ranks, of which none is above W."""
    at = starts_ptr + min(first_run(tiles_ptr, m0), num_runs - 1)
    if W == R:
        acc = _expand_piece(acc, s, r0, r1, r2, at, num_runs, s_column, 0, m0, n0, T, N, M, W, R, LOADS)
    else:
        for first in tl.range(0, W, R, num_stages=1):
            acc = _expand_piece(acc, s, r0, r1, r2, at, num_runs, s_column + first, first, m0, n0, T, N, M, W, R, LOADS)
    return acc


@triton.jit
def _own_rows(s, m0, column, T, own, R: tl.constexpr, LOADS: tl.constexpr):
    """Rows of S that are not `own` become zeros. They are selected, not multiplied: a neighbour's may hold NaN."""
    s_BR = load_tile(s, m0, column, T, None, own.shape[0], R, LOADS)
    return tl.where(own[:, None], s_BR, 0.0).to(s_BR.dtype)


@triton.jit
def _expand_many(acc, s, r0, r1, r2, runs_ptr, tiles_ptr, starts_ptr, thresholds_ptr, num_runs, s_column, m0, n0, T, N,
                 M: tl.constexpr, SKIP: tl.constexpr, W: tl.constexpr, R: tl.constexpr, LOADS: tl.constexpr):  # fmt: skip
    """The same for any number of runs in a tile, and any rank, R at a time. SKIP leaves out the runs with dropout."""
    t = m0 + tl.arange(0, acc.shape[0])
    lo, hi = runs_of_tiles(tiles_ptr, m0, T, acc.shape[0])
    for run in tl.range(lo, hi, num_stages=1):  # stages of it would take the product's shared memory
        own = in_run(runs_ptr, run, t)
        if SKIP:
            own &= tl.load(thresholds_ptr + run) == 0
        at = starts_ptr + run
        for first in tl.range(0, W, R, num_stages=1):
            column = s_column + first
            acc = _add(acc, _own_rows(s, m0, column, T, own, R, LOADS), r0, tl.load(at) + first, n0, N, LOADS)
            if M > 1:
                acc = _add(acc, _own_rows(s, m0, column + W, T, own, R, LOADS), r1, tl.load(at + num_runs) + first, n0, N, LOADS)
            if M > 2:
                acc = _add(acc, _own_rows(s, m0, column + 2 * W, T, own, R, LOADS), r2, tl.load(at + 2 * num_runs) + first, n0, N, LOADS)
    return acc


@triton.jit
def _expand(acc, s, r0, r1, r2, runs_ptr, tiles_ptr, starts_ptr, thresholds_ptr, num_runs, s_column, m0, n0, T, N,
            M: tl.constexpr, MANY: tl.constexpr, SKIP: tl.constexpr, W: tl.constexpr, R: tl.constexpr, LOADS: tl.constexpr):  # fmt: skip
    if MANY:
        acc = _expand_many(acc, s, r0, r1, r2, runs_ptr, tiles_ptr, starts_ptr, thresholds_ptr, num_runs, s_column, m0, n0, T, N, M, SKIP,
                           W, R, LOADS)  # fmt: skip
    else:
        acc = _expand_one(acc, s, r0, r1, r2, tiles_ptr, starts_ptr, num_runs, s_column, m0, n0, T, N, M, W, R, LOADS)
    return acc


@triton.jit(do_not_specialize=PLACES)
def gemm_kernel(x0, x1, x2, w0, w1, w2, y, s, r0, r1, r2, bias_ptr, x_scale_ptr, w_scale_ptr, runs_ptr, tiles_ptr, starts_ptr,
                thresholds_ptr, T, N, K0, K1, K2, num_runs, s_column,
                M: tl.constexpr, ADAPTERS: tl.constexpr, MANY: tl.constexpr, SKIP: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
                NK: tl.constexpr, FIRST: tl.constexpr, SCALED: tl.constexpr, HALVES: tl.constexpr, IMPRECISE: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr, PROGRAMS: tl.constexpr,
                LOADS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """y = sum over M of x @ (w^T if NK else w) + S @ rows. Matrices as in `triton_loads.py`; by pointer, the adapters' rows have a third
    part, their number, and MASKED says that some K is no multiple of BK.

    S has W columns for each linear, those from `s_column` on for the first. A run's rows begin at `starts_ptr[linear, run]` of the bank.
    MANY takes any number of runs in a tile, and ranks above R. Without it nothing in the tile loop is a loop but the product, so that for
    M = 1 by descriptor the two are one pipeline across tiles. FIRST starts from the expand instead of ending with it, tile by tile; which
    is faster depends on the shape (`tiles.py`). A row's bits are the same with MANY and without: products with zeros change nothing.
    """
    num_row_tiles, num_column_tiles = tl.cdiv(T, BM), tl.cdiv(N, BN)
    FLATTEN: tl.constexpr = LOADS == "descriptor" and M == 1 and not FIRST and not MANY
    for tile in tl.range(tl.program_id(0), num_row_tiles * num_column_tiles, PROGRAMS, flatten=FLATTEN):
        row, column = _place(tile, num_row_tiles, num_column_tiles, BAND)
        m0, n0 = row * BM, column * BN
        acc = tl.zeros((BM, BN), tl.float32)
        if ADAPTERS and FIRST:
            acc = _expand(acc, s, r0, r1, r2, runs_ptr, tiles_ptr, starts_ptr, thresholds_ptr, num_runs, s_column, m0, n0, T, N, M, MANY,
                          SKIP, W, R, LOADS)  # fmt: skip
        acc = _product(acc, x0, w0, m0, n0, T, N, K0, NK, BK, IMPRECISE, LOADS, MASKED)
        if M > 1:
            acc = _product(acc, x1, w1, m0, n0, T, N, K1, NK, BK, IMPRECISE, LOADS, MASKED)
        if M > 2:
            acc = _product(acc, x2, w2, m0, n0, T, N, K2, NK, BK, IMPRECISE, LOADS, MASKED)
        if SCALED:
            acc *= tl.load(x_scale_ptr + m0 + tl.arange(0, BM), mask=m0 + tl.arange(0, BM) < T, other=0.0)[:, None]
            if w_scale_ptr is not None:
                acc *= tl.load(w_scale_ptr + n0 + tl.arange(0, BN), mask=n0 + tl.arange(0, BN) < N, other=0.0)[None, :]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + n0 + tl.arange(0, BN), mask=n0 + tl.arange(0, BN) < N, other=0.0).to(tl.float32)[None, :]
        if ADAPTERS and not FIRST:
            acc = _expand(acc, s, r0, r1, r2, runs_ptr, tiles_ptr, starts_ptr, thresholds_ptr, num_runs, s_column, m0, n0, T, N, M, MANY,
                          SKIP, W, R, LOADS)  # fmt: skip
        store_tile(y, acc, m0, n0, T, N, LOADS, HALVES)
