"""Optimizer steps of a bank job by job, with torch's operations. What a gradient's verdict is and what a step does are two functions of the
device: `host_optimizer.py` for a CPU, `queued_optimizer.py` for a GPU that runs no kernels of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora.adapters.adamw import StepStats, count_step
from tlora.adapters.bank import AdapterBank
from tlora.adapters.state import AdapterState
from tlora.job import TrainConfig
from tlora.kernels.device import ToHost
from tlora.supermodel.optimizer_steps import QueuedSteps, Stepping


@dataclass(frozen=True)
class QueuedStep:
    """A step at `rate` that the device has not taken yet. `outcome_2`: fp64 [2] on the device, the norm and whether it is taken."""

    rate: float
    outcome_2: Tensor


Verdict = Callable[[Tensor, float], Tensor]
"""Of a flat gradient [P], which stays as it is, and max_grad_norm: fp64 [2], as `MeasuredSteps.verdicts`."""
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
                verdicts[job_id] = self._verdict(self._bank.gradient(job_id), job.train.max_grad_norm)
            except Exception as error:
                errors[job_id] = error
        return JobByJobSteps(self._bank, self._step, due, verdicts, errors)
