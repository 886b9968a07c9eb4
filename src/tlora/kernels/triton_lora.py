"""The low-rank halves of a linear with many adapters, as Triton kernels: shrink (S = x A^T, dS = dy B^T) and gradient sums (dA, dB).

Same mathematics as `reference.py`. Rows are selected, never multiplied by a mask, so nothing of a neighbour enters; each row of S
is a function of its own token, and each gradient is summed sample by sample in the job's order, on from what is in the sum
already: bits depend neither on neighbours, nor on places, nor on how a global batch is cut into micro-batches.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from tlora.kernels.triton_dot import dot
from tlora.kernels.triton_loads import load_tile
from tlora.kernels.triton_tables import in_run, item_at, rank_of, rows_of, run_samples, run_tokens, runs_of_tiles, sample_tokens

# Else Triton compiles once more for a first linear, a second, and every sixteenth, and for numbers of tokens that are multiples of 16.
PLACES = ["linear", "slot", "num_runs", "s_column", "T"]


@triton.jit
def _mix(h):
    """`dropout._mix_`: lowbias32."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def keep_tile(keys_ptr, module_key, rows, cols, own, threshold):
    """bool [rows, cols]: `dropout.keep_mask` for a tile; `threshold` is int(probability * 2^31)."""
    keys = tl.load(keys_ptr + rows, mask=own, other=0).to(tl.uint32, bitcast=True)
    row = _mix(keys ^ module_key.to(tl.uint32, bitcast=True))
    column = _mix(cols.to(tl.uint32) * 0x9E3779B9)
    bits = _mix(row[:, None] ^ column[None, :]) & 0x7FFFFFFF
    return bits.to(tl.int32) >= threshold


@triton.jit
def _largest_rank(rows_ptr, linear, num_runs, run, M: tl.constexpr):
    rank = 0
    for m in tl.static_range(M):
        rank = max(rank, rank_of(rows_ptr, linear + m, num_runs, run))
    return rank


@triton.jit
def _turn(rows_ptr, thresholds_ptr, module_keys_ptr, linear, num_runs, run, M: tl.constexpr, SPLIT: tl.constexpr, DROPOUT: tl.constexpr):
    """Largest rank of a run at M linears, its dropout's threshold, and its key. With SPLIT the rank is 0 where it is not the run's turn:
    only runs with dropout have it (DROPOUT), or only those without.
    """
    rank = _largest_rank(rows_ptr, linear, num_runs, run, M)
    threshold, key = 0, 0
    if SPLIT:
        threshold = tl.load(thresholds_ptr + run)
        if (threshold > 0) != DROPOUT:
            rank = 0
    if DROPOUT:
        key = tl.load(module_keys_ptr + linear)
    return rank, threshold, key


@triton.jit
def _shrink(s, a, base, offsets, mask):
    """s + a @ rows^T."""
    return dot(a, tl.trans(tl.load(base + offsets, mask=mask, other=0.0)), s)


@triton.jit
def _store_scaled(s, s_at, scale_ptr, mask, own):
    tl.store(s_at, (s * tl.load(scale_ptr)).to(s_at.dtype.element_ty), mask=mask & own)


@triton.jit
def _dropped_out(a, keys_ptr, module_key, t, c, own, threshold, DROPOUT: tl.constexpr):
    """a as the adapter of a run with dropout sees it; what is kept is scaled in S (`build_tables`)."""
    if DROPOUT:
        a = tl.where(keep_tile(keys_ptr, module_key, t, c, own, threshold), a, 0.0).to(a.dtype)
    return a


