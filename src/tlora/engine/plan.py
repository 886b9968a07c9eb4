"""From a RunSpec to jobs that can start: data tokenized, targets resolved, memory predicted. Shared by `check` and `train`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError

from tlora.adapters.peft import load_params, read_config
from tlora.adapters.state import AdapterLayout, AdapterState
from tlora.batching.pack import auto_token_budget
from tlora.data.prepare import Prepared, PrepareProgress, PrepareRequest, prepare
from tlora.engine.memory import MemoryModel, measure
from tlora.errors import CapacityError, DataError, ModelError, TloraError
from tlora.job import JobSpec, RunSpec
from tlora.supermodel.load import longest_safe_sequence
from tlora.supermodel.supermodel import SuperModel

_CPU_BUDGET_CAP, _GPU_BUDGET_CAP = 2048, 8192  # tokens; past them throughput is flat (docs/design.md)


@dataclass
class PlannedJob:
    """One job with all that is known before it starts. `problems` keep it from starting."""

    spec: JobSpec
    data: Prepared | None = None
    layout: AdapterLayout | None = None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RunPlan:
    """All jobs, the budget of a micro-batch, and the memory that the run will take."""

    jobs: tuple[PlannedJob, ...]
    token_budget: int
    memory: MemoryModel
    limit_bytes: int
    longest: int  # tokens of the longest sample of any job

    def fits(self, layouts: list[AdapterLayout]) -> bool:
        return self.memory.total_bytes(layouts, self.token_budget) <= self.limit_bytes


def pick_device(device: str | None) -> torch.device:
    """`device`, or the GPU if there is one. Raises ModelError for one that is not there."""
    wanted = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=wanted)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {wanted!r} cannot be used: {str(error).splitlines()[0]} Use cpu, or cuda where there is a GPU") from None
    return torch.device(wanted)


def cache_dir() -> Path:
    """Where tokenized data is kept between runs: $TLORA_CACHE, or tlora under the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("TLORA_CACHE") or Path(home) / "tlora").expanduser()


def plan_run(
    run: RunSpec, model: SuperModel, base_bytes: int, device: torch.device, limit_bytes: int, on_progress: Callable[[PrepareProgress], None]
) -> RunPlan:
    """Tokenize all data and plan every job on `model` (meta device). What is wrong with a job is in its `problems`."""
    jobs = tuple(PlannedJob(spec) for spec in run.jobs)
    data = _prepare(run, model.base.vocab_size, on_progress)
    for job in jobs:
        found = data[job.spec.name]
        if isinstance(found, DataError):
            job.problems.append(str(found))
        else:
            job.data = found
            job.warnings += _data_warnings(found)
        try:
            job.spec, warnings = adopt_adapter_config(job.spec)
            job.warnings += warnings
            job.layout = model.layout(job.spec)
            job.warnings += _rank_warnings(job.layout)
            if job.spec.adapter_path:
                load_params(Path(job.spec.adapter_path), job.layout, torch.float32)
        except TloraError as error:
            job.problems.append(str(error))
    for job in jobs:
        job.problems += _length_problems(job, longest_safe_sequence(model.model))
    memory = measure(model, base_bytes)
    limit = limit_bytes if run.memory_limit == "auto" else run.memory_limit
    sound = [j for j in jobs if not j.problems]
    longest = max((int(d.lengths.max()) for j in sound if j.data for d in (j.data.train, j.data.eval) if d is not None), default=1)
    budget = _token_budget(run, sound, longest, memory, limit, device)
    plan = RunPlan(jobs, budget, memory, limit, longest)
    for job in jobs:
        _check_capacity(job, plan)
    return plan


def _prepare(run: RunSpec, vocab_size: int, on_progress: Callable[[PrepareProgress], None]) -> Mapping[str, Prepared | DataError]:
    requests = [PrepareRequest(job.name, job.data, job.seed, run.base_model, vocab_size, cache_dir(), Path.cwd()) for job in run.jobs]
    return prepare(requests, on_progress)


def adopt_adapter_config(spec: JobSpec) -> tuple[JobSpec, list[str]]:
    """A job that starts from an adapter has that adapter's shape, with a warning where the jobs file says otherwise. Raises ModelError."""
    if not spec.adapter_path:
        return spec, []
    config = read_config(Path(spec.adapter_path))
    if isinstance(config.get("target_modules"), str):
        raise ModelError(f"{spec.adapter_path}: target_modules is the pattern {config['target_modules']!r}. List the layers' names there")
    shape = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
    adopted = {key: config[key] for key in shape if config.get(key) is not None}
    if not isinstance(config.get("target_modules"), list):
        raise ModelError(f"{spec.adapter_path}: target_modules must be a list of names, and is {config.get('target_modules')!r}")
    adopted["target_modules"] = sorted(config["target_modules"])
    differ = [key for key in shape if key in spec.model_fields_set and key in adopted and getattr(spec, key) != adopted[key]]
    warnings = [f"{key} is {adopted[key]}, as in {spec.adapter_path} (the job says {getattr(spec, key)})" for key in differ]
    try:
        return JobSpec.model_validate(spec.model_dump() | adopted), warnings
    except ValidationError as error:
        raise ModelError(f"{spec.adapter_path}: its adapter_config.json cannot be continued: {validation_problems(error)}") from None


