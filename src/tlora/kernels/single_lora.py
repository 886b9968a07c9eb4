"""A frozen linear with one adapter over all tokens, whose gradients travel through autograd: for trainers other than ours.

The multi-adapter kernels where there is a GPU, `reference.py` elsewhere. To torch.compile it is an operation of its own.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tlora.kernels.device import runs_kernels
from tlora.kernels.lora_tables import ADDRESS_FIELDS, DA, DB, A, B, LoraTables, Run, Slots, build_tables, rank_width
from tlora.kernels.reference import Segment, lora_backward_, lora_forward_

if TYPE_CHECKING:
    from tlora.kernels.fused_linear import LinearGroup

_MOST_RUNS = 8
_FEWEST_TOKENS_OF_A_RUN = 512
_ROW_TILE = 128  # tokens; runs begin at multiples of it, so that each tile of the kernels has one run


def takes_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether linears of `dtype` on `device` go to the Triton kernels: fp32 and 16 bits, on a GPU or in Triton's interpreter."""
    runs = runs_kernels(device)
    return runs and dtype in (torch.float32, torch.bfloat16, torch.float16)


def single_lora_linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, a_RK: Tensor, b_NR: Tensor, scale: float, dropped_TK: Tensor | None = None
) -> Tensor:
    """y [T, N] = x @ weight.T + bias + scale * (x @ a.T) @ b.T.

    x, weight and y have one dtype; a and b, of any dtype, are cast to it. Backward gives the gradients of x, a and b, the last two in
    their own dtypes, summed in fp32 (fp64 for fp64). Weight and bias get none. On the kernels K and N must be multiples of 16.

    With `dropped_TK` (shape and dtype of x; x after dropout, say) the adapter reads that instead of x, and it gets a gradient of its own.
    """
    if torch.compiler.is_compiling():
        return compiled_single_lora_linear(x_TK, weight_NK, bias_N, a_RK, b_NR, scale, dropped_TK)[0]
    return _SingleLoraLinear.apply(x_TK, weight_NK, bias_N, a_RK, b_NR, scale, dropped_TK)  # type: ignore[no-any-return]


class _SingleLoraLinear(torch.autograd.Function):
    """Eager torch's way to `_forward` and `_backward`: a custom op costs the host twice as long."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        a_RK: Tensor,
        b_NR: Tensor,
        scale: float,
        dropped_TK: Tensor | None,
    ) -> Tensor:
        y_TN, s = _forward(x_TK, weight_NK, bias_N, a_RK, b_NR, scale, dropped_TK)
        ctx.scale, ctx.drops = scale, dropped_TK is not None
        ctx.save_for_backward(x_TK if dropped_TK is None else dropped_TK, s, weight_NK, a_RK, b_NR)
        return y_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        read_TK, s, weight_NK, a_RK, b_NR = ctx.saved_tensors
        dx_TK, da_RK, db_NR, d_dropped_TK = _backward(dy_TN, read_TK, s, weight_NK, a_RK, b_NR, ctx.scale, ctx.drops)
        return dx_TK, None, None, da_RK, db_NR, None, d_dropped_TK if ctx.drops else None


def _forward(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, a_RK: Tensor, b_NR: Tensor, scale: float, dropped_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y, and S as `_backward` wants it."""
    read_TK = x_TK if dropped_TK is None else dropped_TK
    if not takes_kernels(x_TK.device, x_TK.dtype):
        y_TN = torch.nn.functional.linear(x_TK, weight_NK, bias_N)
        a, b = a_RK.to(x_TK.dtype), b_NR.to(x_TK.dtype).t()
        return y_TN, lora_forward_(y_TN, read_TK, a, b, (_all_tokens(x_TK, a_RK, scale),))[0]
    from tlora.kernels.fused_linear import multiply, shrink

    if x_TK.shape[0] == 0:
        return x_TK.new_empty(0, weight_NK.shape[0]), x_TK.new_empty(0, _shrunk_width(x_TK, a_RK))
    with torch.cuda.device_of(x_TK):  # Triton launches on the current device, which need not be that of x
        tables, group = _place(x_TK, a_RK, b_NR, scale, None), _group(x_TK, b_NR)
        s = shrink([_rows(read_TK)], group, tables, A)
        (y_TN,) = multiply(_rows(x_TK), [_rows(weight_NK)], [] if bias_N is None else [bias_N], s, group, tables)
    return y_TN, s


