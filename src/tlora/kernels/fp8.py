"""A frozen weight in fp8: e4m3 with one fp32 scale per row; activations and gradients are quantised row by row as they come.

y = (xq Wq^T) * sx * sw. In the input gradient the weight's scale lies along the sum, so it goes into dy before that is quantised:
dx = (q(dy * sw) Wq) * s. Tensor cores want both operands of an fp8 product adjacent along the sum (PTX: only K-major for 8 bits), so
the one resident copy is transposed for each backward.
"""

# Triton's own annotations say nothing of launch options:
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import triton
from torch import Tensor

from tlora.kernels.triton_fp8 import LARGEST, SMALLEST_AMAX, quantize_kernel, transpose_kernel

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
