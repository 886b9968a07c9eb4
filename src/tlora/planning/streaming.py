"""Whether the base of a run in one process is streamed from the host's memory (`layout`), with how many layers on the device, and how fast.

Micro-batches, recomputed layers and layers on the device are chosen together, by the predicted time per token: a larger micro-batch hides
a slower link. Several GPUs hold a base in parts instead (`base_placement.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from tlora.errors import CapacityError, ModelError
from tlora.job import DataConfig, JobSpec, LayoutSetting, RunSpec
from tlora.planning.layouts import pays
from tlora.planning.memory import bytes_when_streamed
from tlora.planning.micro_batches import cost_of, sample_lengths
from tlora.planning.plan import RunPlan, count_for, fit, fitted_jobs, is_sound, plan_memory, settle
from tlora.planning.planned_job import PlannedJob
from tlora.planning.slots import FASTER_PRODUCTS, MOST_FILLED, choose_slots
from tlora.planning.work import rate_here, rate_of, token_cost
from tlora.shape.memory import StreamedBytes, must_share
from tlora.shape.token_cost import StreamCost, fetched_layers
from tlora.shape.work import TrainingRate
from tlora.sharing.host_memory import Streaming, host_problem
from tlora.sharing.link_speed import measure_link
from tlora.supermodel.inject import expert_modules
from tlora.supermodel.multiply_adds import timed_weights
from tlora.supermodel.supermodel import SuperModel
from tlora.wording.numbers import gib
from tlora.worker_protocol import Load

_JOBS_TO_COME, _TOKENS_TO_COME = 4, 8192  # what a worker keeps room for: jobs of the default rank, in micro-batches of so many tokens


@dataclass(frozen=True)
class Machine:
    """What streaming depends on. `link`: bytes a second from the host's memory, asked for once and only where it matters. `elsewhere`: in
    another machine, whose host's memory is not known.
    """

    link: Callable[[], float]
    rate: TrainingRate = field(default_factory=TrainingRate)
    elsewhere: bool = False


def this_machine(device: torch.device, layout: LayoutSetting) -> Machine:
    """The link is measured when it is asked for, as others may use it now."""
    return Machine(partial(measure_link, device, layout == "streamed"), rate_here(device))


@dataclass(frozen=True)
class StreamPlan:
    """`why` is for a person, `sizes` what lies where. `link`: bytes a second. `token_seconds`: of products without recomputation, in large
    micro-batches.
    """

    streaming: Streaming
    why: str
    sizes: StreamedBytes
    link: float
    token_seconds: float

    def cost(self, plan: RunPlan, device: torch.device) -> StreamCost:
        """Of a full micro-batch of `plan`."""
        tokens, cost = plan.token_budget, token_cost(plan.memory, device)
        each = cost.products(tokens, plan.recompute.layers(tokens)) if plan.memory.num_layers else 1.0
        return StreamCost(_fetched_bytes(self.sizes, self.streaming.slots), self.link, tokens * self.token_seconds * each)

    def describe(self, cost: StreamCost) -> str:
        """In a line. Seconds of products are predicted, as `tlora check` does."""
        slots = f"{self.streaming.slots} of {self.sizes.num_layers} layers at a time on the device"
        link = f"the link brings {cost.link_bytes_per_second / 1e9:.1f} GB/s"
        return (
            f"streamed from the host's memory ({gib(self.sizes.host_bytes)} there, {slots}): {self.why}; {link}, {cost.link_seconds:.2f} s "
            f"for the {gib(cost.fetched_bytes)} of a full micro-batch, whose products take {cost.product_seconds:.2f} s (predicted): "
            f"{cost.exposed_seconds:.2f} s exposed"
        )


def stream_for_jobs_to_come(load: Load, model: SuperModel, device: torch.device, limit_bytes: int) -> StreamPlan | None:
    """Whether a worker streams its base, whose jobs it does not know yet: as `choose_layout` for jobs that are made up, if its scheduler
    may count on it (`must_share`). It has two layers on the device at a time, for jobs that come need the rest. Raises CapacityError,
    ModelError.
    """
    if load.layout != "streamed" and (device.type != "cuda" or not must_share(model.base.num_bytes, limit_bytes)):
        return None
    specs = [JobSpec(name=f"to-come-{i}", data=DataConfig(path="-")) for i in range(_JOBS_TO_COME)]
    run = RunSpec(base_model=load.base_model, jobs=specs, layout=load.layout, recompute=load.recompute, memory_limit=load.memory_limit)
    jobs = tuple(PlannedJob(spec, longest=_TOKENS_TO_COME, layout=model.layout(spec)) for spec in specs)
    plan = plan_memory(run, jobs, model, model.base.num_bytes, device, limit_bytes)
    return choose_layout(run, plan, model, device, this_machine(device, load.layout), 2)[1]


def choose_layout(
    run: RunSpec, plan: RunPlan, model: SuperModel, device: torch.device, machine: Machine, most_slots: int | None = None
) -> tuple[RunPlan, StreamPlan | None]:
    """`plan`, of the whole base on the device, or the plan of a streamed one: as `layout` orders, else on a GPU where the base does not
    fit, or leaves too little to some job, or so little to micro-batches that it is clearly faster streamed. `model` is on the meta device.
    `most_slots`: layers that may be on the device; None: as many as serve best.

    Raises CapacityError where the base fits in no form, because of the device's memory or the host's, and ModelError for one that cannot
    be streamed and must be.
    """
    if run.layout == "whole":
        return plan, None
    whole_fits, ordered = plan.memory.base_bytes <= plan.limit_bytes, run.layout == "streamed"
    if not ordered and (device.type != "cuda" or expert_modules(model.model)):
        return plan, None
    if not ordered and whole_fits and not _refused(plan) and not _gains_from_room(run, plan, device):
        return plan, None
    try:
        sizes = bytes_when_streamed(model, model.base.num_bytes, device)
    except ModelError:
        if ordered or not whole_fits:
            raise
        return plan, None
    if sizes.on_device(2) > plan.limit_bytes:
        raise CapacityError(_too_small(plan, sizes.on_device(2)))
    problem = None if machine.elsewhere else host_problem(sizes.host_bytes)
    if problem is not None and not ordered and whole_fits:
        return plan, None
    if problem is not None:
        too_large = f"the base model has {gib(plan.memory.base_bytes)}, and the limit is {gib(plan.limit_bytes)}; "
        raise CapacityError(problem if ordered else too_large + problem)
    try:
        link = machine.link()
    except CapacityError:  # the host pins no memory
        if ordered or not whole_fits:
            raise
        return plan, None
    if expert_modules(model.model):
        plan = replace(plan, memory=count_for(plan.jobs, model, plan.memory.base_bytes, device, in_parts=True))
    token_seconds = 2 * timed_weights(model, device.type, adapts_experts=True) / rate_of(model, device, machine.rate)
    most = 2 if device.type != "cuda" or (ordered and whole_fits) else max(2, sizes.num_layers - 1)
    streamed = _fastest(run, plan, sizes, device, token_seconds * link / FASTER_PRODUCTS, min(most, most_slots or most))
    why = "the jobs file orders it" if ordered else _why_streamed(run, plan, streamed, device)
    if why is None:
        return plan, None
    assert streamed.streaming is not None, why
    return settle(run, streamed, streamed.memory, device), StreamPlan(streamed.streaming, why, sizes, link, token_seconds)


def _gains_from_room(run: RunSpec, plan: RunPlan, device: torch.device) -> bool:
    """Whether a streamed base, which takes nearly no room, could be faster at all."""
    roomy = fit(run, replace(plan, limit_bytes=1 << 60), plan.memory, device)
    return pays("streamed", _cost(run, roomy, device), _cost(run, plan, device))


def _why_streamed(run: RunSpec, whole: RunPlan, streamed: RunPlan, device: torch.device) -> str | None:
    """None where the whole base had better be on the device."""
    if whole.memory.base_bytes > whole.limit_bytes:
        return f"the base has {gib(whole.memory.base_bytes)}, and the limit is {gib(whole.limit_bytes)}"
    refused, still = _refused(whole), _refused(streamed)
    if len(still) < len(refused):
        return f"with the whole base on the device {refused[0]} does not fit"
    cost, standing = _cost(run, streamed, device), _cost(run, whole, device)
    if refused or not pays("streamed", cost, standing):
        return None
    gain = standing / cost
    return f"{gain:.2f} times as fast, by prediction, as with the whole base on the device, which leaves little room for micro-batches"


def _fastest(run: RunSpec, plan: RunPlan, sizes: StreamedBytes, device: torch.device, bytes_per_token: float, most: int) -> RunPlan:
    """The plan with as many layers on the device as serve best, from two to `most`. `bytes_per_token`: what the link brings while products
    of one token run.
    """
    found = choose_slots(
        most,
        lambda slots: _with_slots(run, plan, sizes, device, slots, bytes_per_token) if sizes.on_device(slots) <= plan.limit_bytes else None,
        lambda each: (len(_refused(each)), _waiting(each)),
        lambda each: _cost(run, each, device),
    )
    assert found is not None, "two layers fit"
    return found


def _with_slots(run: RunSpec, plan: RunPlan, sizes: StreamedBytes, device: torch.device, slots: int, bytes_per_token: float) -> RunPlan:
    """Jobs' problems stay as they are."""
    memory = replace(plan.memory, base_bytes=sizes.on_device(slots), measured=False)
    link_tokens = _fetched_bytes(sizes, slots) / bytes_per_token if bytes_per_token else 0.0
    streamed = replace(plan, streaming=Streaming(slots, run.layout == "streamed"), link_tokens=link_tokens, other_precisions={})
    filled = int(MOST_FILLED * plan.limit_bytes) if slots > 2 else plan.limit_bytes
    return replace(fit(run, replace(streamed, limit_bytes=filled), memory, device), limit_bytes=plan.limit_bytes)


