"""The optimizer steps of a bank on a GPU that runs no kernels of ours: torch's operations, job by job, and nothing waits for the device.

The formulas are the host's (`adapters/adamw.py`). Whether a step is taken is decided on the device: where it is not, the old values stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora.adapters.adamw import StepStats, count_step, is_allowed, learning_rate, updated
from tlora.adapters.bank import AdapterBank
from tlora.adapters.state import AdapterState
from tlora.kernels.device import ToHost
from tlora.supermodel.optimizer_steps import QueuedSteps, Stepping


@dataclass(frozen=True)
class MeasuredOnDevice:
    """Measured steps of `due`: what `QueuedOptimizer.measure` gives. The gradients stay in the bank, as copies would take memory."""

    bank: AdapterBank
    due: Mapping[str, Stepping]
    verdicts: dict[str, Tensor]
    errors: dict[str, Exception]

    @torch.no_grad()
    def update(self) -> QueuedSteps:
        outcomes: dict[str, Tensor] = {}
        rates: dict[str, float] = {}
        errors = dict(self.errors)
        for job_id, verdict_2 in self.verdicts.items():
            job = self.due[job_id]
            rates[job_id] = learning_rate(job.train, job.state.step, job.total_steps)
            try:
                applied = _step(self.bank, job_id, job, verdict_2, rates[job_id])
                outcomes[job_id] = torch.stack([verdict_2[0], applied.double()])
            except Exception as error:
                errors[job_id] = error
        coming = ToHost(torch.stack(list(outcomes.values()))) if outcomes else None

        def read() -> dict[str, StepStats]:
            found: list[list[float]] = coming.read() if coming is not None else []
            rows = zip(outcomes, found, strict=True)
            return {job_id: count_step(self.due[job_id].state, rates[job_id], norm, applied != 0) for job_id, (norm, applied) in rows}

        return QueuedSteps(read, errors, done=False)


def _step(bank: AdapterBank, job_id: str, job: Stepping, verdict_2: Tensor, rate: float) -> Tensor:
    """Queue the step of one job; whether it is taken, as bool on the device."""
    state, grad = job.state, bank.take_grad(job_id)
    if not is_allowed(state, job.train, rate, grad.dtype):
        return torch.zeros((), dtype=torch.bool, device=grad.device)
    grad.mul_(verdict_2[1].to(grad.dtype))
    params, exp_avg, exp_avg_sq = updated(state, grad, job.train, rate)
    largest, largest_sq = (torch.linalg.vector_norm(values, float("inf")) for values in (params, exp_avg_sq))
    applied = verdict_2[0].isfinite() & largest.to(bank.dtype).isfinite() & largest_sq.isfinite()
    state.params, state.exp_avg, state.exp_avg_sq = (
        torch.where(applied, new, old, out=new)
        for new, old in ((params, state.params), (exp_avg, state.exp_avg), (exp_avg_sq, state.exp_avg_sq))
    )
    bank.write(job_id, state.params)
    return applied


class QueuedOptimizer:
    """AdamW of the adapters in `bank`, each by itself."""

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank

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
    def measure(self, due: Mapping[str, Stepping]) -> MeasuredOnDevice:
        verdicts: dict[str, Tensor] = {}
        errors: dict[str, Exception] = {}
        for job_id, job in due.items():
            try:
                verdicts[job_id] = _verdict(self._bank.gradient(job_id), job.train.max_grad_norm)
            except Exception as error:
                errors[job_id] = error
        return MeasuredOnDevice(self._bank, due, verdicts, errors)


def _verdict(grad: Tensor, max_grad_norm: float) -> Tensor:
    """fp64 [2]: the norm, finite exactly when all of `grad` is, and the factor that clips it."""
    norm = torch.linalg.vector_norm(grad, dtype=torch.float64)
    factor = max_grad_norm / (norm + 1e-6)  # torch's rule, its 1e-6 included
    clipped = norm.isfinite() & (factor < 1) if max_grad_norm > 0 else torch.zeros_like(norm, dtype=torch.bool)
    return torch.stack([norm, torch.where(clipped, factor, 1.0)])
