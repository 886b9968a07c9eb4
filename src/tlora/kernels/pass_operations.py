"""Operations that find what they need of their micro-batch behind the number of its pass.

torch.compile sees opaque operations on tensors and widths. What changes from batch to batch (the jobs, the addresses of their rows,
the samples) and the base's weights are looked up by a number in a CPU tensor. So nothing recompiles when jobs join, leave or finish,
or when a layer's weights move.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tlora.kernels.chunk_layout import ChunkTables
from tlora.kernels.expert_kernels import ExpertBatch, ExpertRouting
from tlora.kernels.experts import ExpertWeights
from tlora.kernels.frozen import BaseWeights
from tlora.kernels.fused_linear import LinearGroup, backward, forward
from tlora.kernels.lora_tables import LoraTables
from tlora.kernels.packed_attention import AttentionPlan, attend, attend_backward


@dataclass(frozen=True)
class ExpertPass:
    """What the operations of experts look up (`expert_operations.py`), in a pass with a job that adapts some.

    `names` and `weights` of all parameters, by number. `routings` of each block, `shrunk` of each parameter, from forward to backward.
    """

    batch: ExpertBatch
    names: Sequence[str]
    weights: Sequence[Callable[[], ExpertWeights]]
    routings: dict[int, ExpertRouting] = field(default_factory=dict)
    shrunk: dict[int, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class PassState:
    """What the operations of one pass look up, from its forward to the end of its backward.

    `names`: all linears, group by group. `shrunk`: each group's S, from forward to backward. `recomputing`: a layer runs again, for what
    its backward needs. The operations know the state by `number`, a 0-d int64 tensor on the CPU, for as long as the state is referenced.
    """

    groups: Sequence[LinearGroup]
    names: Sequence[str]
    weights: BaseWeights
    tables: LoraTables
    attention: AttentionPlan
    experts: ExpertPass | None = None
    chunks: ChunkTables | None = None  # of samples, in a base with recurrent layers
    shrunk: dict[int, Tensor] = field(default_factory=dict)
    recomputing: bool = False
    number: Tensor = field(init=False)

    def __post_init__(self) -> None:
        number = next(_numbers)
        self.number = torch.tensor(number)
        _states[number] = self

    @property
    def shape(self) -> tuple[object, ...]:
        """Passes of as many tokens and one shape launch the same kernels, over tensors that differ in nothing but their numbers."""
        return *self.tables.shape, *self.attention.shape, self.experts_shape

    @property
    def experts_shape(self) -> Hashable:
        """The part of it that goes by jobs at experts."""
        return None if self.experts is None else self.experts.batch.shape

    def weights_of(self, group: LinearGroup) -> tuple[list[Tensor], list[Tensor]]:
        """Weights [N_m, K] and biases [N_m] (or none at all) of a group's linears."""
        linears = [self.weights(name) for name in self.names[group.first : group.first + group.size]]
        return [linear.weight.operand() for linear in linears], [linear.bias_N for linear in linears if linear.bias_N is not None]


def experts_of(pass_number: Tensor) -> ExpertPass:
    """Of a pass with a job that adapts experts."""
    experts = _states[int(pass_number)].experts
    assert experts is not None, "no job of this pass adapts experts"
    return experts


def chunks_of(pass_number: Tensor) -> ChunkTables:
    """Of a pass over a base with recurrent layers."""
    chunks = _states[int(pass_number)].chunks
    assert chunks is not None, "the base of this pass has no recurrent layers"
    return chunks


_states: WeakValueDictionary[int, PassState] = WeakValueDictionary()
_numbers = count()


@contextmanager
def recomputing(pass_number: Tensor) -> Iterator[None]:
    """Layers that run within have run before in this pass: S is there, and what only their own output would need is left out."""
    state = _states[int(pass_number)]
    state.recomputing = True
    try:
        yield
    finally:
        state.recomputing = False


