"""The optimizer steps of a bank on a GPU that runs no kernels of ours: nothing waits for the device.

The formulas are the host's (`adapters/adamw.py`). Whether a step is taken is decided on the device: where it is not, the old values stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlora.adapters.adamw import is_allowed, learning_rate, updated
from tlora.adapters.bank import AdapterBank
from tlora.adapters.state import AdapterState
from tlora.job import TrainConfig
from tlora.supermodel.job_by_job import JobByJobOptimizer, QueuedStep


def make_queued_optimizer(bank: AdapterBank) -> JobByJobOptimizer:
    return JobByJobOptimizer(bank, _verdict, _step)


def _verdict(grad: Tensor, max_grad_norm: float) -> Tensor:
    norm = torch.linalg.vector_norm(grad, dtype=torch.float64)
    factor = max_grad_norm / (norm + 1e-6)  # torch's rule, its 1e-6 included
    clipped = norm.isfinite() & (factor < 1) if max_grad_norm > 0 else torch.zeros_like(norm, dtype=torch.bool)
    return torch.stack([norm, torch.where(clipped, factor, 1.0)])


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
