"""AdamW, learning-rate schedule and clipping for one adapter's flat vectors. Nothing here is shared between jobs.

A step has two halves: `measure` reads the gradient, `adamw_step` updates. The formulas are `torch.optim.AdamW`'s and transformers'
`get_scheduler`'s; the tests compare with both. A norm is that of the norms of A and B of each module, as torch's `clip_grad_norm_` takes
it: where an adapter lies on several processes, each measures its own modules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora.adapters.layout import AdapterLayout
from tlora.adapters.state import AdapterState
from tlora.job import TrainConfig


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step did. `applied` is false when the gradient (or the update) was not finite and nothing changed."""

    step: int
    learning_rate: float
    grad_norm: float
    applied: bool


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) out of `total_steps`, warm-up included."""
    warmup = config.warmup_count(total_steps)
    kind = config.lr_scheduler_type
    if kind == "constant":
        return config.learning_rate
    if step < warmup:
        return config.learning_rate * step / max(1, warmup)
    if kind == "constant_with_warmup":
        return config.learning_rate
    progress = (step - warmup) / max(1, total_steps - warmup)
    if kind == "linear":
        return config.learning_rate * max(0.0, 1 - progress)
    if kind == "polynomial":  # transformers' defaults: power 1, ending at 1e-7; it refuses a peak below that, where we stay at the peak
        end = min(1e-7, config.learning_rate)
        return end if step > total_steps else (config.learning_rate - end) * (1 - progress) + end
    factor = max(0.0, 0.5 * (1 + math.cos(math.pi * progress)))
    if kind == "cosine_with_min_lr":
        factor = factor * (1 - config.min_lr_rate) + config.min_lr_rate
    return config.learning_rate * factor


@torch.no_grad()
def measure(grad: Tensor, max_grad_norm: float, layout: AdapterLayout) -> Tensor:
    """The verdict on a flat gradient [P], which stays as it is: fp64 [2], its norm, finite exactly when all of it is, and the factor that
    clips it (1: not clipped). `max_grad_norm` 0: no clipping.
    """
    return verdict_of(module_norms(grad, layout), max_grad_norm)


def module_norms(grad: Tensor, layout: AdapterLayout) -> Tensor:
    """Of a flat gradient [P] on the host, fp64 [2M]: the norms of A and B of each module."""
    return torch.tensor([_norm(part) for _, a, b in layout.views(grad) for part in (a, b)], dtype=torch.float64)


def queued_norms(grad: Tensor, layout: AdapterLayout) -> Tensor:
    """As `module_norms`, on a device that is not waited for: in fp64, in which squares of fp32 numbers do not overflow. A CPU would take
    four times as long for it.
    """
    parts = [part for _, a, b in layout.views(grad) for part in (a, b) if part.numel()]
    return torch.stack(torch._foreach_norm(parts, 2, torch.float64)) if parts else grad.new_empty(0, dtype=torch.float64)


def verdict_of(norms: Tensor, max_grad_norm: float) -> Tensor:
    """As `measure`, by the norms of all modules. Does not wait for the device."""
    norm = torch.linalg.vector_norm(norms)
    factor = max_grad_norm / (norm + 1e-6)
    clipped = norm.isfinite() & (norm + 1e-6 > max_grad_norm) & (max_grad_norm > 0)  # torch's rule, its 1e-6 included
    return torch.stack([norm, torch.where(clipped, factor, 1.0)])


@torch.no_grad()
def adamw_step(
    state: AdapterState,
    grad: Tensor,
    config: TrainConfig,
    total_steps: int,
    weight_dtype: torch.dtype | None = None,
    verdict_2: Tensor | None = None,
) -> StepStats:
    """Clips `grad` (flat [P], consumed) and applies AdamW to `state` in place. `verdict_2`: `measure(grad)`, by default made here.

    A gradient that is not finite, or an update that would leave a moment not finite, or a weight not finite in `weight_dtype`
    (default: the state's own), changes nothing but the counters.
    """
    rate = learning_rate(config, state.step, total_steps)
    norm, clip = (measure(grad, config.max_grad_norm, state.layout) if verdict_2 is None else verdict_2).tolist()
    applied = math.isfinite(norm)
    if applied:
        if clip != 1:
            grad.mul_(clip)
        applied = _adamw(state, grad, config, rate, weight_dtype or grad.dtype)
    return count_step(state, rate, norm, applied)


def count_step(state: AdapterState, rate: float, norm: float, applied: bool) -> StepStats:
    """Enter a step into the state's counters."""
    stats = StepStats(state.step, rate, norm, applied)
    state.step += 1
    state.updates += int(applied)
    state.skipped = 0 if applied else state.skipped + 1
    return stats


def weights_fit(params: Tensor, dtype: torch.dtype) -> bool:
    """Whether all of `params` are finite once rounded to `dtype`. Rounding keeps order: the largest decides."""
    return not params.numel() or bool(torch.linalg.vector_norm(params, math.inf).to(dtype).isfinite())


def _norm(x: Tensor) -> float:
    """Finite exactly when all of `x` is. In x's own precision first, a thirtieth of the time of isfinite().all(); only where that
    overflows in fp64, which squares of fp32 numbers do not.
    """
    norm = float(torch.linalg.vector_norm(x))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(x, dtype=torch.float64))


def is_allowed(state: AdapterState, config: TrainConfig, rate: float, dtype: torch.dtype) -> bool:
    """Whether the factors of the next update fit `dtype`: torch raises for others."""
    return rate * max(config.weight_decay, 1 / (1 - config.adam_beta1 ** (state.updates + 1))) <= torch.finfo(dtype).max


def updated(state: AdapterState, grad: Tensor, config: TrainConfig, rate: float) -> tuple[Tensor, Tensor, Tensor]:
    """New weights and moments after an update with the clipped `grad`. Reads no number on the host."""
    beta1, beta2, t = config.adam_beta1, config.adam_beta2, state.updates + 1
    exp_avg = torch.lerp(state.exp_avg, grad, 1 - beta1)
    exp_avg_sq = (state.exp_avg_sq * beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - beta2**t)).add_(config.adam_epsilon)
    params = (state.params * (1 - rate * config.weight_decay)).addcdiv_(exp_avg, denominator, value=-rate / (1 - beta1**t))
    return params, exp_avg, exp_avg_sq


def _adamw(state: AdapterState, grad: Tensor, config: TrainConfig, rate: float, weight_dtype: torch.dtype) -> bool:
    if not is_allowed(state, config, rate, grad.dtype):
        return False
    params, exp_avg, exp_avg_sq = updated(state, grad, config, rate)
    if not fits(params, exp_avg_sq, weight_dtype):
        return False
    state.params, state.exp_avg, state.exp_avg_sq = params, exp_avg, exp_avg_sq
    return True


def fits(params: Tensor, exp_avg_sq: Tensor, weight_dtype: torch.dtype) -> bool:
    """Whether all of an update is finite, the weights also in the dtype that they are computed with."""
    norm = _norm(params)
    if not math.isfinite(norm) or not math.isfinite(_norm(exp_avg_sq)):
        return False
    return norm < torch.finfo(weight_dtype).max or weights_fit(params, weight_dtype)  # no weight is larger than the norm
