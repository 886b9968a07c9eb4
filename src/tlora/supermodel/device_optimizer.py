"""The optimizer steps of all jobs that are due together, on a GPU: everything is queued; one wait, whenever it suits, reads what came
of it.

Tables and buffers are made when a job joins, so that a step takes no memory of the device. The CPU's path is `job_by_job.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora.adapters.adamw import StepStats, count_step, learning_rate
from tlora.adapters.bank import AdapterBank, SlotAddress
from tlora.adapters.layout import AdapterLayout, AdapterShape
from tlora.adapters.state import AdapterState
from tlora.kernels import bank_chunks, fused_adamw
from tlora.kernels.bank_chunks import BankRun
from tlora.kernels.device import ToHost
from tlora.kernels.fused_adamw import FlatState, StepBuffers, StepRule
from tlora.supermodel.optimizer_steps import OPEN, PROVEN, REFUSED, PartRule, QueuedSteps, Stepping


def _rate(job: Stepping) -> float:
    return learning_rate(job.train, job.state.step, job.total_steps)


def _rule(job: Stepping) -> StepRule:
    t = job.train
    return StepRule(_rate(job), t.adam_beta1, t.adam_beta2, t.adam_epsilon, t.weight_decay, t.max_grad_norm, job.state.updates)


def _flat(state: AdapterState) -> FlatState:
    return FlatState(state.params, state.exp_avg, state.exp_avg_sq)


@dataclass
class _Bound:
    """A resident's buffers, and of what they were made: the bank's addresses, and the state's tensors with their versions."""

    layout: AdapterLayout
    buffers: StepBuffers
    aligned: bool = False
    addresses: Mapping[str, SlotAddress] | None = None
    tensors: tuple[tuple[Tensor, int], ...] = ()


@dataclass(frozen=True)
class _Rows:
    """A row of scalars and one of outcomes for each of J jobs, fp64."""

    scalars_JS: Tensor
    outcomes_JO: Tensor


class DeviceSteps:
    """Measured steps of `due`: what `DeviceOptimizer.measure` gives. `errors` grows if the other half of a step cannot be queued."""

    def __init__(self, optimizer: DeviceOptimizer, due: Mapping[str, Stepping], rows: _Rows) -> None:
        self.errors: dict[str, Exception] = {}
        self._optimizer, self._due, self._rows = optimizer, due, rows

    @property
    def verdicts(self) -> dict[str, Tensor]:
        return {name: self._rows.outcomes_JO[i, :2] for i, name in enumerate(self._due) if name not in self.errors}

    def update(self) -> QueuedSteps:
        return self._optimizer._update(self._due, self._rows, self.errors)


class DevicePart:
    """A step of a part of an adapter (`optimizer_steps.PartStep`): four rows of results by chunk, squares of the gradient and the largest
    weights and moments. `scalars_S` and `outcome_4` are its own, fp64.
    """

    def __init__(self, optimizer: DeviceOptimizer, job_id: str, job: Stepping, rows: _Rows, measured_RE: Tensor) -> None:
        self._optimizer, self._job_id, self._job, self.measured_RE = optimizer, job_id, job, measured_RE
        self._rate = _rate(job)
        self._scalars_S, self._outcome_4 = rows.scalars_JS[0], rows.outcomes_JO[0]

    def judge(self, measured_RE: Tensor) -> Tensor:
        largest_3E = measured_RE[1:].to(self._job.state.params.dtype).contiguous()  # as it was: fp64 holds it without loss
        outcome_4 = torch.zeros_like(self._outcome_4)
        fused_adamw.launch_verdict(measured_RE[0].contiguous(), largest_3E, self._scalars_S, outcome_4)
        return outcome_4[:3]

    def check(self, clip: float) -> Tensor:
        """[1], fp64: not 0 where a number of the update is not finite."""
        self._say(clip, OPEN)
        self._optimizer._launch(fused_adamw.launch_check, self._job_id, self._job, self._scalars_S, self._outcome_4)
        return self._outcome_4[3:].clone()

    def apply(self, norm: float, clip: float, *, applied: bool) -> StepStats:
        self._say(clip, PROVEN if applied else REFUSED)
        self._optimizer._launch(fused_adamw.launch_update, self._job_id, self._job, self._scalars_S, self._outcome_4)
        self._optimizer._bank.sums_are_zero(self._job_id)
        return count_step(self._job.state, self._rate, norm, applied)

    def _say(self, clip: float, verdict: float) -> None:
        """What the kernels read of a verdict."""
        _fill(self._outcome_4, [0.0, clip, verdict, 0.0])


