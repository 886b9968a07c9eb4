"""The optimizer steps of a bank in the host's memory, job by job with torch's operations. All is done when a call returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora.adapters.adamw import StepStats, Verdict, adamw_step, measure
from tlora.adapters.bank import AdapterBank
from tlora.adapters.state import AdapterState
from tlora.supermodel.optimizer_steps import QueuedSteps, Stepping


@dataclass(frozen=True)
class HostSteps:
    """Measured steps of `due`. The gradients stay in the bank, as flat copies of all of them would take memory between the halves."""

    bank: AdapterBank
    due: Mapping[str, Stepping]
    found: dict[str, Verdict]
    errors: dict[str, Exception]

    @property
    def verdicts(self) -> dict[str, Tensor]:
        return {
            job_id: torch.tensor([verdict.grad_norm, verdict.clip], dtype=torch.float64, device=self.bank.device)
            for job_id, verdict in self.found.items()
        }

    def update(self) -> QueuedSteps:
        stats: dict[str, StepStats] = {}
        errors = dict(self.errors)
        for job_id, verdict in self.found.items():
            job = self.due[job_id]
            try:
                grad = self.bank.take_grad(job_id)
                stepped = adamw_step(job.state, grad, job.train, job.total_steps, self.bank.dtype, verdict)
                if stepped.applied:
                    self.bank.write(job_id, job.state.params)
                stats[job_id] = stepped
            except Exception as error:
                errors[job_id] = error
        return QueuedSteps(lambda: stats, errors, done=True)


class HostOptimizer:
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

    def measure(self, due: Mapping[str, Stepping]) -> HostSteps:
        found: dict[str, Verdict] = {}
        errors: dict[str, Exception] = {}
        for job_id, job in due.items():
            try:
                found[job_id] = measure(self._bank.gradient(job_id), job.train.max_grad_norm)
            except Exception as error:
                errors[job_id] = error
        return HostSteps(self._bank, due, found, errors)
