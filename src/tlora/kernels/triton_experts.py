"""The products of a mixture's experts with many adapters, as Triton kernels, over rows sorted by (expert, job, sample, position, slot).

Tables, int32, made on the device for each layer (`expert_kernels.py`):
    cells    first row of each (expert, sample), expert by expert, and the number of rows: E P + 1
    runs     first sample of each job, and the one behind the last job's
    tiles    8 a tile of BM rows of one expert: expert or -1, first row, end of the expert's rows, first job, end of jobs

A row's bits depend on nothing but itself: the order of K is fixed by the tile's BK, jobs are selected by masked loads, and a sum over rows
goes sample by sample, on from what is in it, in blocks that begin where a sample begins.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

from tlora.kernels.triton_dot import LARGEST, dot
from tlora.kernels.triton_gemm import _place
from tlora.kernels.triton_loads import load_tile
from tlora.kernels.triton_tables import rows_of

# Else Triton compiles once more for each of their values that is 1 or a multiple of 16.
COUNTS = ["samples", "num_runs", "num_row_tiles"]


@triton.jit
def first_row(cells_ptr, expert, sample, samples):
    """Of the rows of a sample that go to an expert; of the sample behind the last, of the next expert's."""
    return tl.load(cells_ptr + expert * samples + sample)


@triton.jit
def run_rows(cells_ptr, runs_ptr, expert, run, samples):
    """The first row of an expert and a job, and the one behind their last."""
    start = first_row(cells_ptr, expert, tl.load(runs_ptr + run), samples)
    return start, first_row(cells_ptr, expert, tl.load(runs_ptr + run + 1), samples)


@triton.jit(do_not_specialize=["samples", "num_runs", "E"])
def tile_kernel(cells_ptr, runs_ptr, tiles_ptr, E, samples, num_runs, BM: tl.constexpr, EXPERTS: tl.constexpr, RUNS: tl.constexpr):
    """One row of `tiles`: tiles of one expert after another, then empty ones. Grid (tiles,). EXPERTS, RUNS: powers of two."""
    tile, e, j = tl.program_id(0), tl.arange(0, EXPERTS), tl.arange(0, RUNS)
    start = tl.load(cells_ptr + e * samples, mask=e < E, other=0)
    end = tl.load(cells_ptr + (e + 1) * samples, mask=e < E, other=0)
    count = (end - start + BM - 1) // BM
    upto = tl.cumsum(count, 0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)  # all of them behind the last tile
    m0 = tl.sum(tl.where(e == expert, start + (tile - upto + count) * BM, 0), 0)
    last = tl.sum(tl.where(e == expert, end, 0), 0)
    there = (j < num_runs) & (expert < E)
    first_j = tl.load(cells_ptr + expert * samples + tl.load(runs_ptr + j, mask=there, other=0), mask=there, other=0)
    last_j = tl.load(cells_ptr + expert * samples + tl.load(runs_ptr + j + 1, mask=there, other=0), mask=there, other=0)
    row = tiles_ptr + tile * 8
    tl.store(row, tl.where(expert < E, expert, -1))
    tl.store(row + 1, m0)
    tl.store(row + 2, last)
    tl.store(row + 3, tl.sum((there & (last_j <= m0)).to(tl.int32), 0))
    tl.store(row + 4, tl.sum((there & (first_j < tl.minimum(m0 + BM, last))).to(tl.int32), 0))


@triton.jit
def tile_at(tiles_ptr, tile):
    """Expert or -1, first row, end of the expert's rows, first job, end of jobs."""
    row = tiles_ptr + tile * 8
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


