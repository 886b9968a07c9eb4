"""Experts of a mixture with many adapters, in plain torch: tokens sorted by expert, products of one (expert, job) at a time.

T tokens, k slots of each, S = T k rows, E experts, H hidden size. Rows are sorted stably by (expert, job, sample, position, slot), so that
the rows of one expert and one job lie together, in the order in which they lie when the job is trained alone. No product has rows of two
jobs or two experts, nothing is dropped, and no sum depends on the order in which threads end: slots are added in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tlora.kernels.device import to_device
from tlora.kernels.gemm import linear
from tlora.kernels.multi_lora import LoraWeights
from tlora.kernels.reference import Segments, lora_backward_, lora_forward_


@dataclass(frozen=True, slots=True)
class ExpertRun:
    """Rows `s0:s1` go to `expert`; they are of run number `run` of the batch's tokens, one job's."""

    expert: int
    run: int
    s0: int
    s1: int


@dataclass(frozen=True)
class Routing:
    """Which rows go where. `order_S`: of each sorted row, the number token * k + slot; `inverse_S` the other way round."""

    slots: int
    order_S: Tensor
    inverse_S: Tensor
    runs: tuple[ExpertRun, ...]


@torch.no_grad()
def route(experts_TK: Tensor, ends: Sequence[int], num_experts: int) -> Routing:
    """Sort the rows of the tokens whose experts are given, int [T, k]. `ends`: where each job's tokens end, in order; tokens behind the
    last are padding, a run of their own. Waits for the device.

    On the meta device all tokens go to the first expert: as many rows are kept.
    """
    tokens, slots = experts_TK.shape
    flat_S = experts_TK.reshape(-1)
    order_S = torch.sort(flat_S, stable=True).indices
    inverse_S = torch.empty_like(order_S)
    inverse_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    bounds = [*ends, tokens] if not ends or ends[-1] < tokens else list(ends)
    count = len(bounds)
    if flat_S.is_meta:
        sizes = [[slots * (end - start) for start, end in zip([0, *bounds], bounds, strict=False)]]
    else:
        run_T = to_device(np.repeat(np.arange(count), np.diff([0, *bounds])), flat_S.device)
        keys_S = flat_S * count + run_T.repeat_interleave(slots)
        sizes = torch.bincount(keys_S, minlength=num_experts * count).view(-1, count).tolist()
        assert len(sizes) == num_experts, f"experts are numbered up to {len(sizes) - 1}, and there are {num_experts}"
    runs: list[ExpertRun] = []
    end = 0
    for expert, by_run in enumerate(sizes):
        for run, size in enumerate(by_run):
            start, end = end, end + size
            if size:
                runs.append(ExpertRun(expert, run, start, end))
    return Routing(slots, order_S, inverse_S, tuple(runs))


def dispatch(x_TH: Tensor, routing: Routing) -> Tensor:
    """x of each row [S, H]. Its gradient is added over a token's slots in their order."""
    return _Dispatch.apply(x_TH, routing)  # type: ignore[no-any-return]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return x_TH.index_select(0, routing.order_S // routing.slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_SH: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _add_slots(dx_SH.index_select(0, ctx.routing.inverse_S), ctx.routing.slots).to(dx_SH.dtype), None


