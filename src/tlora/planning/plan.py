"""From a RunSpec to jobs that can start together: budget, recomputed layers, memory. Shared by `check` and `train`; what is known of each
job by itself is in `job_plan.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from tlora.adapters.state import AdapterLayout
from tlora.batching.pack import auto_token_budget
from tlora.batching.replicas import Span
from tlora.data.order import row_tokens
from tlora.data.prepare import Preparation
from tlora.errors import CapacityError, ModelError
from tlora.job import BasePrecision, JobSpec, Recompute, RunSpec
from tlora.objectives import compares_with_start
from tlora.planning.job_plan import PlannedJob, plan_jobs
from tlora.planning.memory import MemoryModel, bytes_in, measure, memory_limit
from tlora.sharing.regions import lay_out_regions, slots_of
from tlora.supermodel.cuda_graphs import HIDES_LAUNCHES
from tlora.supermodel.held_linear import possible_precisions
from tlora.supermodel.supermodel import SuperModel

CPU_BUDGET_CAP, _GPU_BUDGET_CAP = 2048, 8192  # tokens; past them throughput is flat (docs/design.md)
# Llama-3-8B on one H200 (bench/results/h200_memory.json): recomputing all layers takes 43 % longer (with their last linear, which is left
# out now: not measured again); a micro-batch costs each layer as much
# again as 216 tokens (2,048 tokens against 8,192), which in a smaller layer are more.
_RECOMPUTE_SHARE, _FIXED_WORK = 0.43, 216 * 218e6  # the latter in tokens times weights of a layer
_MOST_SLOWED = 1.5  # rather than that, jobs take turns


@dataclass(frozen=True)
class RunPlan:
    """All jobs, the budget of a micro-batch, how many layers are recomputed, and the memory that the run will take."""

    jobs: tuple[PlannedJob, ...]
    token_budget: int
    recomputed_layers: int
    memory: MemoryModel
    limit_bytes: int
    longest: int  # tokens of the longest sample of any job
    other_precisions: Mapping[BasePrecision, int]  # of a plain base: its bytes in each `base_precision` that the device has
    warnings: tuple[str, ...] = ()  # about what the jobs share
    here: frozenset[str] | None = None  # names of the jobs that begin on this device, where others begin elsewhere; None: all

    @property
    def jobs_here(self) -> tuple[PlannedJob, ...]:
        return self.jobs if self.here is None else tuple(job for job in self.jobs if job.spec.name in self.here)

    def total_bytes(self, layouts: list[AdapterLayout]) -> int:
        return self.memory.total_bytes(layouts, self.token_budget, self.recomputed_layers)

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
        return self.memory.activation_bytes(self.token_budget, self.recomputed_layers)

    @property
    def can_run(self) -> list[JobSpec]:
        """Jobs that nothing but memory keeps from running."""
        return [job.spec for job in self.jobs if all(problem == job.too_large for problem in job.problems)]

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
    try:
        torch.zeros(1, device=wanted)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {wanted!r} cannot be used: {str(error).splitlines()[0]} Use cpu, or cuda where there is a GPU") from None
    return torch.device(wanted)


def plan_run(
    run: RunSpec,
    model: SuperModel,
    base_bytes: int,
    device: torch.device,
    preparation: Preparation,
    resume: bool = False,
    here: frozenset[str] | None = None,
    spans: Mapping[str, Span] | None = None,
) -> RunPlan:
    """Tokenize all data and plan every job on `model` (meta device). What is wrong with a job is in its `problems`.

    Call it before the base is loaded: the memory that is free then is the limit. With `resume`, a job that has a checkpoint in the
    run's directory goes on from that, and the adapter that it once started from may be gone. `here`: see `RunPlan`;
    `spans`: of jobs with replicas in several places.
    """
    jobs = plan_jobs(run, model, preparation, Path(run.output_dir) if resume else None)
    for job in jobs:
        job.span = (spans or {}).get(job.spec.name)
    limit = memory_limit(device, run.memory_limit)
    return plan_memory(run, jobs, model, base_bytes, device, limit, here)


def plan_memory(
    run: RunSpec,
    jobs: tuple[PlannedJob, ...],
    model: SuperModel,
    base_bytes: int,
    device: torch.device,
    limit: int,
    here: frozenset[str] | None = None,
) -> RunPlan:
    """The plan of jobs whose data is known, below `limit` bytes on `device`, of which only the kind is looked at."""
    rank = max((s.rank for job in jobs if job.layout for s in job.layout.shapes), default=1)
    memory = measure(model, base_bytes, device, rank)
    sound = [j for j in jobs if not j.problems or j.problems == [j.too_large]]
    longest = max((job.longest for job in sound), default=1)
    warnings = _budget_warnings(run, sound, longest) + _recompute_warnings(run, memory)
    others = possible_precisions(device, model.base.head.weight_VH.dtype) if run.base_precision is None else []
    other_bytes: dict[BasePrecision, int] = {precision: bytes_in(precision, model, base_bytes) for precision in others}
    return settle(run, RunPlan(jobs, longest, 0, memory, limit, longest, other_bytes, warnings, here), memory, device)


def settle(run: RunSpec, plan: RunPlan, memory: MemoryModel, device: torch.device) -> RunPlan:
    """`plan` with budget, recomputed layers and refusals as `memory` has it: what was counted before the load, or measured after it."""
    for job in plan.jobs:
        if job.too_large in job.problems:
            job.problems.remove(job.too_large)
        job.too_large = None
    memory = counting_jobs(memory, plan.jobs, run.deterministic)
    sound = [j for j in plan.jobs if not j.problems]
    # A deterministic run's budget follows from all of its jobs, wherever they are.
    fitted = sound if run.deterministic else [j for j in plan.jobs_here if not j.problems] or sound
    budget, recomputed = fit(run, fitted, plan, memory, device)
    plan = replace(plan, memory=memory, token_budget=budget, recomputed_layers=recomputed)
    for job in plan.jobs:
        check_capacity(job, plan)
    return plan


def counting_jobs(memory: MemoryModel, jobs: Sequence[PlannedJob], deterministic: bool) -> MemoryModel:
    """`memory` for a run of `jobs`: with the references that they bring, and their replicas. The mailbox is that of the jobs that span
    ranks. In a deterministic run the token budget must not follow from that: it is counted as with the fewest ranks that need one, for all
    jobs of several replicas, beside one another.
    """
    layouts = {job.spec.name: job.layout for job in jobs if job.layout is not None and job.replicas > 1}
    sizes = {name: layout.numel for name, layout in layouts.items()}
    if deterministic:
        counted = [job for job in jobs if job.spec.name in sizes and not job.problems]
        mailbox = memory.sum_bytes * sum(slots_of(-(-job.replicas // 2)) * sizes[job.spec.name] for job in counted)
    else:
        spans = {job.spec.name: job.span for job in jobs if job.spec.name in sizes and job.span is not None}
        _, mailbox = lay_out_regions(spans, sizes, memory.sum_bytes)
    compared = frozenset(job.layout for job in jobs if job.layout is not None and compares_with_start(job.spec))
    return replace(memory, spanning=frozenset(layouts.values()), compared=compared, mailbox_bytes=mailbox)


def fit(run: RunSpec, jobs: Sequence[PlannedJob], plan: RunPlan, memory: MemoryModel, device: torch.device) -> tuple[int, int]:
    """Token budget and recomputed layers: the fastest that hold all jobs at once, if that does not slow them down too much; or else
    the fastest that hold the largest of the jobs that can be held at all.
    """
    budgets, depths = _budgets(run, jobs, plan.longest, memory, device), _depths(run, memory)
    choices = sorted(product(budgets, depths), key=lambda choice: token_cost(*choice, memory))
    layouts = [job.layout for job in jobs if job.layout is not None]

    def fits(which: list[AdapterLayout], choice: tuple[int, int]) -> bool:
        return memory.total_bytes(which, *choice) <= plan.limit_bytes

    worst = _MOST_SLOWED * token_cost(*choices[0], memory)
    together = (choice for choice in choices if token_cost(*choice, memory) <= worst and fits(layouts, choice))
    leanest = budgets[-1], depths[-1]
    largest = max((layout for layout in layouts if fits([layout], leanest)), key=memory.job_bytes, default=None)
    alone = (choice for choice in choices if largest is not None and fits([largest], choice))
    return next(together, None) or next(alone, leanest)


def token_cost(budget: int, depth: int, memory: MemoryModel) -> float:
    """Time per token in micro-batches of `budget` tokens with `depth` layers recomputed; 1 where both are ideal."""
    fixed = 1 + _FIXED_WORK / max(memory.layer_weights, 1) / budget
    return fixed * (1 + _RECOMPUTE_SHARE * depth / max(memory.num_layers, 1))


def _budgets(run: RunSpec, jobs: Sequence[PlannedJob], longest: int, memory: MemoryModel, device: torch.device) -> list[int]:
    """What the user set (but the longest sample must fit), or the largest that the jobs can fill and the device gains from, and
    halves of it.
    """
    if run.token_budget != "auto":
        return [max(run.token_budget, longest)]
    batches = [_replica_batch(job) for job in jobs if job.data]
    offered, spreads = [mean for mean, _ in batches], [spread for _, spread in batches]
    cap = _GPU_BUDGET_CAP if device.type == "cuda" else CPU_BUDGET_CAP
    filled = min(sum(offered), cap) * memory.layer_weights < HIDES_LAUNCHES
    budgets = [auto_token_budget(longest, offered, cap, filled=filled, spreads=spreads)]
    while budgets[-1] // 2 >= longest:
        budgets.append(budgets[-1] // 2)
    return budgets


def _replica_batch(job: PlannedJob) -> tuple[float, float]:
    """Mean and standard deviation of the tokens of one replica's part of a global batch, which is drawn without replacement."""
    assert job.data is not None
    tokens = row_tokens(job.data.train.lengths, job.data.train.epoch)
    rows = min(job.spec.batch_size, len(tokens)) / job.replicas
    return float(tokens.mean()) * rows, float(tokens.std()) * math.sqrt(rows * (1 - rows / len(tokens)))


