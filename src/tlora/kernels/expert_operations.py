"""Experts with adapters as operations of a pass: torch.compile sees opaque ones, which look up the rest as `pass_operations.py`'s do.

A parameter's number and a block's, which is its first parameter's, are 0-d int64 tensors on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tlora.kernels import expert_kernels as kernels
from tlora.kernels.pass_operations import experts_of


@torch.library.custom_op("tlora::route_experts", mutates_args=())
def route_experts(experts_TK: Tensor, block: Tensor, pass_number: Tensor) -> Tensor:
    """Sort the rows of a block. The pass keeps the tables; what is given, [1], says that they are there.

    No tensor that is kept may be given: torch.compile may write other things where it lies, once no operation of its own reads it.
    """
    experts = experts_of(pass_number)
    weight = experts.weights[int(block)]().weight
    tile_rows = kernels.tile_rows_for(experts_TK.numel(), weight.shape[0], weight.dtype)
    routing = kernels.route(experts_TK, experts.batch, weight.shape[0], tile_rows)
    experts.routings[int(block)] = routing
    return torch.zeros(1, dtype=torch.int32, device=experts_TK.device)


@route_experts.register_fake
def _(experts_TK: Tensor, block: Tensor, pass_number: Tensor) -> Tensor:
    return experts_TK.new_empty(1, dtype=torch.int32)


@torch.library.custom_op("tlora::expert_linear", mutates_args=())
def expert_linear(x: Tensor, routed: Tensor, columns: int, slots: int, parameter: Tensor, block: Tensor, pass_number: Tensor) -> Tensor:
    """y [S, columns] as `expert_kernels.expert_linear`, of the base and the adapters of the pass. `slots`: of x [T, K] the rows that each
    token has, or 0 where x is [S, K]. `routed`: what `route_experts` gave.
    """
    experts, number = experts_of(pass_number), int(parameter)
    rows = experts.batch.rows(experts.names[number])
    y_SN, s = kernels.forward(x.contiguous(), experts.weights[number](), experts.routings[int(block)], rows, slots > 0)
    if s is not None:
        experts.shrunk[number] = s
    return y_SN


@expert_linear.register_fake
def _(x: Tensor, routed: Tensor, columns: int, slots: int, parameter: Tensor, block: Tensor, pass_number: Tensor) -> Tensor:
    return x.new_empty(x.shape[0] * (slots or 1), columns)


@torch.library.custom_op("tlora::expert_linear_backward", mutates_args=())
def _linear_backward(dy_SN: Tensor, x: Tensor, slots: int, parameter: Tensor, block: Tensor, pass_number: Tensor) -> Tensor:
    experts, number = experts_of(pass_number), int(parameter)
    rows, s = experts.batch.rows(experts.names[number]), experts.shrunk.pop(number, None)
    routing = experts.routings[int(block)]
    dx = kernels.backward(dy_SN.contiguous(), x.contiguous(), s, experts.weights[number](), routing, rows, slots > 0)
    assert dx is not None, "weights were given"
    return dx


@_linear_backward.register_fake
def _(dy_SN: Tensor, x: Tensor, slots: int, parameter: Tensor, block: Tensor, pass_number: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _routed, _columns, ctx.slots, parameter, block, pass_number = inputs
    ctx.save_for_backward(x, parameter, block, pass_number)


def _differentiate(ctx: Any, dy_SN: Tensor) -> tuple[Any, ...]:
    x, parameter, block, pass_number = ctx.saved_tensors
    return _linear_backward(dy_SN, x, ctx.slots, parameter, block, pass_number), None, None, None, None, None, None


expert_linear.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("tlora::combine_experts", mutates_args=())
def combine_experts(y_SH: Tensor, weights_TK: Tensor, block: Tensor, pass_number: Tensor) -> Tensor:
    """out [T, H] as `expert_kernels.combine`."""
    return kernels.add_slots(y_SH.contiguous(), weights_TK.contiguous(), experts_of(pass_number).routings[int(block)])


@combine_experts.register_fake
def _(y_SH: Tensor, weights_TK: Tensor, block: Tensor, pass_number: Tensor) -> Tensor:
    return y_SH.new_empty(weights_TK.shape[0], y_SH.shape[1])


@torch.library.custom_op("tlora::combine_experts_backward", mutates_args=())
def _combine_backward(dout_TH: Tensor, y_SH: Tensor, weights_TK: Tensor, block: Tensor, pass_number: Tensor) -> tuple[Tensor, Tensor]:
    routing = experts_of(pass_number).routings[int(block)]
    dy_SH, dweights_TK = kernels.spread_slots(dout_TH.contiguous(), y_SH.contiguous(), weights_TK.contiguous(), routing, weighs=True)
    assert dweights_TK is not None, "they were asked for"
    return dy_SH, dweights_TK


@_combine_backward.register_fake
def _(dout_TH: Tensor, y_SH: Tensor, weights_TK: Tensor, block: Tensor, pass_number: Tensor) -> tuple[Tensor, Tensor]:
    dy_SH, dweights_TK = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (y_SH, weights_TK))
    return dy_SH, dweights_TK


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_combine(ctx: Any, dout_TH: Tensor) -> tuple[Any, ...]:
    return *_combine_backward(dout_TH, *ctx.saved_tensors), None, None


combine_experts.register_autograd(_differentiate_combine, setup_context=_save_combine)