def _backward(
    dy_TN: Tensor, read_TK: Tensor, s: Tensor, weight_NK: Tensor, a_RK: Tensor, b_NR: Tensor, scale: float, drops: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, da, db, and the gradient of what the adapter read, `read_TK`, where that `drops` some of x; else it is part of dx, and empty.

    dx is computed even where it is not asked for: that is the first layer's q, k and v alone.
    """
    if not takes_kernels(read_TK.device, read_TK.dtype):
        return _reference_backward(dy_TN, read_TK, s, weight_NK, a_RK, b_NR, scale, drops)
    from tlora.kernels.fused_linear import add_sums, multiply_back, shrink

    if read_TK.shape[0] == 0:
        dx_TK = torch.empty_like(read_TK, memory_format=torch.contiguous_format)
        return dx_TK, _zeros(a_RK), _zeros(b_NR), torch.empty_like(dx_TK)
    (rank, inner), columns = a_RK.shape, b_NR.shape[0]
    with torch.cuda.device_of(read_TK):
        sums = torch.zeros(_num_runs(read_TK.shape[0]), rank * (inner + columns), dtype=torch.float32, device=read_TK.device)
        tables, group = _place(read_TK, a_RK, b_NR, scale, sums), _group(read_TK, b_NR)
        dy_TN, read_TK = _rows(dy_TN), _rows(read_TK)
        ds = shrink([dy_TN], group, tables, B)
        if drops:
            dx_TK, d_read_TK = dy_TN @ weight_NK, ds[:, :rank] @ a_RK.to(ds.dtype)
        else:
            dx_TK, d_read_TK = multiply_back([dy_TN], [_rows(weight_NK)], ds, group, tables), dy_TN.new_empty(0)
        add_sums([dy_TN], s, group, tables, DB)
        add_sums([read_TK], ds, group, tables, DA)
        total = sums.sum(0) if len(sums) > 1 else sums[0]
        da_RK, db_RN = total[: rank * inner].view(rank, inner), total[rank * inner :].view(rank, columns)
        # copies: .grad may hold on to what it gets
        return dx_TK, da_RK.to(a_RK.dtype, copy=True), _zeros(b_NR).copy_(db_RN.t()), d_read_TK


def _reference_backward(
    dy_TN: Tensor, read_TK: Tensor, s: Tensor, weight_NK: Tensor, a_RK: Tensor, b_NR: Tensor, scale: float, drops: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx_TK = dy_TN @ weight_NK
    d_read_TK = torch.zeros_like(read_TK, memory_format=torch.contiguous_format) if drops else dx_TK.new_empty(0)
    a, b = a_RK.to(read_TK.dtype), b_NR.to(read_TK.dtype).t()
    sum_dtype = torch.float64 if read_TK.dtype == torch.float64 else torch.float32
    da_RK, db_RN = torch.zeros_like(a, dtype=sum_dtype), torch.zeros(b.shape, dtype=sum_dtype, device=b.device)
    lora_backward_(d_read_TK if drops else dx_TK, dy_TN, read_TK, [s], a, b, da_RK, db_RN, (_all_tokens(read_TK, a_RK, scale),))
    return dx_TK, da_RK.to(a_RK.dtype), _zeros(b_NR).copy_(db_RN.t()), d_read_TK


compiled_single_lora_linear = torch.library.custom_op("tlora::single_lora_linear", _forward, mutates_args=())
_compiled_backward = torch.library.custom_op("tlora::single_lora_linear_backward", _backward, mutates_args=())


@compiled_single_lora_linear.register_fake
def _(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, a_RK: Tensor, b_NR: Tensor, scale: float, dropped_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0]), x_TK.new_empty(x_TK.shape[0], _shrunk_width(x_TK, a_RK))


@_compiled_backward.register_fake
def _(
    dy_TN: Tensor, read_TK: Tensor, s: Tensor, weight_NK: Tensor, a_RK: Tensor, b_NR: Tensor, scale: float, drops: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx_TK, da_RK, db_NR = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (read_TK, a_RK, b_NR))
    return dx_TK, da_RK, db_NR, torch.empty_like(dx_TK) if drops else dx_TK.new_empty(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_TK, weight_NK, _, a_RK, b_NR, ctx.scale, dropped_TK = inputs
    ctx.drops = dropped_TK is not None
    ctx.set_materialize_grads(False)  # else each backward fills a gradient of S with zeros
    ctx.save_for_backward(dropped_TK if ctx.drops else x_TK, output[1], weight_NK, a_RK, b_NR)


def _differentiate(ctx: Any, dy_TN: Tensor | None, _ds: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy_TN is None:
        return (None,) * 7
    dx_TK, da_RK, db_NR, d_dropped_TK = _compiled_backward(dy_TN, *ctx.saved_tensors, ctx.scale, ctx.drops)
    return dx_TK, None, None, da_RK, db_NR, None, d_dropped_TK if ctx.drops else None


compiled_single_lora_linear.register_autograd(_differentiate, setup_context=_save)


def _all_tokens(x_TK: Tensor, a_RK: Tensor, scale: float) -> Segment:
    return Segment(0, x_TK.shape[0], 0, a_RK.shape[0], scale)


def _shrunk_width(x_TK: Tensor, a_RK: Tensor) -> int:
    return rank_width(a_RK.shape[0]) if takes_kernels(x_TK.device, x_TK.dtype) else a_RK.shape[0]


def _zeros(t: Tensor) -> Tensor:
    return torch.zeros(t.shape, dtype=t.dtype, device=t.device)


def _rows(t: Tensor) -> Tensor:
    """As the kernels read it: rows of adjacent elements that start at multiples of 16 bytes."""
    itemsize = t.element_size()
    aligned = t.stride(1) == 1 and t.stride(0) >= t.shape[1] and t.stride(0) * itemsize % 16 == 0 and t.data_ptr() % 16 == 0
    return t if aligned else t.clone(memory_format=torch.contiguous_format)


def _packed_rows(t: Tensor, dtype: torch.dtype) -> Tensor:
    """As `_rows`, with nothing between the rows. A parameter may be a view into a flat buffer, at any address."""
    packed = t.to(dtype).contiguous()
    return packed if packed.data_ptr() % 16 == 0 else packed.clone()


def _run_tokens(num_tokens: int) -> int:
    """Tokens of one run. The gradient kernel has one program per run and 128 columns, 32 at a width of 4,096: a lone run of all tokens
    would leave most of a GPU idle. Each run's sums take memory and a reading more, hence at most 8.
    """
    eighth = -(-num_tokens // _MOST_RUNS)
    return max(_FEWEST_TOKENS_OF_A_RUN, -(-eighth // _ROW_TILE) * _ROW_TILE)


def _num_runs(num_tokens: int) -> int:
    return -(-num_tokens // _run_tokens(num_tokens))


_captured: dict[tuple[int, torch.device], LoraTables] = {}
"""Tables that a CUDA graph reads, for as long as the process lives: the holder of the graph is not known here. 2 KiB each."""


def _token_tables(num_tokens: int, device: torch.device) -> LoraTables:
    """The tables' part that depends on the number of tokens alone: one adapter's runs, one after another."""
    tables = _captured.get((num_tokens, device)) or _recent_tables(num_tokens, device)
    if _is_capturing(device):
        _captured[num_tokens, device] = tables
    return tables


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.lru_cache(maxsize=4096)
def _recent_tables(num_tokens: int, device: torch.device) -> LoraTables:
    step = _run_tokens(num_tokens)
    starts = range(0, num_tokens, step)
    runs = [Run(t0, min(t0 + step, num_tokens), (min(step, num_tokens - t0),)) for t0 in starts]
    empty = np.zeros((1, len(runs), ADDRESS_FIELDS), np.int64)
    slots = Slots(empty, starts_LS=empty[:, :, 0], scales_LS=empty[:, :, 0], module_keys_L=empty[:, 0, 0], weights=[None])
    tables = build_tables(runs, slots, num_tokens, None, device)
    if device.type == "cuda":  # whichever stream uses it next, the copy is through
        torch.cuda.current_stream(device).synchronize()
    return tables


@functools.lru_cache(maxsize=256)
def _shape_group(columns: int, inner: int, device: torch.device) -> LinearGroup:
    from tlora.kernels.fused_linear import make_group

    return make_group(0, (columns,), inner, device)


def _group(x_TK: Tensor, b_NR: Tensor) -> LinearGroup:
    return _shape_group(b_NR.shape[0], x_TK.shape[1], x_TK.device)


def _place(x_TK: Tensor, a_RK: Tensor, b_NR: Tensor, scale: float, sums: Tensor | None) -> LoraTables:
    """The tables of this call. Their addresses point into their own `weights`, and into `sums` (fp32 [runs, r * (K + N)], of dA and dB)."""
    from tlora.kernels.triton_place import place_kernel

    (rank, inner), columns, runs = a_RK.shape, b_NR.shape[0], _num_runs(x_TK.shape[0])
    a_RK, bt_RN = _packed_rows(a_RK, x_TK.dtype), x_TK.new_empty(rank, columns)
    rows = torch.empty(1, runs, ADDRESS_FIELDS, dtype=torch.int64, device=x_TK.device)
    scales = torch.empty(1, runs, dtype=torch.float32, device=x_TK.device)
    shape = {"S": _MOST_RUNS, "R": 16, "BN": 64, "GRADIENTS": sums is not None}
    place_kernel[(-(-columns // shape["BN"]),)](
        a_RK, b_NR, bt_RN, sums, rows, scales, scale, rank, columns, inner, runs, b_NR.stride(0), b_NR.stride(1), **shape
    )
    tables = _token_tables(x_TK.shape[0], x_TK.device)
    return replace(tables, rows_LS5=rows, scales_LS=scales, weights=[(a_RK, bt_RN)], width=rank_width(rank))
