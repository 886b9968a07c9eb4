"""From a RunSpec to jobs that can start together: budget, recomputed layers, memory. Shared by `check` and `train`; what is known of each
job by itself is in `job_plan.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tlora.adapter_shape import ExpertJobs, expert_jobs
from tlora.adapters.layout import AdapterLayout
from tlora.batching.pipeline_model import NO_OVERHEAD, StageOverhead
from tlora.batching.recompute_plan import RecomputePlan
from tlora.batching.replicas import ReplicaPlacement
from tlora.data.prepare import Preparation
from tlora.errors import CapacityError, ModelError
from tlora.job import BasePrecision, JobSpec, RunSpec
from tlora.planning.job_plan import plan_jobs
from tlora.planning.job_work import counting_jobs, trained_tokens
from tlora.planning.memory import measure, measure_in_parts, memory_limit, more_memory, possible_precisions
from tlora.planning.micro_batches import MicroBatches, choose, in_stages, largest_micro_batch
from tlora.planning.planned_job import PlannedJob
from tlora.planning.work import token_cost
from tlora.shape.memory import MemoryModel
from tlora.sharing.host_memory import Streaming
from tlora.supermodel.supermodel import SuperModel
from tlora.wording.numbers import gib, quantity


@dataclass(frozen=True)
class RunPlan:
    """All jobs, the budget of a micro-batch, how many layers are recomputed, and the memory that the run will take."""

    jobs: tuple[PlannedJob, ...]
    token_budget: int
    recompute: RecomputePlan
    memory: MemoryModel
    limit_bytes: int
    longest: int  # tokens of the longest sample of any job
    other_precisions: Mapping[BasePrecision, int]  # of a plain base: its bytes in each `base_precision` that the device has, the most first
    warnings: tuple[str, ...] = ()  # about what the jobs share
    here: frozenset[str] | None = None  # names of the jobs that begin on this device, where others begin elsewhere; None: all
    streaming: Streaming | None = None  # of a base whose layers lie in the host's memory (`streaming.py`)
    link_tokens: float = 0.0  # likewise, as of `TokenCost`
    stages: int = 1  # that a micro-batch passes through
    overhead: StageOverhead = NO_OVERHEAD  # of these, as of `in_stages`
    more_memory: str = "raise memory_limit"  # the remedy where the limit does not do

    @property
    def jobs_here(self) -> tuple[PlannedJob, ...]:
        return self.jobs if self.here is None else tuple(job for job in self.jobs if job.spec.name in self.here)

    @property
    def largest(self) -> int:
        """Tokens of the largest micro-batch: a full one, or the longest sample by itself."""
        return largest_micro_batch(self.token_budget, self.longest)

    @property
    def recomputed_layers(self) -> int:
        """Of the largest micro-batch; no other recomputes more."""
        return self.recompute.layers(self.largest)

    @property
    def recomputed_by_tokens(self) -> dict[str, int]:
        """Layers that a full micro-batch and the longest sample recompute, by their tokens, as JSON has them."""
        return {str(tokens): self.recompute.layers(tokens) for tokens in sorted({self.token_budget, self.largest})}

    @property
    def micro_batches(self) -> MicroBatches:
        return MicroBatches(self.token_budget, self.recompute)

    def total_bytes(self, layouts: list[AdapterLayout]) -> int:
        return self.memory.total_bytes(layouts, self.largest, self.recompute)

    def fits(self, layouts: list[AdapterLayout]) -> bool:
        return self.total_bytes(layouts) <= self.limit_bytes

    @property
    def residents(self) -> Sequence[PlannedJob]:
        """The first jobs here, as many as fit at once; at least one, if there is one."""
        jobs = self.jobs_here
        count = len(jobs)
        while count > 1 and not self.fits([job.layout for job in jobs[:count] if job.layout is not None]):
            count -= 1
        return jobs[:count]

    @property
    def activation_bytes(self) -> int:
        return self.memory.most_activation_bytes(self.largest, self.recompute)

    @property
    def can_run(self) -> list[JobSpec]:
        """Jobs that nothing but memory keeps from running."""
        return [job.spec for job in self.jobs if is_sound(job)]

    @property
    def resident(self) -> list[AdapterLayout]:
        """Adapters of the first jobs here that fit at once: at least one, if there is one."""
        layouts = [job.layout for job in self.jobs_here if job.layout is not None and not job.problems]
        while len(layouts) > 1 and not self.fits(layouts):
            layouts.pop()
        return layouts


def pick_device(device: str | None) -> torch.device:
    """`device`, or the GPU if there is one. Raises ModelError for one that is not there."""
    wanted = device or ("cuda" if torch.cuda.is_available() else "cpu")
    remedy = "Use cpu, or cuda where there is a GPU"
    try:
        found = torch.device(wanted)
    except RuntimeError:
        raise ModelError(f"device {wanted!r} is not known. {remedy}") from None
    try:
        torch.zeros(1, device=found)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {wanted!r} cannot be used: {str(error).splitlines()[0].rstrip('.')}. {remedy}") from None
    return found


@dataclass(frozen=True)
class PlacedJobs:
    """What a run on several devices has settled: `spans` of jobs with replicas in several places, and the jobs that are `kept_out` of this
    one, `rank`, which has too little memory for all of them.
    """

    spans: Mapping[str, ReplicaPlacement]
    kept_out: frozenset[str] = frozenset()
    rank: int = 0


def plan_run(
    run: RunSpec,
    model: SuperModel,
    base: int | MemoryModel,
    device: torch.device,
    preparation: Preparation,
    resume: bool = False,
    here: frozenset[str] | None = None,
    placed: PlacedJobs | None = None,
) -> RunPlan:
    """Tokenize all data and plan every job on `model` (meta device). What is wrong with a job is in its `problems`.

    Call it before the base is loaded: the memory that is free then is the limit. With `resume`, a job that has a checkpoint in the
    run's directory goes on from that, and the adapter that it once started from may be gone. `here`: see `RunPlan`;
    `base`, as of `plan_memory`.
    """
    jobs = plan_jobs(run, model, preparation, Path(run.output_dir) if resume else None)
    for job in jobs:
        if placed is not None:
            place_job(job, placed.spans.get(job.spec.name), placed.rank, job.spec.name in placed.kept_out)
    limit = memory_limit(device, run.memory_limit)
    return plan_memory(run, jobs, model, base, device, limit, here)


def place_job(job: PlannedJob, span: ReplicaPlacement | None, rank: int, kept_out: bool) -> None:
    """What `rank` computes of it. `kept_out`: there is too little memory for all of it, but enough for a part that `span` gives it."""
    job.span, job.longest = span, job.data.longest if job.data is not None else job.longest
    job.kept_out = kept_out
    if span is not None and (most := span.longest_on(rank)):
        job.longest, job.kept_out = min(most, job.longest), False


def take_whole(job: PlannedJob, plan: RunPlan) -> None:
    """All of a job comes here, which may have had a part of it. It gets a problem if it does not fit."""
    longest = job.longest
    place_job(job, None, 0, job.kept_out)
    if job.longest > longest:
        check_capacity(job, replace(plan, longest=max(job.longest, plan.longest)))


def plan_memory(
    run: RunSpec,
    jobs: tuple[PlannedJob, ...],
    model: SuperModel,
    base: int | MemoryModel,
    device: torch.device,
    limit: int,
    here: frozenset[str] | None = None,
    stages: int = 1,
    overhead: StageOverhead = NO_OVERHEAD,
) -> RunPlan:
    """The plan of jobs whose data is known, below `limit` bytes on `device`, of which only the kind is looked at. `base`: its bytes there,
    or, of one of `stages` with this `overhead`, what it takes.
    """
    memory = count_for(jobs, model, base, device) if isinstance(base, int) else base
    base_bytes = memory.base_bytes
    sound = [job for job in jobs if is_sound(job) and not job.kept_out]
    longest = max((job.longest for job in sound), default=1)
    warnings = _budget_warnings(run, sound, longest) + _recompute_warnings(run, memory) + _expert_warnings(model, device, sound)
    other_bytes = possible_precisions(model, base_bytes, device)
    more = more_memory(device, limit, run.memory_limit)
    plan = RunPlan(
        jobs,
        longest,
        RecomputePlan(),
        memory,
        limit,
        longest,
        other_bytes,
        warnings,
        here,
        stages=stages,
        overhead=overhead,
        more_memory=more,
    )
    return settle(run, plan, memory, device)


def count_for(jobs: Sequence[PlannedJob], model: SuperModel, base_bytes: int, device: torch.device, in_parts: bool = False) -> MemoryModel:
    """What is counted for a run of `jobs` over a base of which `base_bytes` lie on `device`. `in_parts`: it is shared or streamed."""
    rank = max((s.rank for job in jobs if job.layout for s in job.layout.linears), default=1)
    return (measure_in_parts if in_parts else measure)(model, base_bytes, device, rank, adapt_experts(jobs))


def settle(run: RunSpec, plan: RunPlan, memory: MemoryModel, device: torch.device) -> RunPlan:
    """`plan` with budget, recomputed layers and refusals as `memory` has it: what was counted before the load, or measured after it."""
    for job in plan.jobs:
        if job.too_large in job.problems:
            job.problems.remove(job.too_large)
        job.too_large = None
    plan = fit(run, plan, memory, device)
    for job in plan.jobs:
        check_capacity(job, replace(plan, longest=max(job.longest, plan.longest)) if job.kept_out else plan)
    return plan


def fit(run: RunSpec, plan: RunPlan, memory: MemoryModel, device: torch.device) -> RunPlan:
    """As `settle`, of jobs whose problems stay as they are."""
    memory = counting_jobs(memory, plan.jobs, run.deterministic)
    jobs = fitted_jobs(run, plan)
    cost = token_cost(memory, device, plan.link_tokens)
    if plan.stages > 1:
        cost = in_stages(cost, plan.stages, jobs, plan.overhead, sum(map(trained_tokens, jobs)))
    budget, recompute = choose(run, jobs, plan.longest, memory, plan.limit_bytes, cost)
    return replace(plan, memory=memory, token_budget=budget, recompute=recompute)


def fitted_jobs(run: RunSpec, plan: RunPlan) -> list[PlannedJob]:
    """The jobs to which micro-batches are fitted: those here. A deterministic run's budget follows from all, wherever they are."""
    sound = [job for job in plan.jobs if is_sound(job) and not job.kept_out]
    return sound if run.deterministic else [job for job in plan.jobs_here if is_sound(job)] or sound


