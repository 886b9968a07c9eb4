"""The low-rank halves of a linear with many adapters, as Triton kernels: shrink (S = x A^T, dS = dy B^T) and gradient sums (dA, dB).

Same mathematics as `reference.py`. Rows are selected, never multiplied by a mask, so nothing of a neighbour enters; each row of S
is a function of its own token, and each gradient is summed sample by sample in the job's order, on from what is in the sum
already: bits depend neither on neighbours, nor on places, nor on how a global batch is cut into micro-batches.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

PLACES = ["linear", "slot", "num_runs", "s_column"]  # else Triton compiles once more for a first linear, a second, and every sixteenth


@triton.jit
def _mix(h):
    """`dropout._mix_`: lowbias32."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def keep_tile(keys_ptr, module_key, rows, cols, in_run, threshold):
    """bool [rows, cols]: `dropout.keep_mask` for a tile; `threshold` is int(probability * 2^31)."""
    keys = tl.load(keys_ptr + rows, mask=in_run, other=0).to(tl.uint32, bitcast=True)
    row = _mix(keys ^ module_key.to(tl.uint32, bitcast=True))
    column = _mix(cols.to(tl.uint32) * 0x9E3779B9)
    bits = _mix(row[:, None] ^ column[None, :]) & 0x7FFFFFFF
    return bits.to(tl.int32) >= threshold


@triton.jit
def _row_pointers(rows_ptr, linear, num_runs, run, which: tl.constexpr, first, width, R: tl.constexpr, M: tl.constexpr, like):
    """Pointers to rows `first + 0..R-1` of each of M linears, [M' * R] with M' a power of two, which of them exist, and of which linear."""
    j = tl.arange(0, R * (1 if M == 1 else 2 if M == 2 else 4))
    member, r = j // R, first + j % R
    at = rows_ptr + ((linear + member) * num_runs + run) * 5
    real = member < M
    rank = tl.load(at + 4, mask=real, other=0).to(tl.int32)
    base = tl.load(at + which, mask=real, other=0).to(like.dtype)
    exists = real & (r < rank)
    return tl.multiple_of(base + tl.where(exists, r, 0).to(tl.int64) * width, 16), exists, member, r


