"""Optimizer steps of a bank job by job, with torch's operations: on a CPU, and on a GPU that runs none of our kernels.

What a gradient's verdict is and what a step does are two functions of the device. On a CPU each is done when the call returns; on a GPU
both are queued, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora.adapters.adamw import (
    StepStats,
    adamw_step,
    count_step,
    fits,
    is_allowed,
    learning_rate,
    measure,
    module_norms,
    queued_norms,
    updated,
    verdict_of,
)
from tlora.adapters.bank import AdapterBank
from tlora.adapters.layout import AdapterLayout
from tlora.adapters.state import AdapterState
from tlora.job import TrainConfig
from tlora.kernels.device import ToHost, runs_kernels
from tlora.supermodel.optimizer_steps import OPEN, REFUSED, Optimizer, PartRule, QueuedSteps, Stepping


@dataclass(frozen=True)
class QueuedStep:
    """A step at `rate` that the device has not taken yet. `outcome_2`: fp64 [2] on the device, the norm and whether it is taken."""

    rate: float
    outcome_2: Tensor


Verdict = Callable[[Tensor, float, AdapterLayout], Tensor]
"""Of a flat gradient [P], which stays as it is, max_grad_norm and its layout: fp64 [2], as `MeasuredSteps.verdicts`."""
Step = Callable[[AdapterState, Tensor, TrainConfig, int, torch.dtype, Tensor], StepStats | QueuedStep]
"""As `adamw_step`. A step that is queued is counted when its outcome is read."""


@dataclass(frozen=True)
class JobByJobSteps:
    """Measured steps of `due`. The gradients stay in the bank, as flat copies of all of them would take memory between the halves."""

    bank: AdapterBank
    step: Step
    due: Mapping[str, Stepping]
    verdicts: dict[str, Tensor]
    errors: dict[str, Exception]

    @torch.no_grad()
    def update(self) -> QueuedSteps:
        stats: dict[str, StepStats] = {}
        queued: dict[str, QueuedStep] = {}
        errors = dict(self.errors)
        for job_id, verdict_2 in self.verdicts.items():
            try:
                job = self.due[job_id]
                step = self.step(job.state, self.bank.take_grad(job_id), job.train, job.total_steps, self.bank.dtype, verdict_2)
                if isinstance(step, QueuedStep) or step.applied:
                    self.bank.write(job_id, job.state.params)
            except Exception as error:
                errors[job_id] = error
                continue
            if isinstance(step, QueuedStep):
                queued[job_id] = step
            else:
                stats[job_id] = step
        coming = ToHost(torch.stack([each.outcome_2 for each in queued.values()])) if queued else None

        def read() -> dict[str, StepStats]:
            rows: list[list[float]] = coming.read() if coming is not None else []
            return stats | {
                job_id: count_step(self.due[job_id].state, each.rate, norm, applied != 0)
                for (job_id, each), (norm, applied) in zip(queued.items(), rows, strict=True)
            }

        return QueuedSteps(read, errors, done=coming is None)


class JobByJobOptimizer:
    """AdamW of the adapters in `bank`, each by itself."""

    part_rule = PartRule(1, lambda _: 2)

    def __init__(self, bank: AdapterBank, verdict: Verdict, step: Step) -> None:
        self._bank, self._verdict, self._step = bank, verdict, step

    def add(self, job_id: str, state: AdapterState) -> None:
        """Nothing is made before a step."""

    def remove(self, job_id: str) -> None:
        """Nothing was made."""

    def gradient(self, job_id: str) -> Tensor:
        return self._bank.gradient(job_id)

    def set_gradient(self, job_id: str, gradient_P: Tensor) -> None:
        self._bank.set_gradient(job_id, gradient_P)

    def write(self, job_id: str, params_P: Tensor) -> None:
        self._bank.write(job_id, params_P)

    @torch.no_grad()
    def measure(self, due: Mapping[str, Stepping]) -> JobByJobSteps:
        verdicts: dict[str, Tensor] = {}
        errors: dict[str, Exception] = {}
        for job_id, job in due.items():
            try:
                verdicts[job_id] = self._verdict(self._bank.gradient(job_id), job.train.max_grad_norm, job.state.layout)
            except Exception as error:
                errors[job_id] = error
        return JobByJobSteps(self._bank, self._step, due, verdicts, errors)

    def begin_part(self, job_id: str, job: Stepping) -> JobByJobPart:
        return JobByJobPart(self._bank, job_id, job)


class JobByJobPart:
    """A step of a part of an adapter (`optimizer_steps.PartStep`): one row of the norms of A and B of each module. Every update that has a
    finite gradient is open: it is computed by `check`, and kept until it is applied.
    """

    @torch.no_grad()
    def __init__(self, bank: AdapterBank, job_id: str, job: Stepping) -> None:
        self._bank, self._job_id, self._job = bank, job_id, job
        self._rate = learning_rate(job.train, job.state.step, job.total_steps)
        self._updated: tuple[Tensor, Tensor, Tensor] | None = None
        norms_of = module_norms if bank.device.type == "cpu" else queued_norms
        self.measured_RE = norms_of(bank.gradient(job_id), job.state.layout)[None]

    def judge(self, measured_RE: Tensor) -> Tensor:
        verdict_2 = verdict_of(measured_RE[0], self._job.train.max_grad_norm)
        return torch.cat([verdict_2, torch.where(verdict_2[:1].isfinite(), OPEN, REFUSED)])

    @torch.no_grad()
    def check(self, clip: float) -> Tensor:
        state, train, grad = self._job.state, self._job.train, self._bank.gradient(self._job_id)
        refused = not is_allowed(state, train, self._rate, grad.dtype)
        if not refused:
            self._updated = updated(state, grad.mul_(clip) if clip != 1 else grad, train, self._rate)
            refused = not fits(self._updated[0], self._updated[2], self._bank.dtype)
        return torch.tensor([float(refused)], dtype=torch.float64, device=grad.device)

    @torch.no_grad()
    def apply(self, norm: float, clip: float, *, applied: bool) -> StepStats:
        state = self._job.state
        if applied:
            assert self._updated is not None, f"{self._job_id}: a step that was not checked"
            state.params, state.exp_avg, state.exp_avg_sq = self._updated
            self._bank.write(self._job_id, state.params)
        self._bank.zero_grad(self._job_id)
        return count_step(state, self._rate, norm, applied)


def make_optimizer(bank: AdapterBank) -> Optimizer:
    """The one for the device of `bank`."""
    if bank.device.type == "cuda" and runs_kernels(bank.device):
        from tlora.supermodel.device_optimizer import DeviceOptimizer  # brings triton, which not every CPU install has

        return DeviceOptimizer(bank)
    return make_host_optimizer(bank) if bank.device.type == "cpu" else make_queued_optimizer(bank)


def make_host_optimizer(bank: AdapterBank) -> JobByJobOptimizer:
    return JobByJobOptimizer(bank, measure, adamw_step)


def make_queued_optimizer(bank: AdapterBank) -> JobByJobOptimizer:
    return JobByJobOptimizer(bank, _verdict, _step)


def _verdict(grad: Tensor, max_grad_norm: float, layout: AdapterLayout) -> Tensor:
    return verdict_of(queued_norms(grad, layout), max_grad_norm)


def _step(
    state: AdapterState, grad: Tensor, train: TrainConfig, total_steps: int, weight_dtype: torch.dtype, verdict_2: Tensor
) -> QueuedStep:
    rate = learning_rate(train, state.step, total_steps)
    applied = _queue(state, grad, train, rate, weight_dtype, verdict_2)
    return QueuedStep(rate, torch.stack([verdict_2[0], applied.double()]))


def _queue(state: AdapterState, grad: Tensor, train: TrainConfig, rate: float, weight_dtype: torch.dtype, verdict_2: Tensor) -> Tensor:
    """Whether the step is taken, as bool on the device."""
    if not is_allowed(state, train, rate, grad.dtype):
        return torch.zeros((), dtype=torch.bool, device=grad.device)
    grad.mul_(verdict_2[1].to(grad.dtype))
    params, exp_avg, exp_avg_sq = updated(state, grad, train, rate)
    largest, largest_sq = (torch.linalg.vector_norm(values, float("inf")) for values in (params, exp_avg_sq))
    applied = verdict_2[0].isfinite() & largest.to(weight_dtype).isfinite() & largest_sq.isfinite()
    state.params, state.exp_avg, state.exp_avg_sq = (
        torch.where(applied, new, old, out=new)
        for new, old in ((params, state.params), (exp_avg, state.exp_avg), (exp_avg_sq, state.exp_avg_sq))
    )
    return applied