def is_sound(job: PlannedJob) -> bool:
    """Whether nothing but memory keeps it from running."""
    return not job.problems or job.problems == [job.too_large]


def _recompute_warnings(run: RunSpec, memory: MemoryModel) -> tuple[str, ...]:
    if run.recompute in ("auto", "none", 0) or (run.recompute == "all" and memory.num_layers):
        return ()
    if not memory.num_layers:
        return (f"recompute {run.recompute} has no effect here: only a GPU's compiled layers can be recomputed",)
    if isinstance(run.recompute, int) and run.recompute > memory.num_layers:
        return (f"recompute {run.recompute} is {memory.num_layers}: the base has no more layers",)
    return ()


def _budget_warnings(run: RunSpec, jobs: list[PlannedJob], longest: int) -> tuple[str, ...]:
    if run.token_budget == "auto" or run.token_budget >= longest:
        return ()
    who = next(job.spec.name for job in jobs if job.longest == longest)
    return (
        f"token_budget {run.token_budget} is less than the longest sample, of {longest} tokens in {who}: a sample is never split, and a "
        "longer one is a micro-batch by itself. Lower max_length to keep the budget",
    )


def _expert_warnings(model: SuperModel, device: torch.device, jobs: list[PlannedJob]) -> tuple[str, ...]:
    names = [job.spec.name for job in jobs if adapt_experts([job])]
    if device.type != "cuda" or not names or model.experts.fit_kernels(device):
        return ()
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return (f"{listed}: experts are adapted by torch's own operations on a GPU, not by our kernels, and slower than attention alone",)


