"""What `layout_choice` asks for, of a run whose base is on the meta device here: its GPUs, what the base takes on them, and its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tlora.adapters.state import AdapterLayout
from tlora.errors import ModelError
from tlora.job import RunSpec
from tlora.kernels.device import as_if_on
from tlora.planning.base_parts import count_parts
from tlora.planning.job_plan import PlannedJob
from tlora.planning.job_sketch import AdapterSketch, JobSketch, LinearSketch
from tlora.planning.layout_choice import LayoutChoice, predict_form
from tlora.planning.layout_units import Device
from tlora.planning.plan import adapt_experts
from tlora.shape.base_parts import BaseParts
from tlora.shape.gpu_models import GpuModel
from tlora.shape.layout import Form
from tlora.supermodel.supermodel import SuperModel


def predict_here(
    run: RunSpec,
    jobs: Sequence[PlannedJob],
    model: SuperModel,
    gpus: Sequence[GpuModel],
    limits: Sequence[int],
    before: Form | None = None,
) -> LayoutChoice | None:
    """The layout that `tlora plan` names for the same run on `gpus`, of which a run may take `limits`. None where nothing is predicted."""
    rank, experts = max(job.spec.largest_rank for job in jobs), adapt_experts(jobs)
    try:
        parts = {gpu: _parts_on(gpu, model, rank, experts) for gpu in dict.fromkeys(gpus)}
    except ModelError:  # the base says so itself where it is laid out
        return None
    devices = [Device(gpu, parts[gpu], limit) for gpu, limit in zip(gpus, limits, strict=True)]
    return predict_form(run, [_sketch(job) for job in jobs], devices, before)


def without_peers(gpu: GpuModel) -> GpuModel:
    """As where it cannot read other GPUs' memory, whatever its kind can do elsewhere."""
    return replace(gpu, peer_gb_per_second=0.0)


def _parts_on(gpu: GpuModel, model: SuperModel, rank: int, adapts_experts: bool) -> BaseParts:
    with as_if_on(gpu.name, gpu.capability):
        return count_parts(model, torch.device("cuda"), rank, adapts_experts)


def _sketch(job: PlannedJob) -> JobSketch:
    wrong = tuple(problem for problem in job.problems if problem != job.too_large)  # whether it fits differs by layout
    return JobSketch(job.spec, job.data, job.longest, None if job.layout is None else _adapter(job.layout), wrong)


def _adapter(layout: AdapterLayout) -> AdapterSketch:
    return AdapterSketch(tuple(LinearSketch(s.module, s.rank, s.in_features, s.out_features, s.experts) for s in layout.shapes))