@torch.library.custom_op("tlora::multi_lora_group", mutates_args=())
def multi_lora_group(x_TK: Tensor, widths: Sequence[int], group: Tensor, pass_number: Tensor) -> list[Tensor]:
    """[T, N_m] for each linear of `group`: the base and the adapters of the pass. `widths` are the N_m.

    `group` and `pass_number` are 0-d int64 tensors on the CPU. Backward gives dx and adds the adapters' gradients to their sums. One y
    for each linear, because autograd would put the gradients of parts of one together again, which at 8B took 17 ms of 500.
    """
    state, number = _states[int(pass_number)], int(group)
    if state.recomputing and not state.groups[number].feeds_backward:
        return _empty(x_TK, widths)
    weights, biases = state.weights_of(state.groups[number])
    known = state.shrunk[number] if state.recomputing else None
    ys, state.shrunk[number] = forward(_rows(x_TK), weights, biases, state.groups[number], state.tables, known)
    return ys


@multi_lora_group.register_fake
def _(x_TK: Tensor, widths: Sequence[int], group: Tensor, pass_number: Tensor) -> list[Tensor]:
    return _empty(x_TK, widths)


def _empty(x_TK: Tensor, widths: Sequence[int]) -> list[Tensor]:
    return [x_TK.new_empty(x_TK.shape[0], width) for width in widths]


@torch.library.custom_op("tlora::multi_lora_group_backward", mutates_args=())
def _linear_backward(dys: list[Tensor], x_TK: Tensor, group: Tensor, pass_number: Tensor) -> Tensor:
    state, number = _states[int(pass_number)], int(group)
    dys = [dy.contiguous() for dy in dys]
    weights, _ = state.weights_of(state.groups[number])
    return backward(dys, _rows(x_TK), state.shrunk.pop(number), weights, state.groups[number], state.tables)


@_linear_backward.register_fake
def _(dys: list[Tensor], x_TK: Tensor, group: Tensor, pass_number: Tensor) -> Tensor:
    return torch.empty_like(x_TK, memory_format=torch.contiguous_format)


def _rows(x: Tensor) -> Tensor:
    """As the kernels read it: rows of adjacent elements that start at multiples of 16 bytes."""
    aligned = x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x_TK, _widths, group, pass_number = inputs
    ctx.save_for_backward(x_TK, group, pass_number)


def _differentiate(ctx: Any, dys: list[Tensor]) -> tuple[Any, ...]:
    x_TK, group, pass_number = ctx.saved_tensors
    return _linear_backward(dys, x_TK, group, pass_number), None, None, None


multi_lora_group.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("tlora::packed_attention", mutates_args=())
def packed_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pass_number: Tensor, scale: float, window: int, softcap: float, chunk: int,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal attention of each sample of the pass by itself: out [T, H, D] and its log-sum-exp [H, T] in fp32.

    `window` 0, `softcap` 0.0 and `chunk` 0 mean none. H is a multiple of G. Sinks are frozen: they get no gradient.
    """
    return attend(q_THD, k_TGD, v_TGD, _states[int(pass_number)].attention.cut(chunk), scale, window, softcap, sinks_H)


@packed_attention.register_fake
def _(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pass_number: Tensor, scale: float, window: int, softcap: float, chunk: int,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    return out_THD, q_THD.new_empty(q_THD.shape[1], q_THD.shape[0], dtype=torch.float32)


@torch.library.custom_op("tlora::packed_attention_backward", mutates_args=())
def _attention_backward(
    dout_THD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_THD: Tensor, lse_HT: Tensor, pass_number: Tensor,
    scale: float, window: int, softcap: float, chunk: int, sinks: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    plan = _states[int(pass_number)].attention.cut(chunk)
    return attend_backward(dout_THD, q_THD, k_TGD, v_TGD, out_THD, lse_HT, plan, scale, window, softcap, sinks)


@_attention_backward.register_fake
def _(
    dout_THD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_THD: Tensor, lse_HT: Tensor, pass_number: Tensor,
    scale: float, window: int, softcap: float, chunk: int, sinks: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q_THD, k_TGD, v_TGD))
    return dq, dk, dv


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_THD, k_TGD, v_TGD, pass_number, scale, window, softcap, chunk, sinks_H = inputs
    ctx.options = scale, window, softcap, chunk, sinks_H is not None
    ctx.save_for_backward(q_THD, k_TGD, v_TGD, *output, pass_number)


def _differentiate_attention(ctx: Any, dout_THD: Tensor, dlse_HT: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv = _attention_backward(dout_THD, *ctx.saved_tensors, *ctx.options)
    return dq, dk, dv, None, None, None, None, None, None


packed_attention.register_autograd(_differentiate_attention, setup_context=_save_attention)
