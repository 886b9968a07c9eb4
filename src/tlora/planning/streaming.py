"""Whether the base of a run in one process is streamed from the host's memory (`layout`), with how many layers on the device, and how fast.

Several GPUs hold a base in parts instead (`form.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tlora.costs.streaming import StreamCost, fetched_layers
from tlora.errors import CapacityError
from tlora.job import RunSpec
from tlora.planning.memory import StreamedBytes, bytes_when_streamed
from tlora.planning.micro_batches import token_cost
from tlora.planning.plan import RunPlan, gib, plan_memory, settle
from tlora.planning.work import multiplied_weights, rate_of
from tlora.sharing.host_memory import Streaming, host_problem
from tlora.supermodel.inject import expert_modules
from tlora.supermodel.supermodel import SuperModel

_MOST_FILLED = 0.95  # of the memory limit, by slots beyond two: what the run measures may be some hundredths more than was counted


@dataclass(frozen=True)
class StreamPlan:
    """`why` is for a person, `sizes` what lies where."""

    streaming: Streaming
    why: str
    sizes: StreamedBytes

    def cost(self, plan: RunPlan, model: SuperModel, device: torch.device, link: float, flops: float | None = None) -> StreamCost:
        """Of a full micro-batch of `plan`. `link`: bytes a second. `flops` as of `predicted_seconds`."""
        seconds = 2 * plan.token_budget * multiplied_weights(model) / rate_of(device, flops)
        if plan.memory.num_layers:
            seconds *= token_cost(plan.token_budget, plan.recompute.layers(plan.token_budget), plan.memory)
        fetched = fetched_layers(self.sizes.num_layers, self.streaming.slots) * self.sizes.layer_bytes
        return StreamCost(fetched, link, seconds)

    def describe(self, cost: StreamCost) -> str:
        """In a line. Seconds of products are predicted, as `tlora check` does."""
        slots = f"{self.streaming.slots} of {self.sizes.num_layers} layers at a time on the device"
        link = f"the link brings {cost.link_bytes_per_second / 1e9:.1f} GB/s"
        return (
            f"streamed from the host's memory ({gib(self.sizes.host_bytes)} there, {slots}): {self.why}; {link}, {cost.link_seconds:.2f} s "
            f"for the {gib(cost.fetched_bytes)} of a full micro-batch, whose products take {cost.product_seconds:.2f} s (predicted): "
            f"{cost.exposed_seconds:.2f} s exposed"
        )


def choose_layout(
    run: RunSpec, plan: RunPlan, model: SuperModel, base_bytes: int, device: torch.device, elsewhere: bool = False
) -> tuple[RunPlan, StreamPlan | None]:
    """`plan`, of the whole base on the device, or the plan of a streamed one: as `layout` orders, else on a GPU where the base does not fit
    or leaves too little to some job. `model` is on the meta device. `elsewhere`: in another machine, whose host's memory is not known.

    Raises CapacityError where the base fits in no form, because of the device's memory or the host's.
    """
    whole_fits, refused = plan.memory.base_bytes <= plan.limit_bytes, _refused(plan)
    ordered = run.layout == "streamed"
    if not ordered and (device.type != "cuda" or (whole_fits and not refused) or expert_modules(model.model)):
        return plan, None
    sizes = bytes_when_streamed(model, base_bytes, device)
    streamed = _plan_streamed(run, plan, model, sizes, 2, device)
    if streamed.memory.base_bytes > plan.limit_bytes:
        raise CapacityError(_too_small(plan, streamed))
    if ordered:
        if not elsewhere and (problem := host_problem(sizes.host_bytes)):
            raise CapacityError(problem)
        return streamed, StreamPlan(streamed.streaming or Streaming(), "the jobs file orders it", sizes)
    if whole_fits and len(_refused(streamed)) >= len(refused):
        return _plan_whole(run, plan, model, base_bytes, device), None
    problem = None if elsewhere else host_problem(sizes.host_bytes)
    if problem and whole_fits:
        return _plan_whole(run, plan, model, base_bytes, device), None
    if problem:
        raise CapacityError(f"the base model has {gib(base_bytes)}, and the limit is {gib(plan.limit_bytes)}; {problem}")
    slots = _slots(streamed, sizes)
    if slots > 2:
        streamed = _plan_streamed(run, plan, model, sizes, slots, device)
    if not whole_fits:
        why = f"the base has {gib(base_bytes)}, and the limit is {gib(plan.limit_bytes)}"
    else:
        why = f"with the whole base on the device {refused[0]} does not fit"
    return streamed, StreamPlan(Streaming(slots), why, sizes)


def _plan_whole(run: RunSpec, plan: RunPlan, model: SuperModel, base_bytes: int, device: torch.device) -> RunPlan:
    """Once more, as jobs' problems are those of the last plan that was made."""
    return plan_memory(run, plan.jobs, model, base_bytes, device, plan.limit_bytes, plan.here)


def _plan_streamed(run: RunSpec, plan: RunPlan, model: SuperModel, sizes: StreamedBytes, slots: int, device: torch.device) -> RunPlan:
    found = plan_memory(run, plan.jobs, model, sizes.on_device(slots), device, plan.limit_bytes, plan.here)
    return settle(run, replace(found, streaming=Streaming(slots), other_precisions={}), found.memory, device)


def _slots(plan: RunPlan, sizes: StreamedBytes) -> int:
    """Layers that find room beside all jobs that are resident with two: what stays is not fetched again. Two where jobs wait."""
    resident = plan.residents
    if len(resident) < len(plan.jobs_here):
        return 2
    spare = _MOST_FILLED * plan.limit_bytes - plan.total_bytes([job.layout for job in resident if job.layout is not None])
    return max(2, min(sizes.num_layers, 2 + int(spare // sizes.layer_bytes)))


def _refused(plan: RunPlan) -> list[str]:
    return [job.spec.name for job in plan.jobs if job.too_large in job.problems]


def _too_small(whole: RunPlan, streamed: RunPlan) -> str:
    """The device has no room for two layers."""
    fitting = [precision for precision, count in whole.other_precisions.items() if count < whole.limit_bytes]
    packed = f"base_precision: {fitting[0]}, " if fitting else ""
    return (
        f"the base model has {gib(whole.memory.base_bytes)}, and the limit is {gib(whole.limit_bytes)}. Streamed from the host's memory it "
        f"needs {gib(streamed.memory.base_bytes)} on the device, for two layers and what is in no layer. "
        f"Take {packed}a smaller base, or raise memory_limit"
    )