def validation_problems(error: ValidationError) -> str:
    """What pydantic found, on one line."""
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}, and is {str(e['input'])[:80]!r}" for e in error.errors())


def start_state(spec: JobSpec, model: SuperModel, layout: AdapterLayout) -> AdapterState | None:
    """The adapter that `adapter_path` names, with a fresh optimizer; None for a new one."""
    if not spec.adapter_path:
        return None
    params = load_params(Path(spec.adapter_path), layout, model.bank.sum_dtype).to(model.device)
    return AdapterState(layout, params, torch.zeros_like(params), torch.zeros_like(params))


def _data_warnings(data: Prepared) -> list[str]:
    """What training will not see."""
    found: list[str] = []
    for report in (data.report, data.eval_report):
        if report is not None and report.truncated:
            cut = f"{report.truncated:,} of {report.samples:,} samples are cut to max_length"
            lost = f"{report.trained_tokens_lost:,} trained tokens lost; the longest has {report.longest:,} tokens"
            found.append(f"{cut}, {lost} ({report.files[0]})")
        if report is not None and report.skipped:
            found.append(f"{report.skipped:,} of {report.rows:,} rows have no trained token and are left out ({report.files[0]})")
    return found


def _length_problems(job: PlannedJob, longest_allowed: int | None) -> list[str]:
    """Some rotary embeddings stretch with the longest sequence in the batch: past this length a job would change its neighbours."""
    sets = [d for d in (job.data.train, job.data.eval) if d is not None] if job.data else []
    longest = max((int(d.lengths.max()) for d in sets), default=0)
    if longest_allowed is None or longest <= longest_allowed:
        return []
    return [
        f"a sample has {longest} tokens, and this base's rotary embedding changes past {longest_allowed}. Set max_length: {longest_allowed}"
    ]


def _rank_warnings(layout: AdapterLayout) -> list[str]:
    over = [s for s in layout.shapes if s.rank > min(s.in_features, s.out_features)]
    if not over:
        return []
    s = over[0]
    return [
        f"rank {s.rank} is larger than {s.module} ({s.in_features} to {s.out_features}): it can be trained, but a lower one says as much"
    ]


def _token_budget(run: RunSpec, jobs: list[PlannedJob], longest: int, memory: MemoryModel, limit: int, device: torch.device) -> int:
    """What the user set (but the longest sample must fit), or the largest that the jobs can fill, the device gains from and the
    memory holds.
    """
    if run.token_budget != "auto":
        return max(run.token_budget, longest)
    offered = [float(j.data.train.lengths.mean()) * min(j.spec.batch_size, len(j.data.train)) for j in jobs if j.data]
    budget = auto_token_budget(longest, offered, _GPU_BUDGET_CAP if device.type == "cuda" else _CPU_BUDGET_CAP)
    smallest = min((memory.job_bytes(j.layout) for j in jobs if j.layout), default=0)
    while budget // 2 >= longest and memory.base_bytes + smallest + memory.activation_bytes(budget) > limit:
        budget //= 2
    return budget


def _check_capacity(job: PlannedJob, plan: RunPlan) -> None:
    if job.layout is None or plan.fits([job.layout]):
        return
    need = plan.memory.total_bytes([job.layout], plan.token_budget)
    error = CapacityError(
        f"job {job.spec.name!r} needs {gib(need)} (base {gib(plan.memory.base_bytes)}, adapter {gib(plan.memory.job_bytes(job.layout))}, "
        f"activations of {plan.token_budget} tokens {gib(plan.memory.activation_bytes(plan.token_budget))}), and the limit is "
        f"{gib(plan.limit_bytes)}. Lower max_length, token_budget or r, or raise memory_limit"
    )
    job.problems.append(str(error))


def gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"


def describe_plan(plan: RunPlan) -> str:
    budget = f"token budget {plan.token_budget} (the longest sample has {plan.longest})"
    return f"{budget}, memory limit {gib(plan.limit_bytes)}, base {gib(plan.memory.base_bytes)}"
