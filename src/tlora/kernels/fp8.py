"""A frozen weight in fp8: e4m3 with one fp32 scale per row; activations and gradients are quantised row by row as they come.

y = (xq Wq^T) * sx * sw. In the input gradient the weight's scale lies along the sum, so it goes into dy before that is quantised:
dx = (q(dy * sw) Wq) * s. Tensor cores want both operands of an fp8 product adjacent along the sum (PTX: only K-major for 8 bits), so
the one resident copy is transposed for each backward.
"""

# pyright: reportGeneralTypeIssues=false
# (a jit function's call is typed NoReturn)
# Triton's own annotations say nothing of launch options:
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

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


DTYPE = torch.float8_e4m3fn
_TRANSPOSED_TILE = 128
_WIDE = 8192  # columns from which more of a row is worth reading at once
_AT_ONCE, _AT_ONCE_OF_WIDE, _BY_A_WARP = 1024, 4096, 256  # 16 bytes of a thread, at 16 bits
Item = TypeVar("Item")


def quantize_rows(xs: Sequence[Tensor], column_scale_K: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(q [T, K] in e4m3, scale [T] in fp32): q * scale is x * column_scale but for rounding; scale is the row's amax / 448.

    x [T, K] is up to three concatenated `xs` [T, K_m], of one dtype, with rows of adjacent elements. A row of zeros gives
    zeros; one that holds NaN or Inf has the scale NaN, and no meaning otherwise.
    """
    if xs[0].device.type != "cuda":  # Triton's interpreter loses carries when it rounds to e4m3
        return quantize_rows_in_torch(xs, column_scale_K)
    widths = [x.shape[1] for x in xs]
    assert len(xs) <= 3 and all(x.stride(1) == 1 for x in xs), f"{len(xs)} tensors of widths {widths}"
    q_TK = torch.empty(len(xs[0]), sum(widths), dtype=DTYPE, device=xs[0].device)
    scale_T = torch.empty(len(xs[0]), dtype=torch.float32, device=xs[0].device)
    launch_quantize(xs, column_scale_K, q_TK, scale_T)
    return q_TK, scale_T


def launch_quantize(xs: Sequence[Tensor], column_scale_K: Tensor | None, q_TK: Tensor, scale_T: Tensor) -> None:
    """`quantize_rows` into given tensors; q may be of any float dtype, and is rounded to that."""
    widths, strides = [x.shape[1] for x in xs], [x.stride(0) for x in xs]
    block = min(triton.next_power_of_2(max(widths)), _AT_ONCE_OF_WIDE if sum(widths) > _WIDE else _AT_ONCE)
    warps = max(block // _BY_A_WARP, 1)
    if len(scale_T):
        quantize_kernel[(len(scale_T),)](
            *_three(xs), column_scale_K, q_TK, scale_T, *_three(widths), *_three(strides),
            SOURCES=len(xs), BLOCK=block, num_warps=warps,
        )  # fmt: skip


def _three(items: Sequence[Item]) -> list[Item]:
    """As the kernel takes them: what is not there is never read."""
    return [*items, *[items[0]] * (3 - len(items))]


def quantize_rows_in_torch(xs: Sequence[Tensor], column_scale_K: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`quantize_rows` where there are no kernels."""
    x_TK = torch.cat([x.float() for x in xs], 1)
    if column_scale_K is not None:
        x_TK = x_TK * column_scale_K
    size = x_TK.abs()
    amax_T = torch.where(size < torch.inf, size, torch.inf).amax(1)
    finite_T = amax_T < torch.inf
    amax_T = amax_T.clamp(min=SMALLEST_AMAX.value)
    largest_T = torch.full_like(amax_T, LARGEST.value)  # torch divides by or into a plain number with two roundings
    q_TK = (x_TK * (largest_T / amax_T)[:, None]).to(DTYPE)
    return q_TK, torch.where(finite_T, amax_T / largest_T, torch.nan)


def transpose(q_NK: Tensor) -> Tensor:
    """[K, N], its rows adjacent. The allocator gives its memory to the next one of its size: one scratch serves all layers."""
    num_rows, num_columns = q_NK.shape
    assert q_NK.is_contiguous() and q_NK.element_size() == 1, f"{q_NK.dtype} with strides {q_NK.stride()}"
    out_KN = torch.empty(num_columns, num_rows, dtype=q_NK.dtype, device=q_NK.device)
    grid = (triton.cdiv(num_rows, _TRANSPOSED_TILE), triton.cdiv(num_columns, _TRANSPOSED_TILE))
    transpose_kernel[grid](
        q_NK.view(torch.uint8), out_KN.view(torch.uint8), num_rows, num_columns, BN=_TRANSPOSED_TILE, BK=_TRANSPOSED_TILE, num_warps=4
    )
    return out_KN
