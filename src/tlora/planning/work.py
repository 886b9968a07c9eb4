"""Predicted seconds of each job on one device, and what a token of its micro-batches costs there: `job_work.py` over a base's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tlora.kernels.cards import HOPPER
from tlora.kernels.device import can_be_asked, capability_of, card_of, fixed_work_elsewhere, is_elsewhere, is_forced, name_of, planned_card
from tlora.planning.job_work import multiply_adds
from tlora.planning.planned_job import PlannedJob
from tlora.shape.gpu_files import GpuHere, gpu_here
from tlora.shape.gpu_models import gpu_by_name_alone, gpu_by_properties, gpu_called
from tlora.shape.memory import MemoryModel
from tlora.shape.token_cost import TokenCost, token_cost_on
from tlora.shape.work import TrainingRate
from tlora.supermodel.lora_linear import LoraLinear
from tlora.supermodel.multiply_adds import timed_weights, width_of_layers
from tlora.supermodel.supermodel import SuperModel

_H200 = TrainingRate()


def predicted_seconds(jobs: Sequence[PlannedJob], model: SuperModel, device: torch.device, rate: TrainingRate = _H200) -> dict[str, float]:
    """By name; 0 for a job with problems, which is refused when its turn comes. `model` may lie on the meta device."""
    weights = {adapted: timed_weights(model, device.type, adapted) for adapted in (False, True)}
    width, per_second = width_of_layers(model), rate_of(model, device, rate)
    return {job.spec.name: multiply_adds(job, weights[job.adapts_experts], width) / per_second for job in jobs}


def rate_of(model: SuperModel, device: torch.device, rate: TrainingRate = _H200) -> float:
    """Multiply-adds a second that are predicted with."""
    in_8_bits = any(isinstance(m, LoraLinear) and m.form.dtype.itemsize == 1 for m in model.model.modules())
    return rate.multiply_adds_per_second(device.type, in_8_bits)


def known_here(device: torch.device) -> GpuHere:
    """A GPU of this machine by its file, the table of GPUs, or what its driver says of it; by the last two where other kernels are
    forced. One that is not here is known by the table alone, and a CPU not at all.
    """
    if device.type != "cuda" or not can_be_asked(device):
        return GpuHere(None)
    name = name_of(device)
    if is_elsewhere():
        return GpuHere(gpu_called(name))
    properties = torch.cuda.get_device_properties(device)
    here = GpuHere(gpu_called(name)) if is_forced() else gpu_here(name, capability_of(device), properties.total_memory)
    if here.model is not None:
        return here
    if torch.version.hip:  # operations a clock are known of NVIDIA's alone
        return replace(here, model=gpu_by_name_alone(name))
    hz = 1e3 * getattr(properties, "clock_rate", 0)  # not every build of torch has it
    found = gpu_by_properties(name, properties.total_memory, capability_of(device), properties.multi_processor_count, hz)
    return replace(here, model=found)


def rate_here(device: torch.device) -> TrainingRate:
    """Of training on a GPU of this machine, with the kernels that run on it; an H200's for a CPU, which has a rate of its own."""
    here = known_here(device)
    if here.model is None or here.measured:
        return here.model.rate if here.model is not None else _H200
    return TrainingRate(here.model.flops_by(card_of(device)))


def _fixed_work(device: torch.device) -> float | None:
    """Where it was measured."""
    if is_elsewhere():
        return fixed_work_elsewhere()
    model = known_here(device).model
    return model.fixed_work if model is not None else None


def token_cost(memory: MemoryModel, device: torch.device, link_tokens: float = 0.0) -> TokenCost:
    """Of the base of `memory` on `device`. `link_tokens`: of one that is streamed."""
    return token_cost_on(device.type, (planned_card(device) or HOPPER).smallest_rows, memory, link_tokens, _fixed_work(device))
