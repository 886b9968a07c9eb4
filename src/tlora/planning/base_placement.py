"""How the base of a run lies on its GPUs: whole on each, or, where it does not fit so, in one part for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tlora.errors import CapacityError, ConfigError
from tlora.job import RunSpec
from tlora.planning.job_plan import PlannedJob
from tlora.planning.memory import bytes_when_shared, can_be_cut
from tlora.planning.plan import RunPlan, plan_memory
from tlora.supermodel.supermodel import SuperModel
from tlora.wording.numbers import gib


@dataclass(frozen=True)
class BasePlacement:
    """`shared`: each GPU holds a part of every decoder layer. `why` is for a person; `plan` is that of each GPU."""

    shared: bool
    why: str
    plan: RunPlan

    @property
    def refused(self) -> list[str]:
        """Names of the jobs for which there is too little memory."""
        return _refused(self.plan)


def choose_form(
    run: RunSpec, jobs: tuple[PlannedJob, ...], model: SuperModel, base_bytes: int, device: torch.device, limit: int, gpus: int
) -> BasePlacement:
    """Whole, unless a shared base lets more jobs run: fetching costs some hundredths of the speed, and a lost GPU ends all. Jobs that fit
    in neither get a problem. `limit`: bytes of the GPU that has the least. Raises CapacityError for a base that does not fit at all,
    ModelError for one that does not fit whole and cannot be cut, and ConfigError where it shall be streamed.
    """
    if run.layout == "streamed":
        raise ConfigError(f"layout: streamed is for one GPU, and these are {gpus}, which can hold a base in parts. Take it out, or --gpus")
    whole = plan_memory(run, jobs, model, base_bytes, device, limit)
    refused_whole = _refused(whole)
    fits_whole = whole.memory.base_bytes <= limit
    if fits_whole and (not refused_whole or gpus == 1 or not can_be_cut(model)):
        return BasePlacement(False, f"each GPU holds the whole base, {gib(base_bytes)}", whole)
    shared_bytes = bytes_when_shared(model, base_bytes, gpus) if gpus > 1 else base_bytes
    shared = plan_memory(run, jobs, model, shared_bytes, device, limit)
    parts = f"{gib(shared_bytes)} of the base's {gib(base_bytes)} on each of {gpus} GPUs"
    if shared_bytes > limit:
        raise CapacityError(_no_form(whole, base_bytes, shared_bytes, limit, gpus, model))
    if not fits_whole:
        return BasePlacement(True, f"the base does not fit on one GPU ({gib(limit)}): {parts}", shared)
    if len(_refused(shared)) < len(refused_whole):
        return BasePlacement(True, f"with the whole base on each GPU {refused_whole[0]} does not fit: {parts}", shared)
    return BasePlacement(
        False, f"each GPU holds the whole base, {gib(base_bytes)}", plan_memory(run, jobs, model, base_bytes, device, limit)
    )


def _refused(plan: RunPlan) -> list[str]:
    return [job.spec.name for job in plan.jobs if job.too_large in job.problems]


def _no_form(whole: RunPlan, base_bytes: int, shared_bytes: int, limit: int, gpus: int, model: SuperModel) -> str:
    """What is missing, and what would fit."""
    needs = f"{gib(shared_bytes)} on each of {gpus} GPUs" if gpus > 1 else f"{gib(base_bytes)} on one GPU"
    remedies: list[str] = []
    enough = next((count for count in range(gpus + 1, 17) if bytes_when_shared(model, base_bytes, count) <= limit), None)
    remedies += [f"--gpus {enough}"] if enough is not None else []
    remedies += [f"base_precision: {precision}" for precision, count in whole.other_precisions.items() if count <= limit][:1]
    instead = f"Would fit: {', or '.join(remedies)}. Or take" if remedies else "Take"
    return f"the base model needs {needs}, and the limit is {gib(limit)}. {instead} a smaller base, or {whole.more_memory}"