@triton.jit
def rows_from(x_ptr, order_ptr, m0, end, K, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    """A pointer, and the offset of each of ROWS rows from m0 on; beyond the end the last row's. SLOTS: x has a row a token instead, and
    sorted row s is of token order[s] // SLOTS. Those offsets have 64 bits, since T K may pass 2^31; others lie within a tile.
    """
    i = tl.minimum(tl.arange(0, ROWS), end - 1 - m0)
    if SLOTS > 0:
        at = x_ptr
        tokens = tl.load(order_ptr + m0 + i).to(tl.int32) // SLOTS  # a division of 64 bits is slow
        offsets = tokens.to(tl.int64) * K
    else:
        at = x_ptr + tl.cast(m0, tl.int64) * K
        offsets = i * K
    return at, offsets


@triton.jit
def load_x(at, offsets, k0, K, BK: tl.constexpr, MASKED: tl.constexpr):
    """[rows, BK]. MASKED: K ends within a block, and zeros fill it up."""
    k = tl.arange(0, BK)
    mask = (k0 + k < K)[None, :] if MASKED else None
    return tl.load(at + k0 + (offsets[:, None] + k[None, :]), mask=mask, other=0.0 if MASKED else None)


@triton.jit
def _finite(rows):
    """A bank's rows, which are finite, so that they stay finite when fp32 is split (`triton_dot.py`): they meet zeros of other jobs' S."""
    if rows.dtype == tl.float32:
        rows = tl.minimum(tl.maximum(rows, -LARGEST), LARGEST)
    return rows


@triton.jit
def _expand(acc, s_ptr, cells_ptr, runs_ptr, rows_ptr, expert, m0, lo, hi, n0, N, samples, num_runs, stride_s,
            WHICH: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """acc + S @ rows of each job in the tile, R ranks at a time. Another job's S is not loaded: it may hold NaN."""
    i, r, n = tl.arange(0, acc.shape[0]), tl.arange(0, R), n0 + tl.arange(0, acc.shape[1])
    s_at = s_ptr + tl.cast(m0, tl.int64) * stride_s
    for run in tl.range(lo, hi, num_stages=1):  # stages of it would take the product's shared memory
        t0, t1 = run_rows(cells_ptr, runs_ptr, expert, run, samples)
        base, rank = rows_of(rows_ptr, 0, num_runs, run, WHICH, s_ptr.dtype.element_ty)
        base += expert * rank * tl.cast(N, tl.int64)
        own = (m0 + i >= t0) & (m0 + i < t1)
        for first in tl.range(0, rank, R, num_stages=1):
            ranks = first + r < rank
            s = tl.load(s_at + (i[:, None] * stride_s + (first + r)[None, :]), mask=own[:, None] & ranks[None, :], other=0.0)
            rows = tl.load(base + ((first + r)[:, None] * N + n[None, :]), mask=ranks[:, None] & (n < N)[None, :], other=0.0)
            acc = dot(s, _finite(rows), acc)
    return acc


@triton.jit(do_not_specialize=COUNTS)
def expert_gemm_kernel(x_ptr, order_ptr, w_ptr, bias_ptr, y_ptr, s_ptr, tiles_ptr, cells_ptr, runs_ptr, rows_ptr,
                       num_row_tiles, N, K, samples, num_runs, stride_s,
                       WHICH: tl.constexpr, NK: tl.constexpr, SLOTS: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                       BK: tl.constexpr, BAND: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """y [S, N] = x @ (w[e]^T if NK else w[e]) + bias[e] + S @ rows of each row's own expert e and job; w [E, N, K] or [E, K, N].

    Grid (row tiles * columns / BN,). Without S (None) there are no adapters. Rows of a job at an expert begin at `expert * rank`.
    """
    row, column = _place(tl.program_id(0), num_row_tiles, tl.cdiv(N, BN), BAND)
    expert, m0, end, lo, hi = tile_at(tiles_ptr, row)
    if expert >= 0:
        n0 = column * BN
        at, offsets = rows_from(x_ptr, order_ptr, m0, end, K, SLOTS, BM)
        w_at = w_ptr + tl.cast(expert, tl.int64) * N * K
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, K, BK):
            a = load_x(at, offsets, k0, K, BK, MASKED)
            if NK:
                w = load_tile((w_at, K), n0, k0, N, K if MASKED else None, BN, BK, "pointers", MASKED)
                acc = dot(a, w.T, acc)
            else:
                w = load_tile((w_at, N), k0, n0, K if MASKED else None, N, BK, BN, "pointers", MASKED)
                acc = dot(a, w, acc, ACROSS=True)
        n = n0 + tl.arange(0, BN)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if s_ptr is not None:
            acc = _expand(acc, s_ptr, cells_ptr, runs_ptr, rows_ptr, expert, m0, lo, hi, n0, N, samples, num_runs, stride_s, WHICH, R)
        i = tl.arange(0, BM)
        y_at = y_ptr + tl.cast(m0, tl.int64) * N + n0
        tl.store(y_at + (i[:, None] * N + tl.arange(0, BN)[None, :]), acc.to(y_ptr.dtype.element_ty),
                 mask=(m0 + i < end)[:, None] & (n < N)[None, :])  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def expert_shrink_kernel(x_ptr, order_ptr, s_ptr, tiles_ptr, cells_ptr, runs_ptr, rows_ptr, scales_ptr, K, samples, num_runs, stride_s,
                         WHICH: tl.constexpr, SLOTS: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr,
                         BK: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """S = scale * x @ rows^T of each row's own expert and job. No other rows and ranks are written.

    Grid (row tiles * BM / BT,): a program has BT rows of a tile, of which more wait for memory at a time than of whole tiles.
    """
    expert, m0, end, lo, hi = tile_at(tiles_ptr, tl.program_id(0) // (BM // BT))
    m0 += tl.program_id(0) % (BM // BT) * BT
    if expert >= 0 and m0 < end:
        at, offsets = rows_from(x_ptr, order_ptr, m0, end, K, SLOTS, BT)
        i, r, k = tl.arange(0, BT), tl.arange(0, R), tl.arange(0, BK)
        s_at = s_ptr + tl.cast(m0, tl.int64) * stride_s
        for run in tl.range(lo, hi, num_stages=1):
            t0, t1 = run_rows(cells_ptr, runs_ptr, expert, run, samples)
            base, rank = rows_of(rows_ptr, 0, num_runs, run, WHICH, s_ptr.dtype.element_ty)
            base += expert * rank * tl.cast(K, tl.int64)
            own = (m0 + i >= t0) & (m0 + i < t1)
            if t1 <= max(t0, m0) or t0 >= m0 + BT:
                rank = 0
            for first in tl.range(0, rank, R, num_stages=1):
                ranks = first + r < rank
                acc = tl.zeros((BT, R), tl.float32)
                for k0 in range(0, K, BK):
                    a = load_x(at, offsets, k0, K, BK, MASKED)
                    mask = ranks[:, None] & (k0 + k < K)[None, :]
                    rows = tl.load(base + k0 + ((first + r)[:, None] * K + k[None, :]), mask=mask, other=0.0)
                    acc = dot(a, tl.trans(rows), acc)
                acc *= tl.load(scales_ptr + run)
                tl.store(s_at + (i[:, None] * stride_s + (first + r)[None, :]), acc.to(s_ptr.dtype.element_ty),
                         mask=own[:, None] & ranks[None, :])  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def expert_sum_kernel(x_ptr, order_ptr, s_ptr, cells_ptr, runs_ptr, rows_ptr, K, samples, num_runs, stride_s,
                      WHICH: tl.constexpr, SLOTS: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Gradient sums of a job's rows at an expert: += S^T x, sample by sample. Grid (columns / BC, jobs, experts)."""
    run, expert = tl.program_id(1), tl.program_id(2)
    p0, p1 = tl.load(runs_ptr + run), tl.load(runs_ptr + run + 1)
    c, r, i = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, R), tl.arange(0, BT)
    inside = c < K
    base, rank = rows_of(rows_ptr, 0, num_runs, run, WHICH, tl.float32)
    base += expert * rank * tl.cast(K, tl.int64)
    if first_row(cells_ptr, expert, p1, samples) <= first_row(cells_ptr, expert, p0, samples):
        rank = 0  # nothing is read or written of an expert that the job does not visit
    for first in tl.range(0, rank, R, num_stages=1):
        ranks = first + r < rank
        sums, mask = base + ((first + r)[None, :] * K + c[:, None]), inside[:, None] & ranks[None, :]
        total = tl.load(sums, mask=mask, other=0.0)
        for p in tl.range(p0, p1, num_stages=1):
            t0, t1 = first_row(cells_ptr, expert, p, samples), first_row(cells_ptr, expert, p + 1, samples)
            for start in range(t0, t1, BT):
                own = start + i < t1
                at, offsets = rows_from(x_ptr, order_ptr, start, t1, K, SLOTS, BT)
                x = tl.load(at + (offsets[:, None] + c[None, :]), mask=own[:, None] & inside[None, :], other=0.0)
                s_at = s_ptr + tl.cast(start, tl.int64) * stride_s + first
                s = tl.load(s_at + (i[:, None] * stride_s + r[None, :]), mask=own[:, None] & ranks[None, :], other=0.0)
                total = dot(tl.trans(x), s, total)
        tl.store(sums, total, mask=mask)


@triton.jit
def add_slots_kernel(y_ptr, weights_ptr, inverse_ptr, out_ptr, H, SLOTS: tl.constexpr, WIDE: tl.constexpr, BH: tl.constexpr):
    """out [T, H] = sum over slots of weight * y, each product rounded to WIDE, added up in fp32; without weights of y. Grid (T, H / BH)."""
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH + tl.arange(0, BH)
    total = tl.zeros((BH,), tl.float32)
    for slot in tl.static_range(SLOTS):
        row = tl.load(inverse_ptr + token * SLOTS + slot)
        y = tl.load(y_ptr + row * H + h, mask=h < H, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            y = (y * tl.load(weights_ptr + token * SLOTS + slot).to(tl.float32)).to(WIDE).to(tl.float32)
        total += y
    tl.store(out_ptr + token * H + h, total.to(out_ptr.dtype.element_ty), mask=h < H)


@triton.jit
def spread_slots_kernel(dout_ptr, y_ptr, weights_ptr, inverse_ptr, dy_ptr, dweights_ptr, H, SLOTS: tl.constexpr, BH: tl.constexpr):
    """dy [S, H] = weight * dout of the row's token; dweights [T, k] = dout . y, in fp32. Grid (T,); BH is the power of two from H on."""
    token, h = tl.program_id(0).to(tl.int64), tl.arange(0, BH)
    dout = tl.load(dout_ptr + token * H + h, mask=h < H, other=0.0).to(tl.float32)
    for slot in tl.static_range(SLOTS):
        place = token * SLOTS + slot
        row = tl.load(inverse_ptr + place)
        dy = dout * tl.load(weights_ptr + place).to(tl.float32)
        tl.store(dy_ptr + row * H + h, dy.to(dy_ptr.dtype.element_ty), mask=h < H)
        if dweights_ptr is not None:
            y = tl.load(y_ptr + row * H + h, mask=h < H, other=0.0).to(tl.float32)
            tl.store(dweights_ptr + place, tl.sum(dout * y, 0).to(dweights_ptr.dtype.element_ty))
