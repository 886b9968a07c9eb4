"""Layers of experts with jobs, for tests of their kernels: made small, run by the kernels and by the plain path in fp64."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from tests.kernels.interpreter import DEVICE, interpreted
from tlora.kernels import experts as plain
from tlora.kernels.multi_lora import LoraWeights
from tlora.kernels.reference import Segment

with interpreted():
    from tlora.kernels import expert_kernels as kernels


@dataclass(frozen=True)
class Job:
    """Samples of so many tokens, and the rank an expert at the layer (0: it adapts it not); what it holds comes from `seed`."""

    lengths: tuple[int, ...]
    rank: int
    seed: int
    scale: float = 1.5


@dataclass
class Layer:
    """A frozen parameter of E experts in either layout, and a router. `only`: the experts that there are rows of."""

    experts: int = 5
    slots: int = 2
    inner: int = 48
    columns: int = 80
    transposed: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.float32
    only: tuple[int, ...] | None = None

    @cached_property
    def weights(self) -> plain.ExpertWeights:
        """Drawn when they are first asked for: tests are collected also where there is no GPU."""
        shape = (self.experts, self.inner, self.columns) if self.transposed else (self.experts, self.columns, self.inner)
        weight = drawn(0, shape, self.dtype) * self.inner**-0.5
        return plain.ExpertWeights(weight, drawn(1, (self.experts, self.columns), self.dtype) if self.bias else None, self.transposed)

    def chosen(self, job: Job) -> Tensor:
        """int64 [t, k]: each token's experts, all different."""
        among = self.only or tuple(range(self.experts))
        rng = np.random.default_rng(job.seed)
        rows = [rng.permutation(among)[: self.slots] for _ in range(sum(job.lengths))]
        return torch.from_numpy(np.stack(rows)).to(DEVICE)


def drawn(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).to(DEVICE)


@dataclass
class Case:
    """A layer with the batch of some jobs: x [T, K], dy [S, N] by token and slot, banks that begin with NaN and end with it."""

    layer: Layer
    jobs: tuple[Job, ...]
    padding: int = 0
    x_TK: Tensor = field(init=False)
    dy_TKN: Tensor = field(init=False)
    chosen_TK: Tensor = field(init=False)
    banks: list[Tensor] = field(init=False)  # of all jobs: A, B, dA, dB

    def __post_init__(self) -> None:
        layer, everyone = self.layer, (*self.jobs, *([Job((self.padding,), 0, seed=99)] if self.padding else []))
        tokens = [sum(job.lengths) for job in everyone]
        self.x_TK = torch.cat([drawn(100 + j.seed, (t, layer.inner), layer.dtype) for j, t in zip(everyone, tokens, strict=True)])
        dys = [drawn(200 + j.seed, (t, layer.slots, layer.columns), layer.dtype) for j, t in zip(everyone, tokens, strict=True)]
        self.dy_TKN, self.chosen_TK = torch.cat(dys), torch.cat([layer.chosen(job) for job in everyone])
        rows = [job.rank * layer.experts for job in self.jobs]
        self.starts = [8, *(8 + end for end in accumulate(-(-count // 8) * 8 for count in rows))]
        self.banks = []
        for number, width in enumerate((layer.inner, layer.columns) * 2):
            bank = torch.full((self.starts[-1] + 8, width), torch.nan, dtype=layer.dtype if number < 2 else torch.float32, device=DEVICE)
            for job, start, count in zip(self.jobs, self.starts, rows, strict=False):
                bank[start : start + count] = drawn(300 + 10 * number + job.seed, (count, width), bank.dtype) * 0.3
            self.banks.append(bank)

    def sums(self, job: int) -> list[Tensor]:
        """dA and dB of a job, what was there before included."""
        start, count = self.starts[job], self.jobs[job].rank * self.layer.experts
        return [bank[start : start + count].clone() for bank in self.banks[2:]]

    def rows(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        if not any(job.rank for job in self.jobs):
            return {}
        table = [[*(bank[start].data_ptr() for bank in self.banks), job.rank] for job, start in zip(self.jobs, self.starts, strict=False)]
        return {"w": (np.array(table, np.int64), np.array([job.scale for job in self.jobs]))}

    def by_kernels(self, gathers: bool = True, tile_rows: int = 64) -> tuple[Tensor, Tensor]:
        """y by token and slot [T, k, N], and dx [T, K]; sums are added to."""
        layer = self.layer
        batch = kernels.make_batch([job.lengths for job in self.jobs], len(self.x_TK), self.rows(), DEVICE)
        routing = kernels.route(self.chosen_TK, batch, layer.experts, tile_rows)
        rows, x = batch.rows("w"), self.x_TK
        x = x if gathers else x.index_select(0, routing.order_S // layer.slots)
        y_SN, s = kernels.forward(x, layer.weights, routing, rows, gathers)
        dy_SN = self.dy_TKN.reshape(-1, layer.columns).index_select(0, routing.order_S)
        dx = kernels.backward(dy_SN, x, s, layer.weights, routing, rows, gathers)
        assert dx is not None
        if not gathers:
            dx = kernels.add_slots(dx, None, routing)
        return y_SN.index_select(0, routing.inverse_S).view(-1, layer.slots, layer.columns), dx

    def by_formula(self) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
        """The same in fp64, and the sums of each job, by the plain path."""
        layer, (a, b, da, db) = self.layer, (bank.double() for bank in self.banks)
        ends = list(accumulate(sum(job.lengths) for job in self.jobs))
        routing = plain.route(self.chosen_TK, ends, layer.experts)
        segments = []
        for run in routing.runs:
            if run.run < len(self.jobs) and (job := self.jobs[run.run]).rank:
                first = self.starts[run.run] + run.expert * job.rank
                segments.append(Segment(run.s0, run.s1, first, first + job.rank, job.scale))
        w: Tensor = layer.weights.weight  # type: ignore[assignment]
        bias = None if layer.weights.bias_EN is None else layer.weights.bias_EN.double()
        frozen = plain.ExpertWeights(w.double(), bias, layer.transposed)
        x_TK = self.x_TK.double().requires_grad_()
        adapters = plain.ExpertAdapters(LoraWeights(a, b, da, db), tuple(segments))
        y_SN = plain.expert_linear(plain.dispatch(x_TK, routing), lambda: frozen, routing, adapters)
        y_SN.backward(self.dy_TKN.double().reshape(-1, layer.columns).index_select(0, routing.order_S))
        found = [[d[s : s + j.rank * layer.experts] for d in (da, db)] for j, s in zip(self.jobs, self.starts, strict=False)]
        assert x_TK.grad is not None
        return y_SN.detach().index_select(0, routing.inverse_S).view(-1, layer.slots, layer.columns), x_TK.grad, found
