"""The base product with the adapters' expand inside: y = x W^T + S B for each row's own adapter. One persistent Triton GEMM.

After its own K loop each tile adds one small product per run of tokens in it. Tile shape and the order of K are fixed by the shape
of the base alone, so a row's bits depend neither on the number of rows, nor on its place, nor on its neighbours. A neighbour's S never
enters a row; where rows of its B do, they meet exact zeros, which is safe because a bank holds finite numbers only (`adapters/bank.py`).
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from tlora.kernels.triton_lora import PLACES, keep_tile


@triton.jit
def _expand_run(acc, s_ptr, rows_ptr, keys_ptr, module_keys_ptr, run, num_runs, linear, slot, first, n, width, t, in_run, dropout,
                threshold, stride_s,
                WHICH: tl.constexpr, W: tl.constexpr, R: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """acc + S[t, slot, r] @ rows[r, n] for the tokens of one run, one linear, and ranks `first + 0..R-1`."""
    at = rows_ptr + (linear * num_runs + run) * 5
    rank = tl.load(at + 4).to(tl.int32)
    base = tl.multiple_of(tl.load(at + WHICH).to(s_ptr.dtype), 16)
    r = first + tl.arange(0, R)
    own = r < rank
    s = tl.load(s_ptr + t.to(tl.int64)[:, None] * stride_s + (slot * W + r)[None, :], mask=in_run[:, None], other=0.0)
    b = tl.load(base + r.to(tl.int64)[:, None] * width + n[None, :], mask=own[:, None] & (n < width)[None, :], other=0.0)
    if DROPOUT and threshold > 0:
        delta = tl.dot(s, b, input_precision=PRECISION)
        keep = keep_tile(keys_ptr, tl.load(module_keys_ptr + linear), t, n, in_run, threshold)
        acc += tl.where(keep, delta * (1 / (1 - dropout)), 0.0)
    else:  # whoever is beside it in the batch: a sum of products rounds otherwise than a product added
        acc = tl.dot(s, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _product(acc, x, w, m0, n0, K, NK: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE: tl.constexpr):
    """acc + x[m0:] @ (w^T if NK else w)[:, n0:]; what x lacks of a last tile is read as zeros."""
    for i in range(tl.cdiv(K, BK)):
        a = x.load([m0, i * BK])
        if NK:
            acc = tl.dot(a, w.load([n0, i * BK]).T, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
        else:
            acc = tl.dot(a, w.load([i * BK, n0]), acc, input_precision=PRECISION)
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
def _expand(acc, s, r0, r1, r2, tiles_ptr, starts_ptr, num_runs, s_column, m0, n0, M: tl.constexpr, RUNS: tl.constexpr, W: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """acc + S @ rows of up to RUNS runs and M linears, by descriptor."""
    lo = tl.load(tiles_ptr + m0 // 128 * 4)  # blocks of S are counted from the first run of 128 tokens, for tiles of 64 rows too
    for j in tl.static_range(RUNS):
        at = starts_ptr + min(lo + j, num_runs - 1)
        acc = tl.dot(s.load([m0, s_column + j * W]), r0.load([tl.load(at), n0]), acc, input_precision=PRECISION)
        if M > 1:
            acc = tl.dot(s.load([m0, s_column + (RUNS + j) * W]), r1.load([tl.load(at + num_runs), n0]), acc, input_precision=PRECISION)
        if M > 2:
            acc = tl.dot(
                s.load([m0, s_column + (2 * RUNS + j) * W]), r2.load([tl.load(at + 2 * num_runs), n0]), acc, input_precision=PRECISION
            )
    return acc


@triton.jit
def _expand_all(acc, s_ptr, runs_ptr, tiles_ptr, rows_ptr, dropouts_ptr, thresholds_ptr, keys_ptr, module_keys_ptr, linear, slot, m0, n0,
                T, N, num_runs, stride_s,
                WHICH: tl.constexpr, M: tl.constexpr, W: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """acc + S @ rows of any number of runs and ranks."""
    t, n = m0 + tl.arange(0, acc.shape[0]), n0 + tl.arange(0, acc.shape[1])
    lo = tl.load(tiles_ptr + m0 // 64 * 2)
    hi = tl.load(tiles_ptr + ((min(m0 + acc.shape[0], T) - 1) // 64) * 2 + 1)
    for run in range(lo, hi):
        in_run = (t >= tl.load(runs_ptr + run * 4)) & (t < tl.load(runs_ptr + run * 4 + 1))
        dropout, threshold = tl.load(dropouts_ptr + run), tl.load(thresholds_ptr + run)
        for m in tl.static_range(M):
            rank = tl.load(rows_ptr + ((linear + m) * num_runs + run) * 5 + 4).to(tl.int32)
            for first in range(0, rank, min(W, 64)):
                acc = _expand_run(acc, s_ptr, rows_ptr, keys_ptr, module_keys_ptr, run, num_runs, linear + m, slot + m, first, n, N, t,
                                  in_run,
                                  dropout, threshold, stride_s, WHICH, W, min(W, 64), DROPOUT, PRECISION)  # fmt: skip
    return acc


@triton.jit(do_not_specialize=PLACES)
def gemm_kernel(x0, x1, x2, w0, w1, w2, y, s, r0, r1, r2, bias_ptr, x_scale_ptr, w_scale_ptr, tiles_ptr, starts_ptr, T, N, K0, K1, K2,
                num_runs,
                s_column, M: tl.constexpr, RUNS: tl.constexpr, W: tl.constexpr, NK: tl.constexpr, FIRST: tl.constexpr, SCALED: tl.constexpr,
                HALVES: tl.constexpr, IMPRECISE: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, BAND: tl.constexpr,
                PROGRAMS: tl.constexpr):  # fmt: skip
    """y = sum over M of x @ (w^T if NK else w) + S @ rows, for tiles of at most RUNS runs, all loads by descriptor.

    Block j of S belongs to the tile's run j and holds zeros for all other tokens; a run's rows begin at `starts_ptr[linear, run]` of the
    bank. Nothing in the tile loop is a loop but the product, so that for M = 1 the two are one pipeline across tiles. FIRST starts from
    the expand instead, tile by tile; which is faster depends on the shape (`tiles.py`).
    """
    num_row_tiles, num_column_tiles = tl.cdiv(T, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), num_row_tiles * num_column_tiles, PROGRAMS, flatten=M == 1 and not FIRST):
        row, column = _place(tile, num_row_tiles, num_column_tiles, BAND)
        m0, n0 = row * BM, column * BN
        acc = tl.zeros((BM, BN), tl.float32)
        if RUNS > 0 and FIRST:
            acc = _expand(acc, s, r0, r1, r2, tiles_ptr, starts_ptr, num_runs, s_column, m0, n0, M, RUNS, W, PRECISION)
        acc = _product(acc, x0, w0, m0, n0, K0, NK, BK, PRECISION, IMPRECISE)
        if M > 1:
            acc = _product(acc, x1, w1, m0, n0, K1, NK, BK, PRECISION, IMPRECISE)
        if M > 2:
            acc = _product(acc, x2, w2, m0, n0, K2, NK, BK, PRECISION, IMPRECISE)
        if SCALED:
            acc *= tl.load(x_scale_ptr + m0 + tl.arange(0, BM), mask=m0 + tl.arange(0, BM) < T, other=0.0)[:, None]
            if w_scale_ptr is not None:
                acc *= tl.load(w_scale_ptr + n0 + tl.arange(0, BN), mask=n0 + tl.arange(0, BN) < N, other=0.0)[None, :]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + n0 + tl.arange(0, BN), mask=n0 + tl.arange(0, BN) < N, other=0.0).to(tl.float32)[None, :]
        if RUNS > 0 and not FIRST:
            acc = _expand(acc, s, r0, r1, r2, tiles_ptr, starts_ptr, num_runs, s_column, m0, n0, M, RUNS, W, PRECISION)
        _store(y, acc, m0, n0, HALVES)


@triton.jit(do_not_specialize=PLACES)
def general_gemm_kernel(x0, x1, x2, w0, w1, w2, y, bias_ptr, x_scale_ptr, w_scale_ptr, s_ptr, runs_ptr, tiles_ptr, rows_ptr, dropouts_ptr,
                        thresholds_ptr, module_keys_ptr, keys_ptr, linear, slot, T, N, K0, K1, K2, num_runs, stride_s,
                        WHICH: tl.constexpr, M: tl.constexpr, W: tl.constexpr, NK: tl.constexpr, FIRST: tl.constexpr,
                        SCALED: tl.constexpr, DROPOUT: tl.constexpr,
                        HALVES: tl.constexpr, IMPRECISE: tl.constexpr, PRECISION: tl.constexpr,
                        BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    """The same for tiles of any number of runs, ranks above 64, and dropout in the input gradient."""
    num_row_tiles, num_column_tiles = tl.cdiv(T, BM), tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), num_row_tiles * num_column_tiles, PROGRAMS):
        row, column = _place(tile, num_row_tiles, num_column_tiles, BAND)
        m0, n0 = row * BM, column * BN
        acc = tl.zeros((BM, BN), tl.float32)
        if FIRST:
            acc = _expand_all(acc, s_ptr, runs_ptr, tiles_ptr, rows_ptr, dropouts_ptr, thresholds_ptr, keys_ptr, module_keys_ptr, linear,
                              slot, m0, n0, T, N,
                              num_runs, stride_s, WHICH, M, W, DROPOUT, PRECISION)  # fmt: skip
        acc = _product(acc, x0, w0, m0, n0, K0, NK, BK, PRECISION, IMPRECISE)
        if M > 1:
            acc = _product(acc, x1, w1, m0, n0, K1, NK, BK, PRECISION, IMPRECISE)
        if M > 2:
            acc = _product(acc, x2, w2, m0, n0, K2, NK, BK, PRECISION, IMPRECISE)
        t, n = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
        if SCALED:
            acc *= tl.load(x_scale_ptr + t, mask=t < T, other=0.0)[:, None]
            if w_scale_ptr is not None:
                acc *= tl.load(w_scale_ptr + n, mask=n < N, other=0.0)[None, :]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if not FIRST:
            acc = _expand_all(acc, s_ptr, runs_ptr, tiles_ptr, rows_ptr, dropouts_ptr, thresholds_ptr, keys_ptr, module_keys_ptr, linear,
                              slot, m0, n0, T, N,
                              num_runs, stride_s, WHICH, M, W, DROPOUT, PRECISION)  # fmt: skip
        _store(y, acc, m0, n0, HALVES)