def check_capacity(job: PlannedJob, plan: RunPlan) -> None:
    """A job that does not fit by itself gets a problem that says so, with what would fit."""
    if job.layout is None or plan.fits([job.layout]):
        return
    if plan.memory.base_bytes > plan.limit_bytes:
        job.too_large = _too_large_a_base(plan)
        job.problems.append(job.too_large)
        return
    others = _what_would_fit(job.layout, plan)
    instead = f"Would fit: {'; '.join(others)}. Or lower r" if others else "Lower max_length, token_budget or r"
    recomputed = f" with {plan.recomputed_layers} of {plan.memory.num_layers} layers recomputed" if plan.memory.num_layers else ""
    error = CapacityError(
        f"job {job.spec.name!r} needs {gib(plan.total_bytes([job.layout]))}{_where(plan.memory)} (base {gib(plan.memory.base_bytes)}, "
        f"{_mailbox(plan.memory)}"
        f"adapter {gib(plan.memory.job_bytes(job.layout))}, activations of {plan.largest} tokens{recomputed} "
        f"{gib(plan.activation_bytes)}), and the limit is {gib(plan.limit_bytes)}. {instead}, or {plan.more_memory}"
    )
    job.too_large = str(error)
    job.problems.append(job.too_large)


def _what_would_fit(layout: AdapterLayout, plan: RunPlan) -> list[str]:
    """Settings under which a job of `layout` fits by itself, each with what it would need then: the mildest of each kind."""
    memory, found = plan.memory, list[str]()

    def offer(settings: str, choice: MemoryModel, budget: int, depth: int) -> bool:
        need = choice.total_bytes([layout], budget, depth)
        if need <= plan.limit_bytes:
            found.append(f"{settings} (needs {gib(need)})")
        return need <= plan.limit_bytes

    def smaller(settings: str, choice: MemoryModel, depth: int) -> bool:
        tokens = choice.most_tokens(choice.room([layout], plan.limit_bytes), depth) // 64 * 64
        lengths, budget = f"max_length: {tokens}, " if tokens < plan.longest else "", min(tokens, plan.token_budget)
        return 0 < tokens < plan.largest and offer(f"{settings}{lengths}token_budget: {budget}", choice, tokens, depth)

    all_layers = memory.num_layers if plan.recomputed_layers < memory.most_recomputed else plan.recomputed_layers
    deeper = all_layers > plan.recomputed_layers
    if deeper and not offer("recompute: all", memory, plan.largest, all_layers):
        smaller("recompute: all, ", memory, all_layers)
    smaller("", memory, plan.recomputed_layers)
    for precision, base_bytes in plan.other_precisions.items():
        held, setting = replace(memory, base_bytes=base_bytes), f"base_precision: {precision}"
        if offer(setting, held, plan.largest, plan.recomputed_layers):
            break
        if not (deeper and offer(f"{setting}, recompute: all", held, plan.largest, all_layers)):
            smaller(f"{setting}, ", held, all_layers)
    return found


