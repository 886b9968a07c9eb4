"""Recurrences as operations of a pass: torch.compile sees opaque ones, which look up the samples as `pass_operations.py`'s do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tlora.kernels import delta_kernels, triton_conv
from tlora.kernels.delta_rule import CHUNK
from tlora.kernels.pass_operations import chunks_of


@torch.library.custom_op("tlora::packed_convolution", mutates_args=())
def packed_convolution(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, silu: bool, pass_number: Tensor) -> Tensor:
    """y [T, C] as `delta_rule.shifted_convolution`, over the samples of the pass. Weight and bias are frozen: they get no gradient."""
    return triton_conv.convolve(x_TC, weight_CW, bias_C, chunks_of(pass_number).positions, silu)


@packed_convolution.register_fake
def _(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, silu: bool, pass_number: Tensor) -> Tensor:
    return torch.empty_like(x_TC, memory_format=torch.contiguous_format)


@torch.library.custom_op("tlora::packed_convolution_backward", mutates_args=())
def _convolution_backward(dy_TC: Tensor, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, silu: bool, pass_number: Tensor) -> Tensor:
    return triton_conv.convolve_back(dy_TC, x_TC, weight_CW, bias_C, chunks_of(pass_number).positions, silu)


@_convolution_backward.register_fake
def _(dy_TC: Tensor, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, silu: bool, pass_number: Tensor) -> Tensor:
    return torch.empty_like(x_TC, memory_format=torch.contiguous_format)


def _save_convolution(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_TC, weight_CW, bias_C, ctx.silu, pass_number = inputs
    ctx.save_for_backward(x_TC, weight_CW, bias_C, pass_number)


def _differentiate_convolution(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:
    x_TC, weight_CW, bias_C, pass_number = ctx.saved_tensors
    return _convolution_backward(dy_TC, x_TC, weight_CW, bias_C, ctx.silu, pass_number), None, None, None, None


packed_convolution.register_autograd(_differentiate_convolution, setup_context=_save_convolution)


@torch.library.custom_op("tlora::packed_delta_rule", mutates_args=())
def packed_delta_rule(
    q_THK: Tensor, k_THK: Tensor, v_TGV: Tensor, g_TG: Tensor, beta_TG: Tensor, normalize: bool, pass_number: Tensor
) -> tuple[Tensor, Tensor]:
    """out [T, G, V] as `delta_rule.gated_delta_rule`, over the samples of the pass, and the chunks' inverses, which backward reads."""
    return delta_kernels.forward(q_THK, k_THK, v_TGV, g_TG, beta_TG, chunks_of(pass_number), normalize)


@packed_delta_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalize: bool, pass_number: Tensor) -> tuple[Tensor, Tensor]:
    inverse_TGS = v.new_empty(*v.shape[:2], CHUNK, dtype=torch.float32)
    return torch.empty_like(v, memory_format=torch.contiguous_format), inverse_TGS


@torch.library.custom_op("tlora::packed_delta_rule_backward", mutates_args=())
def _delta_rule_backward(
    dout_TGV: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, inverse: Tensor, normalize: bool, pass_number: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return delta_kernels.backward(dout_TGV, q, k, v, g, beta, inverse, chunks_of(pass_number), normalize)


@_delta_rule_backward.register_fake
def _(
    dout_TGV: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, inverse: Tensor, normalize: bool, pass_number: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dg, dbeta = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, g, beta))
    return dq, dk, dv, dg, dbeta


def _save_delta_rule(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.normalize, pass_number = inputs
    ctx.save_for_backward(*tensors, output[1], pass_number)


def _differentiate_delta_rule(ctx: Any, dout_TGV: Tensor, _dinverse: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, pass_number = ctx.saved_tensors
    return *_delta_rule_backward(dout_TGV, *tensors, ctx.normalize, pass_number), None, None


packed_delta_rule.register_autograd(_differentiate_delta_rule, setup_context=_save_delta_rule)
