"""The optimizer steps of a bank in the host's memory: each is done when the call that takes it returns."""

from __future__ import annotations

import torch
from torch import Tensor

from tlora.adapters.adamw import StepStats, Verdict, adamw_step, measure
from tlora.adapters.bank import AdapterBank
from tlora.supermodel.job_by_job import JobByJobOptimizer
from tlora.supermodel.optimizer_steps import Stepping


def make_host_optimizer(bank: AdapterBank) -> JobByJobOptimizer:
    return JobByJobOptimizer(bank, _verdict, _step)


def _verdict(grad: Tensor, max_grad_norm: float) -> Tensor:
    found = measure(grad, max_grad_norm)
    return torch.tensor([found.grad_norm, found.clip], dtype=torch.float64, device=grad.device)


def _step(bank: AdapterBank, job_id: str, job: Stepping, verdict_2: Tensor) -> StepStats:
    norm, clip = verdict_2.tolist()
    stats = adamw_step(job.state, bank.take_grad(job_id), job.train, job.total_steps, bank.dtype, Verdict(norm, clip))
    if stats.applied:
        bank.write(job_id, job.state.params)
    return stats