def check_base_fits(plan: RunPlan) -> None:
    """Raises CapacityError for a base that cannot even be loaded."""
    if plan.memory.base_bytes > plan.limit_bytes:
        raise CapacityError(_too_large_a_base(plan))


def _too_large_a_base(plan: RunPlan) -> str:
    fitting = [(precision, count) for precision, count in plan.other_precisions.items() if count < plan.limit_bytes]
    instead = f"With base_precision: {fitting[0][0]} it has {gib(fitting[0][1])}. " if fitting else ""
    return (
        f"the base model has {gib(plan.memory.base_bytes)}{_where(plan.memory)}, and the limit is {gib(plan.limit_bytes)}. {instead}"
        f"Take a smaller base, or {plan.more_memory}"
    )


def _where(memory: MemoryModel) -> str:
    """Which stage that is, of a base in stages."""
    return f" on the stage with layers {memory.stage.first} to {memory.stage.stop - 1}" if memory.stage is not None else ""


def _mailbox(memory: MemoryModel) -> str:
    return f"gradients that other GPUs read {gib(memory.mailbox_bytes)}, " if memory.mailbox_bytes else ""


def describe_recompute(plan: RunPlan) -> str:
    """How many layers micro-batches recompute: those that samples share, and the longest sample where it is one by itself."""
    budget, layers, of = plan.token_budget, plan.recompute.layers(plan.token_budget), plan.memory.num_layers
    each = f"{'up to ' if layers and plan.recompute.varies else ''}{layers} of {of} layers recomputed"
    if plan.largest == budget:
        return each
    shared = each if layers else "no layer recomputed"
    return (
        f"{shared} in micro-batches of up to {budget:,} tokens, and {plan.recomputed_layers} of {of} in that of a sample of "
        f"{plan.longest:,} tokens by itself"
    )


def describe_plan(plan: RunPlan) -> str:
    """What the run takes, in a line."""
    memory, resident = plan.memory, plan.resident
    layers = f", {describe_recompute(plan)}" if memory.num_layers else ""
    adapters = sum(memory.job_bytes(layout) for layout in resident)
    return (
        f"token budget {plan.token_budget} (the longest sample has {plan.longest}){layers}; memory limit {gib(plan.limit_bytes)}, "
        f"predicted peak {gib(plan.total_bytes(resident))}: base {gib(memory.base_bytes)}, {_mailbox(memory)}"
        f"{quantity(len(resident), 'adapter')} at once {gib(adapters)}, activations {gib(plan.activation_bytes)} "
        f"({'measured' if memory.measured else 'counted'})"
    )


def adapt_experts(jobs: Sequence[PlannedJob]) -> ExpertJobs:
    """Whether they train experts."""
    return expert_jobs(job.adapts_experts for job in jobs)


def layouts_of(jobs: Sequence[PlannedJob]) -> list[AdapterLayout]:
    """Of the jobs that can be laid out."""
    return [job.layout for job in jobs if job.layout is not None]
