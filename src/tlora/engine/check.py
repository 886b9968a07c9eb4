"""`tlora check`: everything about a run that needs no weights, only their headers. Reports all problems at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tlora.cache_directory import open_caches
from tlora.data.base_download import describe_download, fetch_base
from tlora.data.order import Mixture, PackedRows, epoch_size
from tlora.data.prepare import Preparation, Prepared
from tlora.data.report import DataReport
from tlora.data.sources import shown_files
from tlora.engine.check_gpus import Devices, GpuCheck, check_gpus
from tlora.engine.ranks.devices import count_elsewhere, rank_devices
from tlora.engine.watcher import Watcher
from tlora.errors import CapacityError, ConfigError, DataError, ModelError
from tlora.job import JobSpec, RunSpec
from tlora.planning.memory_probe import probe_key, recall
from tlora.planning.plan import RunPlan, describe_recompute, pick_device, plan_run, settle
from tlora.planning.planned_job import PlannedJob
from tlora.planning.recompute_choices import RecomputeChoice, predicted_rate, recompute_choices
from tlora.planning.streaming import StreamPlan, choose_layout
from tlora.planning.work import known_here, predicted_seconds
from tlora.shape.gpu_models import name_gpus
from tlora.shape.token_cost import StreamCost
from tlora.store.metrics import check_trackers
from tlora.store.run_directory import check_run_directory
from tlora.store.serving import ServingFiles
from tlora.supermodel.cpu_dtype import settle_dtype
from tlora.supermodel.held_linear import check_precision
from tlora.supermodel.load import load_config, outline
from tlora.supermodel.supermodel import SuperModel
from tlora.supermodel.weight_files import check_unused, check_weights
from tlora.wording.numbers import quantity


@dataclass(frozen=True)
class SourceCheck:
    """One of several data sources of a job: its samples, and how many (with `packing`, of their rows) an epoch takes; None: all that are
    not held out.
    """

    name: str
    samples: int
    per_epoch: int | None


@dataclass(frozen=True)
class JobCheck:
    """The check of one job. `memory_bytes` is what it adds to a run; `data` is None if its data is bad, `eval_data` also if the evaluation
    has no separate file. `sources` is empty for a job with a single source.
    """

    name: str
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    rank: int
    trainable_parameters: int
    memory_bytes: int
    total_steps: int
    data: DataReport | None
    eval_data: DataReport | None = None
    sources: tuple[SourceCheck, ...] = ()


@dataclass(frozen=True)
class RunCheck:
    """The check of the run. `resident_jobs` train at once; the others wait in a queue."""

    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    jobs: tuple[JobCheck, ...]
    base_parameters: int
    base_bytes: int
    token_budget: int
    predicted_bytes: int
    limit_bytes: int
    device: str
    resident_jobs: int
    kernels: str = ""  # what runs on a GPU, and why
    adapter_bytes: int = 0  # of the resident jobs
    mailbox_bytes: int = 0  # in which GPUs read each other's gradients
    activation_bytes: int = 0
    recomputed_layers: int = 0  # of the largest micro-batch
    layers_of_budget: int = 0  # recomputed by one that fills the token budget
    num_layers: int = 0  # that can be recomputed
    recomputed: str = ""  # in words: how many layers, and by which micro-batches
    measured: bool = False  # by an earlier run on this device, or else counted
    gpus: tuple[GpuCheck, ...] = ()  # of a run on several
    form: str = ""  # how the base lies on them, and why
    placement: str = ""  # how far the placement is from the best
    recompute_choices: tuple[RecomputeChoice, ...] = ()  # of a run on one GPU
    tokens_per_second: float = 0.0  # of the resident jobs on one GPU; 0: not predicted
    rated_as: str = ""  # what its speeds on a GPU are those of
    streamed: str = ""  # of a base that is streamed from the host's memory: why, and what it costs
    stream_cost: StreamCost | None = None  # of a full micro-batch of it


def check(
    run: RunSpec,
    watcher: Watcher | None = None,
    device: str | None = None,
    gpus: str | int | None = None,
    gpu: str | None = None,
) -> RunCheck:
    """Tokenize the data (into the cache that training uses), resolve every target, and predict memory; with `gpus` as of `train`, also
    what each of them would do. `gpu`: plan for these models of GPU (`shape/gpu_models.py`) instead of what is here; `gpus`
    is then a number of them.

    Without a base model only that problem and missing data files can be reported. Raises ConfigError for devices that do not exist.
    """
    if gpu is None:
        ranks = rank_devices(gpus, device)
        where = Devices((pick_device(ranks[0] if ranks else device), *(torch.device(other) for other in ranks[1:])))
    else:
        models = tuple(name_gpus(gpu, count_elsewhere(gpus, device, gpu)))
        where = Devices((torch.device("cuda"),) * len(models), models)
    with where.on():
        return _check(run, watcher or Watcher(), where)


def _check(run: RunSpec, watcher: Watcher, where: Devices) -> RunCheck:
    problems: list[str] = []
    place, shown = where.place, where.name
    try:
        check_trackers(list(run.report_to))
    except ConfigError as error:
        problems.append(str(error))
    warnings = _look_at_output(run, problems)
    open_caches(warnings.append)
    here = known_here(place)
    if here.told and not here.measured:
        warnings.append(here.told)
    try:
        run, plan, model, parameters = _look_at_base(run, place, watcher, problems, warnings)
    except (ModelError, ConfigError) as error:
        return _without_base(run, (*problems, str(error)), shown)
    base_bytes = model.base.num_bytes
    is_here = place.type == "cuda" and not where.elsewhere
    known = recall(probe_key(model, plan.can_run, run.deterministic, place)) if is_here else None
    if known is not None:
        plan = settle(run, plan, known, place)
    plan, streamed = _layout(run, plan, model, where, problems)
    on_gpus: dict[str, Any]
    if where.count > 1:
        on_gpus = check_gpus(run, plan, model, where, problems)
    else:
        seconds = predicted_seconds(plan.jobs, model, place, where.rate)
        on_gpus = {
            "recompute_choices": recompute_choices(run, plan, seconds, place),
            "tokens_per_second": predicted_rate(plan, seconds, place) if place.type == "cuda" else 0.0,
        }
    if streamed is not None:
        cost = streamed.cost(plan, place)
        on_gpus |= {"streamed": streamed.describe(cost), "stream_cost": cost}
    plan = on_gpus.pop("plan", plan)
    resident = plan.residents
    late = len(plan.jobs) - len(resident)
    waiting = [f"{quantity(late, 'job waits', 'jobs wait')} until others have left: memory is full"] if late else []
    waiting += _wider(run.jobs, where.count) if where.count > 1 else []
    return RunCheck(
        problems=tuple(problems),
        warnings=(*warnings, *plan.warnings, *waiting),
        jobs=tuple(_job_check(job, plan) for job in plan.jobs),
        base_parameters=parameters,
        base_bytes=base_bytes if plan.streaming is None else plan.memory.base_bytes,
        device=shown,
        rated_as=where.rated_as,
        kernels=model.kernels_on(place, run.deterministic) if place.type == "cuda" else "",
        resident_jobs=len(resident),
        **_memory(plan, resident),
        **on_gpus,
    )


def _wider(jobs: Sequence[JobSpec], gpus: int) -> list[str]:
    """What is said of jobs with more replicas than there are GPUs."""
    wide = [f"{job.name} orders {job.gpus}" for job in jobs if job.gpus > gpus]
    told = f"{', '.join(wide[:4])}{' …' if len(wide) > 4 else ''}: on {gpus} GPUs replicas take turns, and `tlora train` is on one host"
    return [f"{told}. `tlora cluster` and `tlora serve` give a job GPUs of several hosts (docs/how-to/several-hosts.md)"] if wide else []


def _layout(run: RunSpec, plan: RunPlan, model: SuperModel, where: Devices, problems: list[str]) -> tuple[RunPlan, StreamPlan | None]:
    """The plan, of a streamed base where that is to be; a base that fits in no form is one of the `problems`."""
    if where.count > 1:
        return plan, None
    try:
        return choose_layout(run, plan, model, where.place, where.machine(run.layout))
    except (CapacityError, ModelError) as error:
        problems.append(str(error))
        return plan, None


def _look_at_base(
    run: RunSpec, place: torch.device, watcher: Watcher, problems: list[str], warnings: list[str]
) -> tuple[RunSpec, RunPlan, SuperModel, int]:
    """The run in the base's dtype, its plan, the base on the meta device, and how many parameters that has. Raises ModelError,
    ConfigError.
    """
    dtype, line = settle_dtype(run.base_model, run.dtype, place)
    run = run.model_copy(update={"dtype": dtype})
    warnings += [line] if line else []
    base = outline(run.base_model, run.dtype, run.base_precision)
    check_precision(run.base_precision, place, base.head.weight_VH.dtype)
    show = watcher.stages(run.jobs)
    fetch_base(run.base_model, show, weights=False)
    if unknown := check_weights(run.base_model, load_config(run.base_model)):
        warnings.append(unknown)
        _look_at_download(run.base_model, problems, warnings)
    warnings += check_unused(run.base_model, load_config(run.base_model), run.unused_weights)
    parameters, model = base.num_parameters, SuperModel(base, run.deterministic)
    tokenizing = Preparation(lambda p: show(f"tokenizing {p.key}: {p.rows:,} rows, {p.share:.0%}"))
    plan = plan_run(run, model, base.num_bytes, place, tokenizing)
    warnings += ServingFiles(run.base_model).warn([(job.spec, job.data.report) for job in plan.jobs if job.data])
    return run, plan, model, parameters


def _look_at_download(base_model: str, problems: list[str], warnings: list[str]) -> None:
    """A note on what training will download, or on a disk without room for it."""
    try:
        if line := describe_download(base_model):
            warnings.append(line)
    except ModelError as error:
        problems.append(str(error))


def _memory(plan: RunPlan, resident: Sequence[PlannedJob]) -> dict[str, Any]:
    """Fields of a RunCheck: what the jobs take that are resident at once."""
    layouts, memory = [job.layout for job in resident if job.layout is not None], plan.memory
    return {
        "token_budget": plan.token_budget,
        "predicted_bytes": plan.total_bytes(layouts),
        "limit_bytes": plan.limit_bytes,
        "adapter_bytes": sum(memory.job_bytes(layout) for layout in layouts),
        "mailbox_bytes": memory.mailbox_bytes,
        "activation_bytes": plan.activation_bytes,
        "recomputed_layers": plan.recomputed_layers,
        "layers_of_budget": plan.recompute.layers(plan.token_budget),
        "num_layers": memory.num_layers,
        "recomputed": describe_recompute(plan) if memory.num_layers else "",
        "measured": memory.measured,
    }


def _look_at_output(run: RunSpec, problems: list[str]) -> list[str]:
    """Adds to `problems` an output directory that cannot be used; returns a warning of one that `train` takes with an option only."""
    try:
        check_run_directory(run, resume=False, overwrite=False)
    except ConfigError as error:
        if (Path(run.output_dir) / "run.json").is_file():
            return [str(error)]
        problems.append(str(error))
    return []


def _without_base(run: RunSpec, problems: tuple[str, ...], device: str) -> RunCheck:
    jobs = tuple(JobCheck(job.name, _missing_files(job), (), job.r, 0, 0, 0, None) for job in run.jobs)
    return RunCheck(problems, (), jobs, 0, 0, 0, 0, 0, device, 0)


def _missing_files(job: JobSpec) -> tuple[str, ...]:
    found: list[str] = []
    for source in (*job.data.sources, *job.data.eval_sources):
        try:
            shown_files([source], Path())
        except DataError as error:
            found.append(str(error))
    return tuple(found)


def _job_check(job: PlannedJob, plan: RunPlan) -> JobCheck:
    return JobCheck(
        name=job.spec.name,
        problems=tuple(job.problems),
        warnings=tuple(job.warnings),
        rank=job.spec.r,
        trainable_parameters=job.layout.numel if job.layout else 0,
        memory_bytes=plan.memory.job_bytes(job.layout) if job.layout else 0,
        total_steps=job.spec.total_steps(epoch_size(job.data.train.epoch)) if job.data else 0,
        data=job.data.report if job.data else None,
        eval_data=job.data.eval_report if job.data else None,
        sources=_source_checks(job.data) if job.data else (),
    )


def _source_checks(data: Prepared) -> tuple[SourceCheck, ...]:
    """Nothing for a single source."""
    named, counts, epoch = data.data.sources, data.report.sources, data.train.epoch
    epoch = epoch.rows if isinstance(epoch, PackedRows) else epoch
    if len(named) < 2:
        return ()
    takes = epoch.takes if isinstance(epoch, Mixture) else [None] * len(named)
    return tuple(SourceCheck(source.display_name, count, take) for source, count, take in zip(named, counts, takes, strict=True))
