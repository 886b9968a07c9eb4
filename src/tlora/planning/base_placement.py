"""How the base of a run lies on its GPUs: whole on each, or, where it does not fit so, in one part for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from tlora.adapter_shape import ExpertJobs
from tlora.batching.pipeline_model import StageOverhead
from tlora.batching.replicas import ReplicaPlacement
from tlora.errors import CapacityError, ConfigError, ModelError
from tlora.job import LayoutSetting, RunSpec
from tlora.kernels.device import as_if_on
from tlora.planning.base_parts import count_parts, takes_plain_path
from tlora.planning.holders import Holders, find_holders, longest_parts
from tlora.planning.layout_choice import LayoutChoice, predict_form
from tlora.planning.layout_units import Device, Pipeline
from tlora.planning.memory import bytes_when_shared, can_be_cut
from tlora.planning.plan import RunPlan, adapt_experts, count_for, layouts_of, plan_memory
from tlora.planning.planned_job import PlannedJob
from tlora.shape.base_parts import BaseParts
from tlora.shape.gpu_models import GpuModel
from tlora.shape.layout import Form
from tlora.shape.stages import LayerRange
from tlora.supermodel.load import layers_of
from tlora.supermodel.stage_base import check_stages, why_no_stages
from tlora.supermodel.supermodel import SuperModel
from tlora.wording.numbers import gib, place_names


@dataclass(frozen=True)
class BasePlacement:
    """`shared`: each GPU holds a part of every decoder layer. `stages`: each holds some of the layers, these. `why` is for a person; `plan`
    is that of a GPU that holds all jobs. `holders`: of jobs that not all GPUs have memory for.
    """

    shared: bool
    why: str
    plan: RunPlan
    stages: tuple[LayerRange, ...] = ()
    holders: Holders = field(default_factory=Holders)

    @property
    def refused(self) -> list[str]:
        """Names of the jobs for which there is too little memory."""
        return _refused(self.plan)


def choose_form(
    run: RunSpec,
    jobs: tuple[PlannedJob, ...],
    model: SuperModel,
    base_bytes: int,
    device: torch.device,
    limits: Sequence[int],
    reads_peers: bool = True,
    speeds: Sequence[float] = (),
    models: Sequence[GpuModel] = (),
    before: Form | None = None,
) -> BasePlacement:
    """Whole, unless a shared base lets more jobs run, or another form is predicted to be so much faster that it is taken
    (`layout_choice.py`). Where GPUs cannot read each other's memory, stages in place of a shared base. Jobs that fit in none get a problem.
    `limits`: bytes of each GPU; `reads_peers`: whether GPUs read each other's memory; `speeds`: of GPUs that differ; `models`: of each
    GPU, left out where nothing is known of one; `before`: the form of the run that is resumed. Raises CapacityError for a base that does
    not fit at all, ModelError for one that does not fit whole and cannot be cut, and ConfigError where it shall be streamed.
    """
    gpus, limit, (one, several) = len(limits), min(limits), place_names(device.type)
    if run.layout == "streamed":
        raise ConfigError(f"layout: streamed is for one GPU, and these are {gpus}, which can hold a base in parts. Take it out, or --gpus")
    whole = plan_memory(run, jobs, model, base_bytes, device, limit)
    refused_whole = _refused(whole)
    fits_whole = whole.memory.base_bytes <= limit
    unequal = fits_whole and refused_whole and max(limits) > limit and run.layout in ("auto", "whole")
    some = _on_some(run, jobs, model, base_bytes, device, limits) if unequal else None
    if unequal and some is None:
        whole = plan_memory(run, jobs, model, base_bytes, device, limit)  # jobs have the problems of the smallest GPU again
    wanted: LayoutSetting = run.layout
    why, on_each = f"layout: {wanted}", f"each {one} holds the whole base, {gib(base_bytes)}"
    known = models if reads_peers else list(map(_without_peers, models))
    if wanted == "auto" and gpus > 1 and models:
        taken = _predict_here(run, jobs, model, known, limits, before)
        if taken is not None and (taken.why or (taken.form == "stages" and reads_peers and can_be_cut(model))):
            wanted, why = taken.form, taken.why or "base and jobs fit in no other form"
    if wanted == "stages" and gpus > 1:
        return _in_stages(run, jobs, model, device, limits, speeds, known, reads_peers, why)
    if some is not None and wanted != "shared":
        return some
    is_enough = not refused_whole or gpus == 1 or not can_be_cut(model)
    if wanted == "whole" or (fits_whole and is_enough and wanted != "shared"):
        return BasePlacement(False, on_each, whole)
    unshared = "" if can_be_cut(model) else "the base cannot be shared"
    if gpus > 1 and wanted != "shared" and (unshared := unshared or ("" if reads_peers else f"{several} cannot read each other's memory")):
        unfused = not run.deterministic and takes_plain_path(whole.memory, device)
        if fits_whole and (unfused or rows_trained(jobs) or why_no_stages(model.base, device)):
            return BasePlacement(False, on_each, whole)
        return _in_stages(run, jobs, model, device, limits, speeds, known, reads_peers, unshared)
    shared_bytes = bytes_when_shared(model, base_bytes, gpus) if gpus > 1 else base_bytes
    shared = plan_memory(run, jobs, model, count_for(jobs, model, shared_bytes, device, in_parts=gpus > 1), device, limit)
    parts = f"{gib(shared_bytes)} of the base's {gib(base_bytes)} on each of {gpus} {several}"
    if shared_bytes > limit:
        raise CapacityError(_no_form(whole, base_bytes, shared_bytes, limit, gpus, model, device))
    if wanted == "shared" and gpus > 1:
        return BasePlacement(True, f"{why}: {parts}", shared)
    if not fits_whole:
        return BasePlacement(True, f"the base does not fit on one {one} ({gib(limit)}): {parts}", shared)
    if len(_refused(shared)) < len(refused_whole):
        return BasePlacement(True, f"with the whole base on each {one} {refused_whole[0]} does not fit: {parts}", shared)
    return BasePlacement(False, on_each, plan_memory(run, jobs, model, base_bytes, device, limit))


def _on_some(
    run: RunSpec, jobs: tuple[PlannedJob, ...], model: SuperModel, base_bytes: int, device: torch.device, limits: Sequence[int]
) -> BasePlacement | None:
    """The whole base on each GPU, and jobs for which some have too little memory on the others. None where a job fits on none of them."""
    plans = list[RunPlan]()  # the last is that of the largest GPU, as jobs keep the problems that they have there

    def refused(here: Sequence[PlannedJob], limit: int) -> list[PlannedJob]:
        plans.append(plan_memory(run, tuple(here), model, base_bytes, device, limit))
        return [job for job in here if job.too_large in job.problems]

    def parts(job: PlannedJob, limit: int) -> Iterator[PlannedJob]:
        spanning = replace(job, span=ReplicaPlacement(max(2, job.spec.gpus), (0, 1)), problems=[], too_large=None)
        memory = count_for(jobs, model, base_bytes, device)
        return (replace(spanning, longest=longest, problems=[]) for longest in longest_parts(run, spanning, memory, limit))

    if (holders := find_holders(jobs, limits, refused, parts)) is None:
        return None
    one, _ = place_names(device.type)
    each = "; ".join(f"{name} fits on {one} {', '.join(map(str, able))} alone" for name, able in holders.whole.items())
    return BasePlacement(False, f"each {one} holds the whole base, {gib(base_bytes)}; {each}", plans[-1], holders=holders)


def fixed_to(run: RunSpec, plan: RunPlan, reads_peers: bool) -> RunSpec:
    """`run` as stages get it: what it leaves open of the budget and the recomputed layers is that of `plan`, and the links go through the
    host's memory where GPUs cannot read each other's. All micro-batches recompute what the largest must.
    """
    chosen: dict[str, object] = {"token_budget": plan.token_budget, "recompute": plan.recomputed_layers or "none"}
    chosen |= {} if reads_peers else {"links": "host"}
    return run.model_copy(update={key: value for key, value in chosen.items() if getattr(run, key) == "auto"})


def rows_trained(jobs: Sequence[PlannedJob]) -> list[str]:
    """Names of jobs that train rows of the embedding."""
    return [job.spec.name for job in jobs if job.layout is not None and any(shape.tokens for shape in job.layout.shapes)]


def _in_stages(
    run: RunSpec,
    jobs: tuple[PlannedJob, ...],
    model: SuperModel,
    device: torch.device,
    limits: Sequence[int],
    speeds: Sequence[float],
    models: Sequence[GpuModel],
    reads_peers: bool,
    reason: str,
) -> BasePlacement:
    """Raises ModelError for a base that cannot be cut into stages, ConfigError for jobs that cannot be trained so, and CapacityError where
    a stage does not fit.
    """
    check_stages(model.base, device)
    one, several = place_names(device.type)
    if rows := rows_trained(jobs):
        raise ConfigError(
            f"{rows[0]} has trainable_token_indices, which needs embedding and head in one place, and the base would be in stages "
            f"({reason}). Set layout: shared or whole, or train it on {several} that hold the base"
        )
    gpus = len(limits)
    layers = len(layers_of(model.base.decoder))
    if layers < gpus:
        raise ConfigError(
            f"layout: stages needs a decoder layer for each {one}, and the base has {layers} for {gpus}. Take --gpus {layers}"
        )
    parts = count_parts(model, device, max(job.spec.largest_rank for job in jobs), adapt_experts(jobs))
    adapter, longest = max((layout.numel for layout in layouts_of(jobs)), default=0), max((job.longest for job in jobs), default=1)
    cuts = parts.cut(speeds or [1.0] * gpus, limits, adapter, longest, run.recompute, reads_peers)
    ranges, sizes = [LayerRange(first, stop, layers) for first, stop in cuts], [parts.stage_bytes(*cut) for cut in cuts]
    fullest = max(range(gpus), key=lambda rank: sizes[rank] - limits[rank])
    if sizes[fullest] > limits[fullest]:
        raise CapacityError(
            f"the largest of {gpus} stages of the base needs {gib(sizes[fullest])}, and the limit is {gib(limits[fullest])}. Take more "
            f"{several}, a smaller base, or base_precision: nf4"
        )
    # Each stage keeps the activations of `most_open` micro-batches. All take what the tightest can.
    memories = parts.memories(cuts, reads_peers)
    devices = tuple(Device(gpu, parts, limit) for gpu, limit in zip(models, limits, strict=bool(models)))
    overhead = Pipeline(devices, cuts).overhead() if devices else StageOverhead(host_ahead=device.type == "cuda")
    rooms = zip(memories, limits, strict=True)
    plans = [plan_memory(run, jobs, model, memory, device, limit, stages=gpus, overhead=overhead) for memory, limit in rooms]
    tightest = min(plans, key=_room)
    # what is wrong with jobs is that of the last plan
    plan = plan_memory(run, jobs, model, tightest.memory, device, tightest.limit_bytes, stages=gpus, overhead=overhead)
    each = "; ".join(f"{one} {rank}: layers {cut.first} to {cut.stop - 1}, {gib(sizes[rank])}" for rank, cut in enumerate(ranges))
    return BasePlacement(False, f"{reason}: {each}", plan, tuple(ranges))


def _room(plan: RunPlan) -> tuple[int, int, int]:
    """By which plans of stages are compared: first of all how many jobs they have room for."""
    return -len(_refused(plan)), plan.token_budget, -plan.recomputed_layers


def _refused(plan: RunPlan) -> list[str]:
    return [job.spec.name for job in plan.jobs if job.too_large in job.problems]


def _no_form(whole: RunPlan, base_bytes: int, shared_bytes: int, limit: int, gpus: int, model: SuperModel, device: torch.device) -> str:
    """What is missing, and what would fit."""
    one, several = place_names(device.type)
    needs = f"{gib(shared_bytes)} on each of {gpus} {several}" if gpus > 1 else f"{gib(base_bytes)} on one {one}"
    remedies: list[str] = []
    enough = next((count for count in range(gpus + 1, 17) if bytes_when_shared(model, base_bytes, count) <= limit), None)
    remedies += [f"--gpus {enough}"] if enough is not None else []
    remedies += [f"base_precision: {precision}" for precision, count in whole.other_precisions.items() if count <= limit][:1]
    instead = f"Would fit: {', or '.join(remedies)}. Or take" if remedies else "Take"
    hosts = ", or train with `tlora cluster` on GPUs of several hosts" if gpus > 1 else ""
    return f"the base model needs {needs}, and the limit is {gib(limit)}. {instead} a smaller base, or {whole.more_memory}{hosts}"


def _predict_here(
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
    anew = [replace(job, problems=[each for each in job.problems if each != job.too_large], span=None) for job in jobs]
    return predict_form(run, anew, devices, before)  # whether a job fits, and where, differs by layout


def _without_peers(gpu: GpuModel) -> GpuModel:
    """As where it cannot read other GPUs' memory, whatever its kind can do elsewhere."""
    return replace(gpu, peer_gb_per_second=0.0)


def _parts_on(gpu: GpuModel, model: SuperModel, rank: int, adapts_experts: ExpertJobs) -> BaseParts:
    with as_if_on(gpu.name, gpu.capability):
        return count_parts(model, torch.device("cuda"), rank, adapts_experts)