def _depths(run: RunSpec, memory: MemoryModel) -> Sequence[int]:
    """Numbers of recomputed layers to choose from, the fewest first."""
    fixed = fixed_depth(run.recompute, memory.num_layers)
    return range(memory.most_recomputed + 1) if fixed is None else [fixed]


def fixed_depth(recompute: Recompute, num_layers: int) -> int | None:
    """Layers that `recompute` orders to be recomputed; None for "auto"."""
    if recompute == "auto":
        return None
    return {"none": 0, "all": num_layers}[recompute] if isinstance(recompute, str) else min(recompute, num_layers)


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
        f"token_budget {run.token_budget} is raised to {longest}: {who} has a sample of so many tokens, and a sample is never split. "
        "Lower its max_length to keep the budget",
    )


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
        f"job {job.spec.name!r} needs {gib(plan.total_bytes([job.layout]))} (base {gib(plan.memory.base_bytes)}, {_mailbox(plan.memory)}"
        f"adapter {gib(plan.memory.job_bytes(job.layout))}, activations of {plan.token_budget} tokens{recomputed} "
        f"{gib(plan.activation_bytes)}), and the limit is {gib(plan.limit_bytes)}. {instead}, or raise memory_limit"
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
        tokens = choice.most_tokens(layout, depth, plan.limit_bytes) // 64 * 64
        lengths = f"max_length: {tokens}, " if tokens < plan.longest else ""
        return 0 < tokens < plan.token_budget and offer(f"{settings}{lengths}token_budget: {tokens}", choice, tokens, depth)

    all_layers = memory.num_layers if plan.recomputed_layers < memory.most_recomputed else plan.recomputed_layers
    deeper = all_layers > plan.recomputed_layers
    if deeper and not offer("recompute: all", memory, plan.token_budget, all_layers):
        smaller("recompute: all, ", memory, all_layers)
    smaller("", memory, plan.recomputed_layers)
    for precision, base_bytes in plan.other_precisions.items():
        held, setting = replace(memory, base_bytes=base_bytes), f"base_precision: {precision}"
        if offer(setting, held, plan.token_budget, plan.recomputed_layers):
            break
        if not (deeper and offer(f"{setting}, recompute: all", held, plan.token_budget, all_layers)):
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
        f"the base model has {gib(plan.memory.base_bytes)}, and the limit is {gib(plan.limit_bytes)}. {instead}"
        "Take a smaller base, or raise memory_limit"
    )


def gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"


def _mailbox(memory: MemoryModel) -> str:
    return f"gradients that other GPUs read {gib(memory.mailbox_bytes)}, " if memory.mailbox_bytes else ""


def describe_plan(plan: RunPlan) -> str:
    """What the run takes, in a line."""
    memory, resident = plan.memory, plan.resident
    layers = f", {plan.recomputed_layers} of {memory.num_layers} layers recomputed" if memory.num_layers else ""
    adapters = sum(memory.job_bytes(layout) for layout in resident)
    return (
        f"token budget {plan.token_budget} (the longest sample has {plan.longest}){layers}; memory limit {gib(plan.limit_bytes)}, "
        f"predicted peak {gib(plan.total_bytes(resident))}: base {gib(memory.base_bytes)}, {_mailbox(memory)}"
        f"{len(resident)} adapters at once {gib(adapters)}, activations {gib(plan.activation_bytes)} "
        f"({'measured' if memory.measured else 'counted'})"
    )
