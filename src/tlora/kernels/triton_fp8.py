"""Row-wise quantisation to e4m3, and the transposition that gives the input gradient its operand, as Triton kernels.

A row's bytes and scale are a function of that row alone. A row that is not finite gets the scale NaN, which makes NaN of its row of
every product: saturation cannot turn it into a finite wrong one.
"""

# pyright: reportGeneralTypeIssues=false
# (a jit function's call is typed NoReturn)

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)  # of e4m3 in its "fn" kind, which has no Inf
SMALLEST_AMAX = tl.constexpr(2.0**-115)  # 448 / it and it / 448 are still normal numbers; rows below it lose bits, in the end all


@triton.jit
def _load(x_ptr, column_scale_ptr, row, stride, first, k, K):
    """Columns `k` of a row of x, which is column `first` of all, as they are quantised."""
    x = tl.load(x_ptr + row * stride + k, mask=k < K, other=0.0).to(tl.float32)
    if column_scale_ptr is not None:
        x = x * tl.load(column_scale_ptr + first + k, mask=k < K, other=0.0)
    return x


@triton.jit
def _largest(amax, x_ptr, column_scale_ptr, row, stride, first, K, BLOCK: tl.constexpr):
    """Magnitudes of amax [BLOCK] or above, as the row has them, as the bits of fp32: ordered like the numbers, Inf and NaN above all."""
    for k0 in range(0, K, BLOCK):
        x = _load(x_ptr, column_scale_ptr, row, stride, first, k0 + tl.arange(0, BLOCK), K)
        amax = tl.maximum(amax, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return amax


@triton.jit
def _store(q_ptr, x_ptr, column_scale_ptr, inverse, row, stride, first, K, width, BLOCK: tl.constexpr):
    for k0 in range(0, K, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        x = _load(x_ptr, column_scale_ptr, row, stride, first, k, K)
        tl.store(q_ptr + row * width + first + k, (x * inverse).to(q_ptr.dtype.element_ty), mask=k < K)


@triton.jit
def quantize_kernel(x0_ptr, x1_ptr, x2_ptr, column_scale_ptr, q_ptr, scale_ptr, K0, K1, K2, stride0, stride1, stride2,
                    SOURCES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One row of up to three concatenated x: q = x * column_scale * (448 / amax) in e4m3, scale = amax / 448.

    Grid (rows,). A row is read twice, the second time from a cache: held in registers, a long one would leave its multiprocessor
    to itself. The operations and their order are those of `fp8.quantize_rows_in_torch`, each rounded to nearest: the same bits, but for q
    of a row with NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    amax, width = _largest(tl.zeros((BLOCK,), tl.int32), x0_ptr, column_scale_ptr, row, stride0, 0, K0, BLOCK), K0
    if SOURCES > 1:
        amax, width = _largest(amax, x1_ptr, column_scale_ptr, row, stride1, K0, K1, BLOCK), K0 + K1
    if SOURCES > 2:
        amax, width = _largest(amax, x2_ptr, column_scale_ptr, row, stride2, K0 + K1, K2, BLOCK), K0 + K1 + K2
    largest = tl.max(amax).to(tl.float32, bitcast=True)
    finite = largest < float("inf")
    largest = tl.maximum(largest, SMALLEST_AMAX)
    inverse = tl.div_rn(tl.full((), LARGEST, tl.float32), largest)
    _store(q_ptr, x0_ptr, column_scale_ptr, inverse, row, stride0, 0, K0, width, BLOCK)
    if SOURCES > 1:
        _store(q_ptr, x1_ptr, column_scale_ptr, inverse, row, stride1, K0, K1, width, BLOCK)
    if SOURCES > 2:
        _store(q_ptr, x2_ptr, column_scale_ptr, inverse, row, stride2, K0 + K1, K2, width, BLOCK)
    tl.store(scale_ptr + row, tl.where(finite, tl.div_rn(largest, tl.full((), LARGEST, tl.float32)), float("nan")))


@triton.jit
def transpose_kernel(w_ptr, t_ptr, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """t [K, N] = w [N, K] transposed, bytes. Grid (tiles of N, tiles of K)."""
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BK + tl.arange(0, BK)
    mask = (n < N)[:, None] & (k < K)[None, :]
    w = tl.load(w_ptr + n.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0)
    tl.store(t_ptr + k.to(tl.int64)[:, None] * N + n[None, :], tl.trans(w), mask=tl.trans(mask))