def _chunks_of(shape: AdapterShape) -> int:
    return bank_chunks.num_chunks([shape.rows * shape.in_features, shape.rows * shape.out_features])


def _fill(row: Tensor, values: Sequence[float] | Sequence[Sequence[float]]) -> None:
    """Without a wait for the device."""
    host = torch.tensor(values, dtype=torch.float64)
    row.copy_(host.pin_memory() if row.is_cuda else host, non_blocking=True)


class DeviceOptimizer:
    """AdamW of the adapters in `bank`, each by itself; all that step together are waited for at once."""

    part_rule = PartRule(4, _chunks_of)

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank
        self._bound: dict[str, _Bound] = {}
        self._weights_like = torch.empty(0, dtype=bank.dtype, device=bank.device)
        self._capacity = 8
        self._spare = [self._make_rows(self._capacity)]

    def _make_rows(self, count: int) -> _Rows:
        sizes = (fused_adamw.NUM_SCALARS, fused_adamw.NUM_OUTCOMES)
        return _Rows(*(torch.zeros(count, n, dtype=torch.float64, device=self._bank.device) for n in sizes))

    def add(self, job_id: str, state: AdapterState) -> None:
        """Make the buffers of a job that has its slot. May run out of memory; nothing is kept then."""
        counts = [n for s in state.layout.shapes for n in (s.rows * s.in_features, s.rows * s.out_features)]
        buffers = StepBuffers.empty(bank_chunks.num_chunks(counts), self._bank.sum_dtype, self._bank.device)
        if len(self._bound) >= self._capacity:
            self._capacity *= 2
            self._spare = [self._make_rows(self._capacity)]
        self._bound[job_id] = _Bound(state.layout, buffers)
        self._table(job_id)
        self._note_largest(job_id, state)

    def remove(self, job_id: str) -> None:
        self._bound.pop(job_id, None)

    @torch.no_grad()
    def gradient(self, job_id: str) -> Tensor:
        """A copy of the job's summed gradient [P] as one launch; takes its memory, and does not wait."""
        self._bank.scale_sums(job_id, 1.0)
        bound = self._table(job_id)
        flat_P = torch.empty(bound.layout.numel, dtype=self._bank.sum_dtype, device=self._bank.device)
        if bound.layout.shapes:
            bank_chunks.gather(bound.buffers.chunks_C4, bound.aligned, flat_P)
        return flat_P

    @torch.no_grad()
    def set_gradient(self, job_id: str, gradient_P: Tensor) -> None:
        """Replace the job's sums, as one launch. `gradient_P` contiguous, of the size, dtype and device of `gradient`."""
        bound = self._table(job_id)
        assert (gradient_P.shape, gradient_P.dtype) == ((bound.layout.numel,), self._bank.sum_dtype) and gradient_P.is_contiguous()
        self._bank.sums_are_zero(job_id)  # or will be in a moment: all of them are replaced
        self._bank.scale_sums(job_id, 1.0)
        if bound.layout.shapes:
            bank_chunks.scatter(bound.buffers.chunks_C4, bound.aligned, gradient_P)

    @torch.no_grad()
    def write(self, job_id: str, params_P: Tensor) -> None:
        """Replace the job's weights in the bank, as one launch: where a step is waited for, Python's views of each linear's take as long
        as the rest of it.
        """
        bound = self._table(job_id)
        assert (params_P.shape, params_P.dtype) == ((bound.layout.numel,), self._bank.sum_dtype) and params_P.is_contiguous()
        if bound.layout.shapes:
            bank_chunks.write(bound.buffers.chunks_C4, bound.aligned, params_P, self._weights_like)

    @torch.no_grad()
    def measure(self, due: Mapping[str, Stepping]) -> DeviceSteps:
        """Queue the first half of the step of each job of `due`: the norm of its sums and its verdict, on the device."""
        rows = self._spare.pop() if self._spare else self._make_rows(self._capacity)
        steps = DeviceSteps(self, due, rows)
        if not due:
            return steps
        _fill(rows.scalars_JS[: len(due)], [self._scalars(job) for job in due.values()])
        for i, (job_id, job) in enumerate(due.items()):
            try:
                self._bank.scale_sums(job_id, 1.0)
                bound = self._table(job_id)
                self._note_largest(job_id, job.state)
                fused_adamw.launch_measure(_flat(job.state), bound.buffers, bound.aligned, rows.scalars_JS[i], rows.outcomes_JO[i])
            except Exception as error:
                steps.errors[job_id] = error
        return steps

    def _scalars(self, job: Stepping) -> list[float]:
        return fused_adamw.scalars_of(_rule(job), self._bank.sum_dtype, self._bank.dtype)

    @torch.no_grad()
    def begin_part(self, job_id: str, job: Stepping) -> DevicePart:
        """Measure a part of an adapter, on the device. Takes memory for its results, 32 bytes a chunk."""
        rows, bound = self._make_rows(1), self._table(job_id)
        _fill(rows.scalars_JS, [self._scalars(job)])
        self._bank.scale_sums(job_id, 1.0)
        self._note_largest(job_id, job.state)
        if bound.layout.shapes:
            fused_adamw.launch_norm(_flat(job.state), bound.buffers, bound.aligned)
        measured_RE = torch.cat([bound.buffers.squares_C[None], bound.buffers.largest_3C.double()])
        return DevicePart(self, job_id, job, rows, measured_RE)

    @torch.no_grad()
    def _launch(self, launch: Callable[..., None], job_id: str, job: Stepping, scalars_S: Tensor, outcome_4: Tensor) -> None:
        """Of a part that has any chunk."""
        bound = self._table(job_id)
        if bound.layout.shapes:
            launch(_flat(job.state), bound.buffers, bound.aligned, self._weights_like, scalars_S, outcome_4)

    @torch.no_grad()
    def _update(self, due: Mapping[str, Stepping], rows: _Rows, errors: dict[str, Exception]) -> QueuedSteps:
        """Queue the second half. What is read later waits for the steps and enters them into the counters: once, and before these jobs
        step again.
        """
        for i, (job_id, job) in enumerate(due.items()):
            try:
                if job_id not in errors:
                    bound, flat = self._table(job_id), _flat(job.state)
                    scalars_S, outcome_4 = rows.scalars_JS[i], rows.outcomes_JO[i]
                    fused_adamw.launch_update(flat, bound.buffers, bound.aligned, self._weights_like, scalars_S, outcome_4)
                    self._bank.sums_are_zero(job_id)
            except Exception as error:
                errors[job_id] = error
        outcomes = ToHost(rows.outcomes_JO[: len(due)])
        if len(rows.scalars_JS) == self._capacity:
            self._spare.append(rows)  # what is queued into them from now on runs behind this copy

        def read() -> dict[str, StepStats]:
            stats: dict[str, StepStats] = {}
            for (job_id, job), outcome in zip(due.items(), outcomes.read(), strict=True):
                if job_id not in errors:
                    stats[job_id] = count_step(job.state, _rate(job), fused_adamw.norm_of(outcome), fused_adamw.applied(outcome))
            return stats

        return QueuedSteps(read, errors, done=False)

    def _table(self, job_id: str) -> _Bound:
        """The job's buffers, with their table of chunks made anew where the bank has moved."""
        bound, addresses = self._bound[job_id], self._bank.addresses(job_id)
        if bound.addresses is not addresses:
            runs: list[BankRun] = []
            for s in bound.layout.shapes:
                at = addresses[s.module]
                runs += [BankRun(at.a, at.da, s.rows * s.in_features), BankRun(at.b, at.db, s.rows * s.out_features)]
            table, bound.aligned = bank_chunks.chunk_table(runs, self._bank.dtype.itemsize, self._bank.sum_dtype.itemsize)
            bound.buffers.chunks_C4.copy_(torch.from_numpy(table))
            bound.addresses = addresses
        return bound

    def _note_largest(self, job_id: str, state: AdapterState) -> None:
        """Enter the state's magnitudes anew where someone else wrote it."""
        # The kernels' own writes do not count as versions; any other in-place operation does.
        bound, tensors = self._bound[job_id], tuple((t, t._version) for t in (state.params, state.exp_avg, state.exp_avg_sq))
        if not bound.layout.shapes:
            return
        if len(bound.tensors) != 3 or any(a is not b or v != w for (a, v), (b, w) in zip(bound.tensors, tensors, strict=True)):
            for t, _ in tensors:
                assert t.dtype == self._bank.sum_dtype and t.device == self._weights_like.device and t.is_contiguous(), (t.dtype, t.device)
            fused_adamw.note_largest(_flat(state), bound.buffers.largest_3C)
            bound.tensors = tensors