@triton.jit
def _shrink_run(x, s_ptr, rows_ptr, scales_ptr, keys_ptr, module_key, t0, t1, threshold, run, num_runs, linear, slot, first, start, K,
                stride_s,
                WHICH: tl.constexpr, M: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
                BT: tl.constexpr, BK: tl.constexpr, DROPOUT: tl.constexpr, LOADS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """S of the tokens of one run in one tile, ranks `first + 0..R-1` of M linears. Other tokens' rows are computed and not stored."""
    t, r, k = start + tl.arange(0, BT), first + tl.arange(0, R), tl.arange(0, BK)
    own = (t >= t0) & (t < t1)
    base0, rank0 = rows_of(rows_ptr, linear, num_runs, run, WHICH, s_ptr.dtype.element_ty)
    base1, rank1 = rows_of(rows_ptr, linear + (M > 1), num_runs, run, WHICH, s_ptr.dtype.element_ty)
    base2, rank2 = rows_of(rows_ptr, linear + 2 * (M > 2), num_runs, run, WHICH, s_ptr.dtype.element_ty)
    offsets = r[:, None] * K + k[None, :]  # shared by the linears: pointers of each would spill
    s0 = tl.zeros((BT, R), tl.float32)
    s1, s2 = s0, s0
    for k0 in range(0, K, BK):
        a = load_tile(x, start, k0, t1, K if MASKED else None, BT, BK, LOADS, MASKED)
        a = _dropped_out(a, keys_ptr, module_key, t, k0 + k, own, threshold, DROPOUT)
        inside = (k0 + k < K)[None, :]
        s0 = _shrink(s0, a, base0 + k0, offsets, (r < rank0)[:, None] & inside)
        if M > 1:
            s1 = _shrink(s1, a, base1 + k0, offsets, (r < rank1)[:, None] & inside)
        if M > 2:
            s2 = _shrink(s2, a, base2 + k0, offsets, (r < rank2)[:, None] & inside)
    s_at = s_ptr + t.to(tl.int64)[:, None] * stride_s + (slot * W + r)[None, :]
    scale_at = scales_ptr + linear * num_runs + run
    _store_scaled(s0, s_at, scale_at, own[:, None], (r < rank0)[None, :])
    if M > 1:
        _store_scaled(s1, s_at + W, scale_at + num_runs, own[:, None], (r < rank1)[None, :])
    if M > 2:
        _store_scaled(s2, s_at + 2 * W, scale_at + 2 * num_runs, own[:, None], (r < rank2)[None, :])


@triton.jit
def _shrink_item(x, s_ptr, runs_ptr, rows_ptr, scales_ptr, thresholds_ptr, module_keys_ptr, keys_ptr, linear, slot, start, run, K,
                 num_runs, stride_s,
                 WHICH: tl.constexpr, M: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                 SPLIT: tl.constexpr, DROPOUT: tl.constexpr, LOADS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """S of one run in one tile. With SPLIT only if the run has dropout (DROPOUT), or only if it has none."""
    t0, t1 = run_tokens(runs_ptr, run)
    rank, threshold, key = _turn(rows_ptr, thresholds_ptr, module_keys_ptr, linear, num_runs, run, M, SPLIT, DROPOUT)
    if rank == 0:
        pass
    elif rank <= 16 or W == 16:
        _shrink_run(x, s_ptr, rows_ptr, scales_ptr, keys_ptr, key, t0, t1, threshold, run, num_runs, linear, slot, 0, start, K,
                    stride_s, WHICH, M, 16, W, BT, BK, DROPOUT, LOADS, MASKED)  # fmt: skip
    elif rank <= 32 or W == 32:
        _shrink_run(x, s_ptr, rows_ptr, scales_ptr, keys_ptr, key, t0, t1, threshold, run, num_runs, linear, slot, 0, start, K,
                    stride_s, WHICH, M, 32, W, BT, BK, DROPOUT, LOADS, MASKED)  # fmt: skip
    else:
        for first in range(0, rank, 64):
            _shrink_run(x, s_ptr, rows_ptr, scales_ptr, keys_ptr, key, t0, t1, threshold, run, num_runs, linear, slot, first, start, K,
                        stride_s, WHICH, M, 64, W, BT, BK, DROPOUT, LOADS, MASKED)  # fmt: skip


@triton.jit(do_not_specialize=PLACES)
def shrink_kernel(x, s_ptr, runs_ptr, items_ptr, rows_ptr, scales_ptr, thresholds_ptr, module_keys_ptr, keys_ptr, linear, slot, K,
                  num_runs, stride_s,
                  WHICH: tl.constexpr, M: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                  SPLIT: tl.constexpr, LOADS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """scale * x @ rows^T of M linears from `linear` on. S has W columns for each linear.

    Grid (items, 1): each item is one run in one tile of BT tokens. A program that did all runs of its tile, one after another, would be
    waited for by all others. With SPLIT, which is for runs with dropout, (items, M + 1): each linear has an x of its own for those, so
    that programs m < M do linear m for them and the last does all linears for the others. A neighbour's dropout changes no bit of mine.
    """
    start, run = item_at(items_ptr, tl.program_id(0))
    member = tl.program_id(1)
    if run >= 0:
        if SPLIT and member < M:
            _shrink_item(x, s_ptr, runs_ptr, rows_ptr, scales_ptr, thresholds_ptr, module_keys_ptr, keys_ptr, linear + member,
                         slot + member, start, run, K, num_runs, stride_s, WHICH, 1, W, BT, BK, True, True, LOADS,
                         MASKED)  # fmt: skip
        else:
            _shrink_item(x, s_ptr, runs_ptr, rows_ptr, scales_ptr, thresholds_ptr, module_keys_ptr, keys_ptr, linear, slot, start, run, K,
                         num_runs, stride_s, WHICH, M, W, BT, BK, SPLIT, False, LOADS, MASKED)  # fmt: skip


@triton.jit
def _own_s(s, start, end, column, own, R: tl.constexpr, LOADS: tl.constexpr):
    s_TR = load_tile(s, start, column, end, None, own.shape[0], R, LOADS)
    return tl.where(own[:, None], s_TR, 0.0).to(s_TR.dtype)


@triton.jit
def _sum_run(x, s, samples_ptr, rows_ptr, keys_ptr, module_key, p0, p1, threshold, run, num_runs, linear, slot, first, c0, K,
             WHICH: tl.constexpr, M: tl.constexpr, R: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
             DROPOUT: tl.constexpr, LOADS: tl.constexpr):  # fmt: skip
    """rows += s^T x over the samples of one run, for BC columns and ranks `first + 0..R-1` of M linears."""
    c, r = c0 + tl.arange(0, BC), first + tl.arange(0, R)
    base0, rank0 = rows_of(rows_ptr, linear, num_runs, run, WHICH, tl.float32)
    base1, rank1 = rows_of(rows_ptr, linear + (M > 1), num_runs, run, WHICH, tl.float32)
    base2, rank2 = rows_of(rows_ptr, linear + 2 * (M > 2), num_runs, run, WHICH, tl.float32)
    offsets, inside = r[None, :] * K + c[:, None], (c < K)[:, None]
    total0 = tl.load(base0 + offsets, mask=inside & (r < rank0)[None, :], other=0.0)
    total1, total2 = total0, total0
    if M > 1:
        total1 = tl.load(base1 + offsets, mask=inside & (r < rank1)[None, :], other=0.0)
    if M > 2:
        total2 = tl.load(base2 + offsets, mask=inside & (r < rank2)[None, :], other=0.0)
    column = slot * W + first
    for p in range(p0, p1):
        t0, t1 = sample_tokens(samples_ptr, p)
        full = t0 + (t1 - t0) // BT * BT
        for start in range(t0, full, BT):
            t = start + tl.arange(0, BT)
            a = load_tile(x, start, c0, None, K, BT, BC, LOADS)
            a = tl.trans(_dropped_out(a, keys_ptr, module_key, t, c, t < t1, threshold, DROPOUT))
            total0 = dot(a, load_tile(s, start, column, None, None, BT, R, LOADS), total0)
            if M > 1:
                total1 = dot(a, load_tile(s, start, column + W, None, None, BT, R, LOADS), total1)
            if M > 2:
                total2 = dot(a, load_tile(s, start, column + 2 * W, None, None, BT, R, LOADS), total2)
        if full < t1:  # the tokens behind the sample's last are another's: selected away in both operands
            t = full + tl.arange(0, BT)
            own = t < t1
            a = tl.where(own[:, None], load_tile(x, full, c0, t1, K, BT, BC, LOADS), 0.0)
            a = tl.trans(_dropped_out(a, keys_ptr, module_key, t, c, own, threshold, DROPOUT))
            total0 = dot(a, _own_s(s, full, t1, column, own, R, LOADS), total0)
            if M > 1:
                total1 = dot(a, _own_s(s, full, t1, column + W, own, R, LOADS), total1)
            if M > 2:
                total2 = dot(a, _own_s(s, full, t1, column + 2 * W, own, R, LOADS), total2)
    # A zero that the compiler does not know: it makes the addresses anew instead of keeping them through the loop, which would spill.
    nothing = rank_of(rows_ptr, linear, num_runs, run, VOLATILE=True) - rank0
    offsets = r[None, :] * K + (c + nothing)[:, None]
    tl.store(base0 + offsets, total0, mask=inside & (r < rank0)[None, :])
    if M > 1:
        tl.store(base1 + offsets, total1, mask=inside & (r < rank1)[None, :])
    if M > 2:
        tl.store(base2 + offsets, total2, mask=inside & (r < rank2)[None, :])


@triton.jit
def _sum_columns(x, s, runs_ptr, samples_ptr, rows_ptr, thresholds_ptr, module_keys_ptr, keys_ptr, linear, slot, c0, run, K, num_runs,
                 WHICH: tl.constexpr, M: tl.constexpr, W: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
                 SPLIT: tl.constexpr, DROPOUT: tl.constexpr, LOADS: tl.constexpr):  # fmt: skip
    """Gradient sums of one run's rows, for BC columns. SPLIT and DROPOUT as in `_shrink_item`."""
    rank, threshold, key = _turn(rows_ptr, thresholds_ptr, module_keys_ptr, linear, num_runs, run, M, SPLIT, DROPOUT)
    p0, p1 = run_samples(runs_ptr, run)
    for first in range(0, rank, R):
        _sum_run(x, s, samples_ptr, rows_ptr, keys_ptr, key, p0, p1, threshold, run, num_runs, linear, slot, first, c0, K,
                 WHICH, M, R, W, BT, BC, DROPOUT, LOADS)  # fmt: skip


@triton.jit(do_not_specialize=PLACES)
def sum_kernel(x, s, runs_ptr, order_ptr, samples_ptr, rows_ptr, thresholds_ptr, module_keys_ptr, keys_ptr, linear, slot, K, num_runs,
               WHICH: tl.constexpr, M: tl.constexpr, W: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
               SPLIT: tl.constexpr, LOADS: tl.constexpr):  # fmt: skip
    """Gradient sums of each run's rows of M linears from `linear` on: += s^T x. S [T, W for each linear], R columns a time.

    Grid (columns / BC, runs, 1), the longest runs first; with SPLIT, as in `shrink_kernel`, (…, M + 1).
    """
    c0, run, member = tl.program_id(0) * BC, tl.load(order_ptr + tl.program_id(1)), tl.program_id(2)
    if SPLIT and member < M:
        _sum_columns(x, s, runs_ptr, samples_ptr, rows_ptr, thresholds_ptr, module_keys_ptr, keys_ptr, linear + member, slot + member, c0,
                     run, K, num_runs, WHICH, 1, W, R, BT, BC, True, True, LOADS)  # fmt: skip
    else:
        _sum_columns(x, s, runs_ptr, samples_ptr, rows_ptr, thresholds_ptr, module_keys_ptr, keys_ptr, linear, slot, c0, run, K, num_runs,
                     WHICH, M, W, R, BT, BC, SPLIT, False, LOADS)  # fmt: skip


@triton.jit(do_not_specialize=PLACES)
def add_dropped_kernel(y_ptr, s_ptr, runs_ptr, tiles_ptr, rows_ptr, thresholds_ptr, module_keys_ptr, keys_ptr, linear, T, N, num_runs,
                       stride_s, WHICH: tl.constexpr, M: tl.constexpr, W: tl.constexpr,
                       R: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """y += the sum over M linears of keep * (S @ rows), for the runs with dropout. Grid (columns / BC, tokens / BT).

    y [T, N] holds the GEMM's product already, which left these runs out.
    """
    start = tl.program_id(1) * BT
    lo, hi = runs_of_tiles(tiles_ptr, start, T, BT)
    i, c, r = tl.arange(0, BT), tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, R)
    t = start + i
    s_tile, y_tile = s_ptr + tl.cast(start, tl.int64) * stride_s, y_ptr + tl.cast(start, tl.int64) * N  # 32 bits do within a tile
    s_offsets, b_offsets = i[:, None] * stride_s + r[None, :], r[:, None] * N + c[None, :]
    for run in range(lo, hi):
        threshold = tl.load(thresholds_ptr + run)
        if threshold > 0:
            own = in_run(runs_ptr, run, t)
            total = tl.zeros((BT, BC), tl.float32)
            for m in tl.static_range(M):
                rows, rank = rows_of(rows_ptr, linear + m, num_runs, run, WHICH, s_ptr.dtype.element_ty)
                delta = tl.zeros((BT, BC), tl.float32)
                for first in range(0, rank, R):
                    s = tl.load(s_tile + (m * W + first) + s_offsets, mask=own[:, None], other=0.0)
                    mask = (first + r < rank)[:, None] & (c < N)[None, :]
                    b = tl.load(rows + first * N + b_offsets, mask=mask, other=0.0)
                    delta = dot(s, b, delta)
                keep = keep_tile(keys_ptr, tl.load(module_keys_ptr + linear + m), t, c, own, threshold)
                total += tl.where(keep, delta, 0.0)
            y_at, mask = y_tile + (i[:, None] * N + c[None, :]), own[:, None] & (c < N)[None, :]
            y = tl.load(y_at, mask=mask, other=0.0).to(tl.float32) + total
            tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)
