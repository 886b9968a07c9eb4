"""Micro-batches on the GPU now, by number, and the operations that find theirs by it.

To torch.compile the operations are opaque and take tensors alone: what changes from batch to batch (who is there, where their rows
lie, which samples) is looked up behind a number in a CPU tensor, so that nothing recompiles when jobs join, leave or finish.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from tlora.kernels.fused_linear import LinearGroup, backward, forward
from tlora.kernels.lora_tables import LoraTables
from tlora.kernels.packed_attention import AttentionPlan, attend, attend_backward


@dataclass
class Flight:
    """One micro-batch: its tables, its samples, and each group's S from forward to backward."""

    groups: Sequence[LinearGroup]
    tables: LoraTables
    attention: AttentionPlan
    shrunk: dict[int, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[object, ...]:
        """Flights of as many tokens and one shape launch the same kernels, over tensors that differ in nothing but their numbers."""
        return *self.tables.shape, *self.attention.shape


_flights: dict[int, Flight] = {}
_numbers = count()


@contextmanager
def in_flight(flight: Flight) -> Iterator[Tensor]:
    """Makes `flight` known to the operations; gives the int64 tensor that they take."""
    number = next(_numbers)
    _flights[number] = flight
    try:
        yield torch.tensor(number)
    finally:
        del _flights[number]


@torch.library.custom_op("tlora::multi_lora_linear", mutates_args=())
def multi_lora_linear(x_TK: Tensor, weights: list[Tensor], biases: list[Tensor], group: Tensor, flight: Tensor) -> list[Tensor]:
    """[T, N_m] for each linear of `group`: the base (`weights` [N_m, K], `biases` [N_m] or none) and the adapters of `flight`.

    `group` and `flight` are 0-d int64 tensors on the CPU. Backward gives dx and adds the adapters' gradients to their sums. One y
    for each linear, because autograd would put the gradients of parts of one together again, which at 8B took 17 ms of 500.
    """
    now, number = _flights[int(flight)], int(group)
    ys, now.shrunk[number] = forward(_rows(x_TK), weights, biases, now.groups[number], now.tables)
    return ys


@multi_lora_linear.register_fake
def _(x_TK: Tensor, weights: list[Tensor], biases: list[Tensor], group: Tensor, flight: Tensor) -> list[Tensor]:
    return [x_TK.new_empty(x_TK.shape[0], weight.shape[0]) for weight in weights]


@torch.library.custom_op("tlora::multi_lora_linear_backward", mutates_args=())
def _linear_backward(dys: list[Tensor], x_TK: Tensor, weights: list[Tensor], group: Tensor, flight: Tensor) -> Tensor:
    now, number = _flights[int(flight)], int(group)
    dys = [dy.contiguous() for dy in dys]
    return backward(dys, _rows(x_TK), now.shrunk.pop(number), weights, now.groups[number], now.tables)


@_linear_backward.register_fake
def _(dys: list[Tensor], x_TK: Tensor, weights: list[Tensor], group: Tensor, flight: Tensor) -> Tensor:
    return torch.empty_like(x_TK, memory_format=torch.contiguous_format)


def _rows(x: Tensor) -> Tensor:
    """As the kernels read it: rows of adjacent elements that start at multiples of 16 bytes."""
    aligned = x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x_TK, weights, biases, group, flight = inputs
    ctx.num_biases = len(biases)
    ctx.save_for_backward(x_TK, *weights, group, flight)


def _differentiate(ctx: Any, dys: list[Tensor]) -> tuple[Any, ...]:
    x_TK, *weights, group, flight = ctx.saved_tensors
    return _linear_backward(dys, x_TK, weights, group, flight), [None] * len(weights), [None] * ctx.num_biases, None, None


multi_lora_linear.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("tlora::packed_attention", mutates_args=())
def packed_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, flight: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """Causal attention of each sample of `flight` by itself: out [T, H, D] and its log-sum-exp [H, T] in fp32.

    `window` 0 and `softcap` 0.0 mean none. H is a multiple of G.
    """
    return attend(q_THD, k_TGD, v_TGD, _flights[int(flight)].attention, scale, window, softcap)


@packed_attention.register_fake
def _(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, flight: Tensor, scale: float, window: int, softcap: float) -> tuple[Tensor, Tensor]:
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    return out_THD, q_THD.new_empty(q_THD.shape[1], q_THD.shape[0], dtype=torch.float32)


@torch.library.custom_op("tlora::packed_attention_backward", mutates_args=())
def _attention_backward(
    dout_THD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_THD: Tensor, lse_HT: Tensor, flight: Tensor,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    plan = _flights[int(flight)].attention
    return attend_backward(dout_THD, q_THD, k_TGD, v_TGD, out_THD, lse_HT, plan, scale, window, softcap)


@_attention_backward.register_fake
def _(
    dout_THD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_THD: Tensor, lse_HT: Tensor, flight: Tensor,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q_THD, k_TGD, v_TGD))
    return dq, dk, dv


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_THD, k_TGD, v_TGD, flight, *ctx.options = inputs
    ctx.save_for_backward(q_THD, k_TGD, v_TGD, *output, flight)


def _differentiate_attention(ctx: Any, dout_THD: Tensor, dlse_HT: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv = _attention_backward(dout_THD, *ctx.saved_tensors, *ctx.options)
    return dq, dk, dv, None, None, None, None


packed_attention.register_autograd(_differentiate_attention, setup_context=_save_attention)
