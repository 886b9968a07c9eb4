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
from tlora.kernels.triton_lora import PLACES
from tlora.kernels.triton_tables import first_run, in_run, runs_of_tiles


@triton.jit
def _product(acc, x, w, m0, n0, K, NK: tl.constexpr, BK: tl.constexpr, IMPRECISE: tl.constexpr):
    """acc + x[m0:] @ (w^T if NK else w)[:, n0:]; what x lacks of a last tile is read as zeros."""
    for i in range(tl.cdiv(K, BK)):
        a = x.load([m0, i * BK])
        if NK:
            acc = dot(a, w.load([n0, i * BK]).T, acc, IMPRECISE)
        else:
            acc = dot(a, w.load([i * BK, n0]), acc, ACROSS=True)
    return acc


@triton.jit
def _store(y, acc, m0, n0, HALVES: tl.constexpr):
    """In two halves, or the staging takes the shared memory of a pipeline stage."""
    if HALVES:
        left, right = tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))
        y.store([m0, n0], left.to(y.dtype))
        y.store([m0, n0 + acc.shape[1] // 2], right.to(y.dtype))
    else:
        y.store([m0, n0], acc.to(y.dtype))


@triton.jit
def _place(tile, num_row_tiles, num_column_tiles, BAND: tl.constexpr):
    """Row and column of a tile: BAND rows of tiles at a time, so that they share columns of the weight in L2."""
    band = tile // (BAND * num_column_tiles)
    height = min(num_row_tiles - band * BAND, BAND)
    return band * BAND + (tile % (BAND * num_column_tiles)) % height, (tile % (BAND * num_column_tiles)) // height


@triton.jit
def _add(acc, s_BR, rows, row, n0):
    """acc + S @ R rows of the bank from `row` on. Rows beyond the run's own meet zeros of S."""
    rows_RN = rows.load([row, n0])
    if rows_RN.dtype == tl.float32:  # finite ones must stay so when they are split: zero times Inf is NaN
        rows_RN = tl.minimum(tl.maximum(rows_RN, -LARGEST), LARGEST)
    return dot(s_BR, rows_RN, acc)


@triton.jit
def _expand_one(acc, s, r0, r1, r2, tiles_ptr, starts_ptr, num_runs, s_column, m0, n0,
                M: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """acc + S @ rows of M linears, for a tile whose tokens are one run's, or nobody's with zeros in S. No rank is above W."""
    at = starts_ptr + min(first_run(tiles_ptr, m0), num_runs - 1)
    acc = _add(acc, s.load([m0, s_column]), r0, tl.load(at), n0)
    if M > 1:
        acc = _add(acc, s.load([m0, s_column + W]), r1, tl.load(at + num_runs), n0)
    if M > 2:
        acc = _add(acc, s.load([m0, s_column + 2 * W]), r2, tl.load(at + 2 * num_runs), n0)
    return acc


@triton.jit
def _own_rows(s, m0, column, own):
    """Rows of S that are not `own` become zeros. They are selected, not multiplied: a neighbour's may hold NaN."""
    s_BR = s.load([m0, column])
    return tl.where(own[:, None], s_BR, 0.0).to(s_BR.dtype)


@triton.jit
def _expand_many(acc, s, r0, r1, r2, runs_ptr, tiles_ptr, starts_ptr, thresholds_ptr, num_runs, s_column, m0, n0, T,
                 M: tl.constexpr, SKIP: tl.constexpr, W: tl.constexpr, R: tl.constexpr):  # fmt: skip
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
            acc = _add(acc, _own_rows(s, m0, column, own), r0, tl.load(at) + first, n0)
            if M > 1:
                acc = _add(acc, _own_rows(s, m0, column + W, own), r1, tl.load(at + num_runs) + first, n0)
            if M > 2:
                acc = _add(acc, _own_rows(s, m0, column + 2 * W, own), r2, tl.load(at + 2 * num_runs) + first, n0)
    return acc


@triton.jit
def _expand(acc, s, r0, r1, r2, runs_ptr, tiles_ptr, starts_ptr, thresholds_ptr, num_runs, s_column, m0, n0, T,
            M: tl.constexpr, MANY: tl.constexpr, SKIP: tl.constexpr, W: tl.constexpr, R: tl.constexpr):  # fmt: skip
    if MANY:
        acc = _expand_many(acc, s, r0, r1, r2, runs_ptr, tiles_ptr, starts_ptr, thresholds_ptr, num_runs, s_column, m0, n0, T, M, SKIP, W,
                           R)  # fmt: skip
    else:
        acc = _expand_one(acc, s, r0, r1, r2, tiles_ptr, starts_ptr, num_runs, s_column, m0, n0, M, W)
    return acc


@triton.jit(do_not_specialize=PLACES)
def gemm_kernel(x0, x1, x2, w0, w1, w2, y, s, r0, r1, r2, bias_ptr, x_scale_ptr, w_scale_ptr, runs_ptr, tiles_ptr, starts_ptr,
                thresholds_ptr, T, N, K0, K1, K2, num_runs, s_column,
                M: tl.constexpr, ADAPTERS: tl.constexpr, MANY: tl.constexpr, SKIP: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
                NK: tl.constexpr, FIRST: tl.constexpr, SCALED: tl.constexpr, HALVES: tl.constexpr, IMPRECISE: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    """y = sum over M of x @ (w^T if NK else w) + S @ rows, all loads by descriptor.

    S has W columns for each linear, those from `s_column` on for the first. A run's rows begin at `starts_ptr[linear, run]` of the bank.
    MANY takes any number of runs in a tile, and ranks above R. Without it nothing in the tile loop is a loop but the product, so that for
    M = 1 the two are one pipeline across tiles. FIRST starts from the expand instead of ending with it, tile by tile; which is faster
    depends on the shape (`tiles.py`). A row's bits are the same with MANY and without: products with zeros change nothing.
    """
    num_row_tiles, num_column_tiles = tl.cdiv(T, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), num_row_tiles * num_column_tiles, PROGRAMS, flatten=M == 1 and not FIRST and not MANY):
        row, column = _place(tile, num_row_tiles, num_column_tiles, BAND)
        m0, n0 = row * BM, column * BN
        acc = tl.zeros((BM, BN), tl.float32)
        if ADAPTERS and FIRST:
            acc = _expand(acc, s, r0, r1, r2, runs_ptr, tiles_ptr, starts_ptr, thresholds_ptr, num_runs, s_column, m0, n0, T, M, MANY, SKIP,
                          W, R)  # fmt: skip
        acc = _product(acc, x0, w0, m0, n0, K0, NK, BK, IMPRECISE)
        if M > 1:
            acc = _product(acc, x1, w1, m0, n0, K1, NK, BK, IMPRECISE)
        if M > 2:
            acc = _product(acc, x2, w2, m0, n0, K2, NK, BK, IMPRECISE)
        if SCALED:
            acc *= tl.load(x_scale_ptr + m0 + tl.arange(0, BM), mask=m0 + tl.arange(0, BM) < T, other=0.0)[:, None]
            if w_scale_ptr is not None:
                acc *= tl.load(w_scale_ptr + n0 + tl.arange(0, BN), mask=n0 + tl.arange(0, BN) < N, other=0.0)[None, :]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + n0 + tl.arange(0, BN), mask=n0 + tl.arange(0, BN) < N, other=0.0).to(tl.float32)[None, :]
        if ADAPTERS and not FIRST:
            acc = _expand(acc, s, r0, r1, r2, runs_ptr, tiles_ptr, starts_ptr, thresholds_ptr, num_runs, s_column, m0, n0, T, M, MANY, SKIP,
                          W, R)  # fmt: skip
        _store(y, acc, m0, n0, HALVES)