@triton.jit
def _shrink_run(x, s_ptr, rows_ptr, scales_ptr, keys_ptr, module_key, t0, t1, threshold, factor, run, num_runs, linear, slot, block,
                first, start, K, stride_s,
                WHICH: tl.constexpr, M: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
                BT: tl.constexpr, BK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """S of the tokens of one run in one tile, ranks `first + 0..R-1` of M linears. Other tokens' rows are computed and not stored."""
    t = start + tl.arange(0, BT)
    in_run = (t >= t0) & (t < t1)
    like = tl.cast(0, tl.int64).to(tl.pointer_type(x.dtype))
    rows, exists, member, r = _row_pointers(rows_ptr, linear, num_runs, run, WHICH, first, K, R, M, like)
    k = tl.arange(0, BK)
    w_at = rows[:, None] + k[None, :]
    s = tl.zeros((BT, R * (1 if M == 1 else 2 if M == 2 else 4)), tl.float32)
    for k0 in range(0, K, BK):
        a = x.load([start, k0])
        if DROPOUT:
            keep = keep_tile(keys_ptr, module_key, t, k0 + k, in_run, threshold)
            a = tl.where(keep, a * factor, 0.0).to(x.dtype)
        w = tl.load(w_at + k0, mask=exists[:, None] & (k0 + k < K)[None, :], other=0.0)
        s = tl.dot(a, tl.trans(w), s, input_precision=PRECISION)
    scale = tl.load(scales_ptr + (linear + member) * num_runs + run, mask=member < M, other=0.0)
    s_at = s_ptr + t.to(tl.int64)[:, None] * stride_s + (((slot + member) * BLOCKS + block) * W + r)[None, :]
    tl.store(s_at, (s * scale[None, :]).to(s_ptr.dtype.element_ty), mask=in_run[:, None] & ((member < M) & (r < W))[None, :])


@triton.jit(do_not_specialize=PLACES)
def shrink_kernel(x, s_ptr, runs_ptr, tiles_ptr, rows_ptr, scales_ptr, dropouts_ptr, thresholds_ptr, module_keys_ptr, keys_ptr, linear,
                  slot, T, K, num_runs, stride_s,
                  WHICH: tl.constexpr, M: tl.constexpr, BLOCKS: tl.constexpr, W: tl.constexpr,
                  BT: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """scale * x @ rows^T of M linears from `linear` on, for each run in a tile of BT tokens. Grid (tiles)."""
    start = tl.program_id(0) * BT
    lo = tl.load(tiles_ptr + start // 64 * 2)
    hi = tl.load(tiles_ptr + ((min(start + BT, T) - 1) // 64) * 2 + 1)
    first_run = tl.load(tiles_ptr + start // 128 * 4)  # of the GEMM's row tile, whose run j has block j of S
    for run in range(lo, hi):
        block = 0
        if BLOCKS > 1:
            block = run - first_run
        t0, t1 = tl.load(runs_ptr + run * 4), tl.load(runs_ptr + run * 4 + 1)
        rank = 0
        for m in tl.static_range(M):
            rank = max(rank, tl.load(rows_ptr + ((linear + m) * num_runs + run) * 5 + 4).to(tl.int32))
        threshold, factor, key = 0, 1.0, 0
        if SPLIT:  # this launch takes the runs with dropout, or those without: a neighbour's must not change how mine is computed
            threshold = tl.load(thresholds_ptr + run)
            if (threshold > 0) != DROPOUT:
                rank = 0
        if DROPOUT:
            factor, key = 1 / (1 - tl.load(dropouts_ptr + run)), tl.load(module_keys_ptr + linear)
        if rank == 0:
            pass
        elif rank <= 16 or W == 16:
            _shrink_run(x, s_ptr, rows_ptr, scales_ptr, keys_ptr, key, t0, t1, threshold, factor, run, num_runs, linear, slot, block, 0,
                        start, K, stride_s,
                        WHICH, M, BLOCKS, 16, W, BT, BK, DROPOUT, PRECISION)  # fmt: skip
        elif rank <= 32 or W == 32:
            _shrink_run(x, s_ptr, rows_ptr, scales_ptr, keys_ptr, key, t0, t1, threshold, factor, run, num_runs, linear, slot, block, 0,
                        start, K, stride_s,
                        WHICH, M, BLOCKS, 32, W, BT, BK, DROPOUT, PRECISION)  # fmt: skip
        else:
            for first in range(0, rank, 64):
                _shrink_run(x, s_ptr, rows_ptr, scales_ptr, keys_ptr, key, t0, t1, threshold, factor, run, num_runs, linear, slot, block,
                            first, start, K,
                            stride_s, WHICH, M, BLOCKS, 64, W, BT, BK, DROPOUT, PRECISION)  # fmt: skip


@triton.jit
def _sum_run(x, s_ptr, samples_ptr, tiles_ptr, rows_ptr, keys_ptr, module_key, p0, p1, threshold, factor, run, num_runs, linear, slot,
             first, c0, K, stride_s,
             WHICH: tl.constexpr, M: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
             BT: tl.constexpr, BC: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """rows += s^T x over the samples of one run, for BC columns and ranks `first + 0..R-1` of M linears."""
    c = c0 + tl.arange(0, BC)
    like = tl.cast(0, tl.int64).to(tl.pointer_type(tl.float32))
    rows, exists, member, r = _row_pointers(rows_ptr, linear, num_runs, run, WHICH, first, K, R, M, like)
    out_at = rows[None, :] + c[:, None]
    mask = (c < K)[:, None] & exists[None, :]
    total = tl.load(out_at, mask=mask, other=0.0)
    s_column = (slot + tl.minimum(member, M - 1)) * BLOCKS * W + r  # ranks that are not there are read too, for wide loads, and not stored
    for p in range(p0, p1):
        t0, t1 = tl.load(samples_ptr + p * 2), tl.load(samples_ptr + p * 2 + 1)
        full = t0 + (t1 - t0) // BT * BT
        for start in range(t0, full, BT):
            t = start + tl.arange(0, BT)
            a = x.load([start, c0])
            if DROPOUT:
                keep = keep_tile(keys_ptr, module_key, t, c, t < t1, threshold)
                a = tl.where(keep, a * factor, 0.0).to(x.dtype)
            s_row = t.to(tl.int64) * stride_s
            if BLOCKS > 1:
                s_row += (run - tl.load(tiles_ptr + t // 128 * 4)) * W
            s = tl.load(s_ptr + s_row[:, None] + s_column[None, :])
            total = tl.dot(tl.trans(a), s, total, input_precision=PRECISION)
        if full < t1:  # the tokens behind the sample's last are another's: selected away in both operands
            t = full + tl.arange(0, BT)
            own = t < t1
            a = tl.where(own[:, None], x.load([full, c0]), 0.0)
            if DROPOUT:
                keep = keep_tile(keys_ptr, module_key, t, c, own, threshold)
                a = tl.where(keep, a * factor, 0.0).to(x.dtype)
            s_row = t.to(tl.int64) * stride_s
            if BLOCKS > 1:
                s_row += (run - tl.load(tiles_ptr + t // 128 * 4, mask=own, other=0)) * W
            s = tl.load(s_ptr + s_row[:, None] + s_column[None, :], mask=own[:, None], other=0.0)
            total = tl.dot(tl.trans(a), s, total, input_precision=PRECISION)
    tl.store(out_at, total, mask=mask)


@triton.jit(do_not_specialize=PLACES)
def sum_kernel(x, s_ptr, runs_ptr, order_ptr, samples_ptr, tiles_ptr, rows_ptr, dropouts_ptr, thresholds_ptr, module_keys_ptr, keys_ptr,
               linear, slot, K, num_runs,
               stride_s, WHICH: tl.constexpr, M: tl.constexpr, BLOCKS: tl.constexpr, W: tl.constexpr,
               BT: tl.constexpr, BC: tl.constexpr, SPLIT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Gradient sums of each run's rows of M linears from `linear` on: += s^T x. Grid (columns / BC, runs), the longest runs first."""
    c0, run = tl.program_id(0) * BC, tl.load(order_ptr + tl.program_id(1))
    rank = 0
    for m in tl.static_range(M):
        rank = max(rank, tl.load(rows_ptr + ((linear + m) * num_runs + run) * 5 + 4).to(tl.int32))
    threshold, factor, key = 0, 1.0, 0
    if SPLIT:
        threshold = tl.load(thresholds_ptr + run)
        if (threshold > 0) != DROPOUT:
            rank = 0
    if rank > 0:
        p0, p1 = tl.load(runs_ptr + run * 4 + 2), tl.load(runs_ptr + run * 4 + 3)
        if DROPOUT:
            factor, key = 1 / (1 - tl.load(dropouts_ptr + run)), tl.load(module_keys_ptr + linear)
        if rank <= 16 or W == 16:
            _sum_run(x, s_ptr, samples_ptr, tiles_ptr, rows_ptr, keys_ptr, key, p0, p1, threshold, factor, run, num_runs, linear, slot, 0,
                     c0, K, stride_s,
                     WHICH, M, BLOCKS, 16, W, BT, BC, DROPOUT, PRECISION)  # fmt: skip
        elif rank <= 32 or W == 32:
            _sum_run(x, s_ptr, samples_ptr, tiles_ptr, rows_ptr, keys_ptr, key, p0, p1, threshold, factor, run, num_runs, linear, slot, 0,
                     c0, K, stride_s,
                     WHICH, M, BLOCKS, 32, W, BT, BC, DROPOUT, PRECISION)  # fmt: skip
        else:
            for first in range(0, rank, 64):
                _sum_run(x, s_ptr, samples_ptr, tiles_ptr, rows_ptr, keys_ptr, key, p0, p1, threshold, factor, run, num_runs, linear,
                         slot, first, c0, K,
                         stride_s, WHICH, M, BLOCKS, 64, W, BT, BC, DROPOUT, PRECISION)  # fmt: skip
