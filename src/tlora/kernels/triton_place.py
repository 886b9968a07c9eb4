"""Puts one adapter, kept as PEFT keeps it, where the multi-adapter kernels look for it: addresses, scale and B transposed. One launch.

The addresses are taken on the device at every call. Nothing is to be remembered when a parameter moves, no copy from the host
stands in the way, and a CUDA graph may capture it (once a first call has made the tables of that number of tokens).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tlora.kernels.triton_tables import store_rank, store_sums, store_weights


@triton.jit
def place_kernel(a_ptr, b_ptr, bt_ptr, sums_ptr, rows_ptr, scales_ptr, scale, rank, N, K, num_runs, stride_n, stride_r,
                 S: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, GRADIENTS: tl.constexpr):  # fmt: skip
    """bt [r, N] = b^T in bt's dtype; `rows` int64 [num_runs, 5] and `scales` fp32 [num_runs], as in `LoraTables` for one linear.

    All runs read the same A [r, K] and B, and each has gradient sums of its own: run s those at `sums` fp32 [num_runs, r * (K + N)],
    dA before dB. Grid (columns of B^T / BN). S is at least num_runs, a power of two.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    for first in range(0, rank, R):
        r = first + tl.arange(0, R)
        mask = (r < rank)[None, :] & (n < N)[:, None]
        b = tl.load(b_ptr + n.to(tl.int64)[:, None] * stride_n + r.to(tl.int64)[None, :] * stride_r, mask=mask)
        tl.store(bt_ptr + r.to(tl.int64)[None, :] * N + n[:, None], b.to(bt_ptr.dtype.element_ty), mask=mask)
    if tl.program_id(0) == 0:
        run = tl.arange(0, S)
        real = run < num_runs
        nothing = tl.zeros((S,), tl.int64)
        store_weights(rows_ptr, run, nothing + a_ptr.to(tl.int64), nothing + bt_ptr.to(tl.int64), real)
        if GRADIENTS:
            da = sums_ptr.to(tl.int64) + run.to(tl.int64) * rank * (K + N) * 4
            store_sums(rows_ptr, run, da, da + (nothing + rank) * K * 4, real)
        store_rank(rows_ptr, run, nothing + rank, real)
        tl.store(scales_ptr + run, tl.zeros((S,), tl.float32) + scale, mask=real)
