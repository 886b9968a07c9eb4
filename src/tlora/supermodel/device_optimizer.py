"""The optimizer steps of all jobs that are due together, on a GPU: everything is queued; one wait, whenever it suits, reads what came
of it.

Tables and buffers are made when a job joins, so that a step takes no memory of the device. The CPU's path is `adapters/adamw.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tlora.adapters.adamw import StepStats, count_step, learning_rate
from tlora.adapters.bank import AdapterBank, SlotAddress
from tlora.adapters.state import AdapterState
from tlora.job import TrainConfig
from tlora.kernels import fused_adamw
from tlora.kernels.device import ToHost
from tlora.kernels.fused_adamw import BankRun, FlatState, StepBuffers, StepRule


class Stepping(Protocol):
    """What a step needs of a resident job."""

    @property
    def state(self) -> AdapterState: ...
    @property
    def train(self) -> TrainConfig: ...
    @property
    def total_steps(self) -> int: ...


def _rate(job: Stepping) -> float:
    return learning_rate(job.train, job.state.step, job.total_steps)


def _rule(job: Stepping) -> StepRule:
    t = job.train
    return StepRule(_rate(job), t.adam_beta1, t.adam_beta2, t.adam_epsilon, t.weight_decay, t.max_grad_norm, job.state.updates)


@dataclass
class _Bound:
    """A resident's buffers, and of what they were made: the bank's addresses, and the state's tensors with their versions."""

    buffers: StepBuffers
    aligned: bool = False
    addresses: Mapping[str, SlotAddress] | None = None
    tensors: tuple[tuple[Tensor, int], ...] = ()


class DeviceOptimizer:
    """AdamW of the adapters in `bank`, each by itself; all that step together are waited for at once."""

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank
        self._bound: dict[str, _Bound] = {}
        self._weights_like = torch.empty(0, dtype=bank.dtype, device=bank.device)
        self._make_rows(8)

    def _make_rows(self, count: int) -> None:
        """A row of scalars and of outcomes for each of `count` jobs."""
        self._scalars, self._outcomes = (
            torch.zeros(count, n, dtype=torch.float64, device=self._bank.device)
            for n in (fused_adamw.NUM_SCALARS, fused_adamw.NUM_OUTCOMES)
        )

    def add(self, job_id: str, state: AdapterState) -> None:
        """Make the buffers of a job that has its slot. May run out of memory; nothing is kept then."""
        counts = [n for s in state.layout.shapes for n in (s.rank * s.in_features, s.rank * s.out_features)]
        buffers = StepBuffers.empty(fused_adamw.num_chunks(counts), self._bank.sum_dtype, self._bank.device)
        if len(self._bound) >= len(self._scalars):
            self._make_rows(2 * len(self._scalars))
        self._bound[job_id] = _Bound(buffers)
        self._refresh(job_id, state)

    def remove(self, job_id: str) -> None:
        self._bound.pop(job_id, None)

    @torch.no_grad()
    def queue(self, due: Mapping[str, Stepping]) -> tuple[Callable[[], dict[str, StepStats]], dict[str, Exception]]:
        """Queue the step of each job of `due`: clip its summed gradient, apply AdamW, write its weights into the bank, zero its sums.

        Returns what waits for the steps, enters them into the counters and tells what they did, to be called once and before these
        jobs step again; and for jobs whose step could not be queued, why: those have not stepped.
        """
        if not due:
            return dict, {}
        rows = [fused_adamw.scalars_of(_rule(job), self._bank.sum_dtype, self._bank.dtype) for job in due.values()]
        num_due, errors = len(rows), dict[str, Exception]()
        host = torch.tensor(rows, dtype=torch.float64)
        self._scalars[:num_due].copy_(host.pin_memory() if self._scalars.is_cuda else host, non_blocking=True)
        for i, (job_id, job) in enumerate(due.items()):
            try:
                self._queue(job_id, job.state, i)
            except Exception as error:
                errors[job_id] = error
        outcomes = ToHost(self._outcomes[:num_due])

        def read() -> dict[str, StepStats]:
            stats: dict[str, StepStats] = {}
            for (job_id, job), outcome in zip(due.items(), outcomes.read(), strict=True):
                if job_id not in errors:
                    stats[job_id] = count_step(job.state, _rate(job), fused_adamw.norm_of(outcome), fused_adamw.applied(outcome))
            return stats

        return read, errors

    def _queue(self, job_id: str, state: AdapterState, row: int) -> None:
        self._refresh(job_id, state)
        bound, flat = self._bound[job_id], FlatState(state.params, state.exp_avg, state.exp_avg_sq)
        fused_adamw.launch_step(flat, bound.buffers, bound.aligned, self._weights_like, self._scalars[row], self._outcomes[row])

    def _refresh(self, job_id: str, state: AdapterState) -> None:
        """Make anew what no longer holds: addresses when the bank grew, magnitudes when someone else wrote the state."""
        bound, addresses = self._bound[job_id], self._bank.addresses(job_id)
        if bound.addresses is not addresses:
            runs: list[BankRun] = []
            for s in state.layout.shapes:
                at = addresses[s.module]
                runs += [BankRun(at.a, at.da, s.rank * s.in_features), BankRun(at.b, at.db, s.rank * s.out_features)]
            table, bound.aligned = fused_adamw.chunk_table(runs, self._bank.dtype.itemsize, self._bank.sum_dtype.itemsize)
            bound.buffers.chunks_C4.copy_(torch.from_numpy(table))
            bound.addresses = addresses
        # The kernels' own writes do not count as versions; any other in-place operation does.
        tensors = tuple((t, t._version) for t in (state.params, state.exp_avg, state.exp_avg_sq))
        if len(bound.tensors) != 3 or any(a is not b or v != w for (a, v), (b, w) in zip(bound.tensors, tensors, strict=True)):
            for t, _ in tensors:
                assert t.dtype == self._bank.sum_dtype and t.device == self._outcomes.device and t.is_contiguous(), (t.dtype, t.device)
            fused_adamw.note_largest(FlatState(*(t for t, _ in tensors)), bound.buffers.largest_3C)
            bound.tensors = tensors