def combine(y_SH: Tensor, weights_TK: Tensor, routing: Routing) -> Tensor:
    """out [T, H] = sum over slots of weight * y: each product rounded to the wider dtype of the two, added in the order of slots in fp32
    (fp64 for fp64), and rounded to the dtype of y.
    """
    return _Combine.apply(y_SH, weights_TK, routing)  # type: ignore[no-any-return]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_SH: Tensor, weights_TK: Tensor, routing: Routing) -> Tensor:
        ctx.save_for_backward(y_SH, weights_TK)
        ctx.routing = routing
        weighted_SH = y_SH.index_select(0, routing.inverse_S) * weights_TK.reshape(-1, 1)
        return _add_slots(weighted_SH, routing.slots).to(y_SH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TH: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        y_SH, weights_TK = ctx.saved_tensors
        routing: Routing = ctx.routing
        tokens_S = routing.order_S // routing.slots
        dout_SH = dout_TH.index_select(0, tokens_S)
        dy_SH = (dout_SH * weights_TK.reshape(-1, 1).index_select(0, routing.order_S)).to(y_SH.dtype)
        dweights_TK = None
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(y_SH.dtype, weights_TK.dtype)
            products_S = (dout_SH.to(wide) * y_SH.to(wide)).sum(1)
            dweights_TK = products_S.index_select(0, routing.inverse_S).view(weights_TK.shape).to(weights_TK.dtype)
        return dy_SH, dweights_TK, None


def _add_slots(values_SH: Tensor, slots: int) -> Tensor:
    """[T, H]: of rows in the order of tokens and slots, each token's in the order of its slots."""
    values_TKH = values_SH.view(-1, slots, values_SH.shape[1])
    total_TH = values_TKH[:, 0].to(torch.promote_types(values_SH.dtype, torch.float32), copy=True)
    for slot in range(1, slots):
        total_TH += values_TKH[:, slot]
    return total_TH


class Matrices(Protocol):
    """A tensor [E, A, B], or what is indexed like one by an expert's number: each time it may make the matrix anew."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def __getitem__(self, expert: int, /) -> Tensor: ...


@dataclass(frozen=True)
class ExpertWeights:
    """A frozen parameter of all experts: [E, N, K], or [E, K, N] where `transposed`; `bias_EN` [E, N] or none."""

    weight: Matrices
    bias_EN: Tensor | None
    transposed: bool

    def matrix(self, expert: int) -> Tensor:
        """[N, K]."""
        matrix = self.weight[expert]
        return matrix.t() if self.transposed else matrix

    def bias(self, expert: int) -> Tensor | None:
        """[N]."""
        return None if self.bias_EN is None else self.bias_EN[expert]

    @property
    def out_features(self) -> int:
        return self.weight.shape[2] if self.transposed else self.weight.shape[1]


@dataclass(frozen=True)
class ExpertAdapters:
    """What the jobs of a batch add at one parameter: their rows, which `segments` select, for the rows of x in sorted order."""

    weights: LoraWeights
    segments: Segments


def expert_linear(
    x_SK: Tensor, base: Callable[[], ExpertWeights], routing: Routing, adapters: ExpertAdapters | None, anchor: Tensor | None = None
) -> Tensor:
    """y [S, N]: for every run of rows y[s0:s1] = x[s0:s1] @ weight[e].T + bias[e], and for every segment of `adapters` as
    `reference.lora_forward_`. The base gets no gradient. `anchor` as in `multi_lora_linear`.
    """
    return _ExpertLinear.apply(x_SK, base, routing, adapters, anchor)  # type: ignore[no-any-return]


def _expert_of(run: ExpertRun) -> int:
    return run.expert


class _ExpertLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SK: Tensor,
        base: Callable[[], ExpertWeights],
        routing: Routing,
        adapters: ExpertAdapters | None,
        anchor: Tensor | None,
    ) -> Tensor:
        frozen = base()
        y_SN = x_SK.new_empty(x_SK.shape[0], frozen.out_features)
        for expert, runs in groupby(routing.runs, _expert_of):
            weight_NK, bias_N = frozen.matrix(expert), frozen.bias(expert)
            for run in runs:
                y_SN[run.s0 : run.s1] = linear(x_SK[run.s0 : run.s1], weight_NK, bias_N)
        shrunk: list[Tensor] = []
        if adapters is not None:
            shrunk = lora_forward_(y_SN, x_SK, adapters.weights.a_RK, adapters.weights.b_RN, adapters.segments)
            ctx.save_for_backward(x_SK, *shrunk)
        ctx.base, ctx.routing, ctx.adapters = base, routing, adapters
        return y_SN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_SN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        adapters: ExpertAdapters | None = ctx.adapters
        dx_SK = None
        if ctx.needs_input_grad[0]:
            frozen: ExpertWeights = ctx.base()
            parts = list[Tensor]()
            for expert, runs in groupby(ctx.routing.runs, _expert_of):
                weight_KN = frozen.matrix(expert).t()
                parts += [linear(dy_SN[run.s0 : run.s1], weight_KN) for run in runs]
            dx_SK = torch.cat(parts)
        if adapters is not None:
            x_SK, *shrunk = ctx.saved_tensors
            lora = adapters.weights
            lora_backward_(dx_SK, dy_SN, x_SK, shrunk, lora.a_RK, lora.b_RN, lora.da_RK, lora.db_RN, adapters.segments)
        return dx_SK, None, None, None, None
