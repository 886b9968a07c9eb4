"""What a router does to a token, in operations whose row of a result depends on that row alone: not on how many there are, nor on others.

`rows_linear` is `torch.nn.functional.linear` over a frozen weight; a library's has other bits for another number of rows. `largest` is the
choice of `torch.topk`, which says of itself that tied elements may come in another order at each call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlora.kernels.device import runs_kernels


class Largest(NamedTuple):
    """As `torch.topk` gives them."""

    values: Tensor
    indices: Tensor


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x [..., K] @ weight.T + bias, as `torch.nn.functional.linear`; the gradient of x alone."""
    y_TN = torch.ops.tlora.rows_linear(x.reshape(-1, x.shape[-1]), weight_NK, bias_N)
    return y_TN.view(*x.shape[:-1], weight_NK.shape[0])


def topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Largest:
    """As `torch.topk` along the last dim, largest first; of equal values the lower index first. Raises NotImplementedError for others."""
    if not largest or dim not in (-1, input.ndim - 1):
        raise NotImplementedError(f"topk along dim {dim} of {input.ndim}, largest={largest}")
    indices = torch.ops.tlora.largest(input.detach(), k)
    return Largest(input.gather(-1, indices), indices)


@torch.library.custom_op("tlora::rows_linear", mutates_args=())
def rows_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """y [T, N] = x @ weight.T + bias, of one dtype."""
    return multiply_rows(x_TK, weight_NK, bias_N, True)


@rows_linear.register_fake
def _(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    return x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0])


@torch.library.custom_op("tlora::rows_linear_backward", mutates_args=())
def _rows_linear_backward(dy_TN: Tensor, weight_NK: Tensor) -> Tensor:
    return multiply_rows(dy_TN, weight_NK, None, False)


@_rows_linear_backward.register_fake
def _(dy_TN: Tensor, weight_NK: Tensor) -> Tensor:
    return dy_TN.new_empty(dy_TN.shape[0], weight_NK.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _differentiate(ctx: Any, dy_TN: Tensor) -> tuple[Tensor, None, None]:
    return _rows_linear_backward(dy_TN, *ctx.saved_tensors), None, None


rows_linear.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("tlora::largest", mutates_args=())
def largest(values: Tensor, count: int) -> Tensor:
    """int64 [..., count]: where in the last dim the largest are, largest first, of equal ones the lower index."""
    return find_largest(values, count)


@largest.register_fake
def _(values: Tensor, count: int) -> Tensor:
    return values.new_empty((*values.shape[:-1], count), dtype=torch.int64)


def find_largest(values: Tensor, count: int) -> Tensor:
    """As the operation. A stable sort has one answer for each row, however it is computed."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


def multiply_rows(x_TK: Tensor, weight: Tensor, bias_N: Tensor | None, transposed: bool) -> Tensor:
    """x @ weight [N, K].T if `transposed`, else @ weight [K, N], + bias: by the kernel, or each row by itself."""
    if x_TK.dtype != torch.float64 and runs_kernels(x_TK.device):
        return launch_rows(x_TK.contiguous(), weight.contiguous(), bias_N, transposed)
    matrix_KN = weight.t() if transposed else weight
    rows = [row_1K @ matrix_KN for row_1K in x_TK.split(1)]
    y_TN = torch.cat(rows) if rows else x_TK.new_empty(0, matrix_KN.shape[1])
    return y_TN if bias_N is None else y_TN + bias_N


class RowsTile(NamedTuple):
    """Rows and columns of a program, the numbers of K that it adds at a time, and how it runs."""

    rows: int
    columns: int
    inner: int
    warps: int = 4
    stages: int = 3


def rows_tile(columns: int, element_size: int) -> RowsTile:
    """Of a product that gives so many columns."""
    return RowsTile(64, min(64, max(16, 1 << (columns - 1).bit_length())), 32 if element_size == 4 else 64)


def launch_rows(x_TK: Tensor, weight: Tensor, bias_N: Tensor | None, transposed: bool) -> Tensor:
    """The same in one launch: x @ (weight [N, K].T if `transposed`, else weight [K, N]) + bias, summed in fp32. Not for fp64."""
    import triton

    from tlora.kernels.triton_rows import rows_kernel  # a CPU needs no triton

    tokens, inner, columns = len(x_TK), x_TK.shape[1], weight.shape[0 if transposed else 1]
    y_TN = torch.empty(tokens, columns, dtype=x_TK.dtype, device=x_TK.device)
    if not tokens:
        return y_TN
    tile = rows_tile(columns, x_TK.element_size())
    launch: Any = rows_kernel[(triton.cdiv(tokens, tile.rows), triton.cdiv(columns, tile.columns))]
    launch(
        x_TK, weight, bias_N, y_TN, tokens, columns, inner,
        NK=transposed, BT=tile.rows, BN=tile.columns, BK=tile.inner, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y_TN