def _fetched_bytes(sizes: StreamedBytes, slots: int) -> int:
    return fetched_layers(sizes.num_layers, slots) * sizes.layer_bytes


def _cost(run: RunSpec, plan: RunPlan, device: torch.device) -> float:
    """Time per token of its jobs, in that of ideal products."""
    return cost_of(plan.micro_batches, sample_lengths(fitted_jobs(run, plan)), token_cost(plan.memory, device, plan.link_tokens))


def _refused(plan: RunPlan) -> list[str]:
    """Names of the jobs that memory alone keeps from running."""
    return [job.spec.name for job in plan.jobs if is_sound(job) and job.layout is not None and not plan.fits([job.layout])]


def _waiting(plan: RunPlan) -> int:
    """Jobs that wait until others have left."""
    return len(plan.jobs_here) - len(plan.residents)


def _too_small(whole: RunPlan, streamed_bytes: int) -> str:
    """The device has no room for two layers."""
    fitting = [precision for precision, count in whole.other_precisions.items() if count < whole.limit_bytes]
    packed = f"base_precision: {fitting[0]}, " if fitting else ""
    return (
        f"the base model has {gib(whole.memory.base_bytes)}, and the limit is {gib(whole.limit_bytes)}. Streamed from the host's memory it "
        f"needs {gib(streamed_bytes)} on the device, for two layers and what is in no layer. "
        f"Take {packed}a smaller base, or {whole.more_memory}"
    )
