"""Predicted seconds of each job on one GPU, from its tokens and the base's shape, by which `engine/ranks/placement.py` places jobs, and
which jobs are cut among several GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from tlora.batching.replicas import LEAST_REPLICA_TOKENS
from tlora.data.order import epoch_size
from tlora.data.profile import tokens_of_steps
from tlora.job import JobSpec
from tlora.kernels.device import card_of, name_of
from tlora.objectives import objective_of
from tlora.planning.gpu_models import gpu_called
from tlora.planning.job_plan import PlannedJob
from tlora.shape.work import JobWork, multiply_adds_per_second
from tlora.supermodel.load import layers_of
from tlora.supermodel.lora_linear import LoraLinear
from tlora.supermodel.supermodel import SuperModel

_MOST_ALONE = 1.1  # times an equal share of all seconds: a longer job spans several GPUs


def predicted_seconds(jobs: Sequence[PlannedJob], model: SuperModel, device: torch.device, flops: float | None = None) -> dict[str, float]:
    """By name; 0 for a job with problems, which is refused when its turn comes. `model` may lie on the meta device. `flops`: what training
    makes of a GPU's floating-point operations a second; None: those of an H200.
    """
    weights, rate = multiplied_weights(model), rate_of(model, device, flops)
    width = max(1, len(layers_of(model.base.decoder))) * model.base.head.weight_VH.shape[1]
    return {job.spec.name: _work(job, weights, width) / rate for job in jobs}


def multiplied_weights(model: SuperModel) -> int:
    """Weights that each token is multiplied with, in forward and again in backward. `model` may lie on the meta device."""
    return sum(k * n for k, n in model.targets().values()) + model.base.head.weight_VH.numel()


def rate_of(model: SuperModel, device: torch.device, flops: float | None = None) -> float:
    """Multiply-adds a second that are predicted with; `flops` as of `predicted_seconds`."""
    in_8_bits = any(isinstance(m, LoraLinear) and m.form.dtype.itemsize == 1 for m in model.model.modules())
    return multiply_adds_per_second(device.type, flops, in_8_bits)


def flops_here(device: torch.device) -> float | None:
    """`flops` of a GPU of this machine, with the kernels that run on it; None for one that is not in the table of GPUs, and for a CPU."""
    gpu = gpu_called(name_of(device)) if device.type == "cuda" else None
    card = card_of(device) if gpu is not None else None
    return gpu.flops_by(card) if gpu is not None and card is not None else None


def choose_replicas(jobs: Sequence[PlannedJob], seconds: Mapping[str, float], gpus: int, deterministic: bool) -> dict[str, int]:
    """How many replicas each job has, by name, of those that have more than one and may lie on several GPUs.

    What a job's `gpus` orders is done. Otherwise, without `deterministic`, a job that alone would take longer than an equal share of all
    jobs is cut until it does not, as far as its batches have samples and tokens for that. A statistic of the whole global batch (kto's)
    needs all of it in one place.
    """
    fair = sum(seconds.values()) / gpus
    found: dict[str, int] = {}
    for job in jobs:
        spec, needed = job.spec, seconds[job.spec.name]
        objective = objective_of(spec)
        if job.problems or job.data is None or (objective is not None and objective.statistic is not None):
            continue
        count = spec.gpus
        if count == 1 and not deterministic and needed > _MOST_ALONE * fair:
            tokens = trained_tokens(job) / spec.total_steps(epoch_size(job.data.train.epoch))
            count = min(gpus, spec.batch_size, int(tokens // LEAST_REPLICA_TOKENS), math.ceil(needed / fair))
        if count > 1:
            found[spec.name] = count
    return found


def trained_tokens(job: PlannedJob) -> int:
    """Of all its optimizer steps; 0 for a job with problems."""
    if job.problems or job.data is None:
        return 0
    train, spec = job.data.train, job.spec
    return tokens_of_steps(train.lengths, train.epoch, spec, spec.total_steps(epoch_size(train.epoch)))


def _forwards_beside(spec: JobSpec) -> int:
    """Forwards of an objective beside those that train: of its reference, and of the statistic of its batch, which may have one too."""
    objective = objective_of(spec)
    if objective is None:
        return 0
    statistic = objective.statistic
    return objective.needs_reference + (1 + statistic.needs_reference if statistic is not None else 0)


def _work(job: PlannedJob, weights: int, width: int) -> float:
    """Multiply-adds; 0 for a job with problems."""
    if job.problems or job.data is None:
        return 0.0
    train, spec = job.data.train, job.spec
    mean = float((train.lengths.astype(float) ** 2).sum() / max(train.lengths.sum(), 1))
    evaluated = 0.0
    if job.data.eval is not None:
        every, steps = spec.eval_steps, spec.total_steps(epoch_size(train.epoch))
        times = 2 + (steps // every if isinstance(every, int) and every else 0)
        evaluated = times * float(job.data.eval.lengths.sum())
    return JobWork(trained_tokens(job), mean, 2 + _forwards_beside(spec), evaluated).multiply_adds(weights, width)
