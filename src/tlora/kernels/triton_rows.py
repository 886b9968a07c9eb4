"""y = x @ w^T for a small frozen matrix, such as a router's: one Triton kernel for every number of rows and any widths.

A program's rows and columns go by the matrix alone, K is summed in blocks of one size, and the number of rows is no constant of the
kernel: a row's bits depend on that row and the matrix.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

from tlora.kernels.triton_dot import dot


@triton.jit(do_not_specialize=["T"])
def rows_kernel(x_ptr, w_ptr, bias_ptr, y_ptr, T, N, K, NK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """y [T, N] = x [T, K] @ (w [N, K]^T if NK else w [K, N]) + bias, all contiguous. Grid (T / BT, N / BN)."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    n, k = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BT, BN), tl.float32)
    for first in range(0, K, BK):
        a = tl.load(x_ptr + t[:, None] * K + (first + k)[None, :], mask=(t < T)[:, None] & (first + k < K)[None, :], other=0.0)
        if NK:
            b = tl.load(w_ptr + n[:, None] * K + (first + k)[None, :], mask=(n < N)[:, None] & (first + k < K)[None, :], other=0.0)
            acc = dot(a, b.T, acc)
        else:
            b = tl.load(w_ptr + (first + k)[:, None] * N + n[None, :], mask=(first + k < K)[:, None] & (n < N)[None, :], other=0.0)
            acc = dot(a, b, acc, ACROSS=True)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + t[:, None] * N + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=(t < T)[:, None] & (n < N)[None, :])
