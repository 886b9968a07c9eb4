"""Predicted seconds of each job on one device, and what a token of its micro-batches costs there: `job_work.py` over a base's layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tlora.kernels.device import card_of, fixed_work_elsewhere, name_of, planned_card
from tlora.planning.gpu_models import gpu_called
from tlora.planning.job_plan import PlannedJob
from tlora.planning.job_work import multiply_adds
from tlora.planning.micro_batches import token_cost_on
from tlora.shape.memory import MemoryModel
from tlora.shape.token_cost import TokenCost
from tlora.shape.work import TrainingRate
from tlora.supermodel.lora_linear import LoraLinear
from tlora.supermodel.multiply_adds import multiplied_weights, width_of_layers
from tlora.supermodel.supermodel import SuperModel

_H200 = TrainingRate()


def predicted_seconds(jobs: Sequence[PlannedJob], model: SuperModel, device: torch.device, rate: TrainingRate = _H200) -> dict[str, float]:
    """By name; 0 for a job with problems, which is refused when its turn comes. `model` may lie on the meta device."""
    weights, width, per_second = multiplied_weights(model), width_of_layers(model), rate_of(model, device, rate)
    return {job.spec.name: multiply_adds(job, weights, width) / per_second for job in jobs}


def rate_of(model: SuperModel, device: torch.device, rate: TrainingRate = _H200) -> float:
    """Multiply-adds a second that are predicted with."""
    in_8_bits = any(isinstance(m, LoraLinear) and m.form.dtype.itemsize == 1 for m in model.model.modules())
    return rate.multiply_adds_per_second(device.type, in_8_bits)


def flops_here(device: torch.device) -> float | None:
    """What training makes of the operations a second of a GPU of this machine, with the kernels that run on it; None for one that is not in
    the table of GPUs, and for a CPU.
    """
    gpu = gpu_called(name_of(device)) if device.type == "cuda" else None
    card = card_of(device) if gpu is not None else None
    return gpu.flops_by(card) if gpu is not None and card is not None else None


def token_cost(memory: MemoryModel, device: torch.device, link_tokens: float = 0.0) -> TokenCost:
    """Of the base of `memory` on `device`. `link_tokens`: of one that is streamed."""
    return token_cost_on(device.type, planned_card(device), memory, link_tokens, fixed_work_elsewhere())
