"""What computes one replica in a layout, a GPU or a pipeline of stages: its memory, its micro-batches and its seconds. No torch.

Bytes are `shape.memory`'s, seconds `job_work`'s and `shape.token_cost`'s, micro-batches `micro_batches`', as for `tlora check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tlora.adapters.layout import AdapterLayout
from tlora.batching.pipeline_model import StageOverhead
from tlora.batching.recompute_plan import RecomputePlan
from tlora.job import Recompute, RunSpec
from tlora.planning.job_work import counting_jobs, multiply_adds, trained_tokens
from tlora.planning.micro_batches import (
    MicroBatches,
    choose,
    cost_of,
    in_stages,
    largest_micro_batch,
    sample_lengths,
)
from tlora.planning.planned_job import PlannedJob
from tlora.planning.slots import FASTER_PRODUCTS, MOST_FILLED, choose_slots
from tlora.shape.base_parts import BaseParts, fitting
from tlora.shape.gpu_models import GpuModel, link_rate
from tlora.shape.memory import MemoryModel
from tlora.shape.stages import LATENCY_SECONDS, cut_layers
from tlora.shape.token_cost import LAUNCH_SECONDS, StreamCost, TokenCost, fetched_layers, token_cost_on
from tlora.wording.numbers import gib


@dataclass(frozen=True)
class Device:
    """A GPU, with what the base takes on one such."""

    gpu: GpuModel
    parts: BaseParts
    limit_bytes: int

    @property
    def rate(self) -> float:
        """Multiply-adds a second."""
        return self.gpu.rate.multiply_adds_per_second("cuda", self.parts.in_8_bits)

    @property
    def token_seconds(self) -> float:
        """Of products of a token without recomputation, in large micro-batches, through the whole base."""
        return 2 * self.parts.timed_weights / self.rate

    def cost(self, memory: MemoryModel, link_tokens: float = 0.0) -> TokenCost:
        return token_cost_on("cuda", self.gpu.smallest_rows, memory, link_tokens, self.gpu.fixed_work)


@dataclass(frozen=True)
class UnitPlan:
    """Of jobs on one unit. `cost`: their time over that of ideal products. Of a full micro-batch: its tokens, recomputed layers (of all
    stages), seconds, and those of these that the unit waits, for a link or for work; `bubble`: for work. `predicted_bytes`: of the fullest
    GPU for its limit.
    """

    token_budget: int
    recomputed_layers: int
    cost: float
    micro_batch_seconds: float
    exposed_seconds: float
    predicted_bytes: int
    limit_bytes: int
    waiting: int = 0
    bubble: float = 0.0
    layers: tuple[int, ...] = ()  # of each stage
    slots: int = 0  # layers on the device, of a base that is streamed


class DoesNotFitError(Exception):
    """A layout that is not feasible, and why. `least_bytes`: of a GPU with which it would be, at least. `jobs`: for which there is too
    little memory, where the base fits.
    """

    def __init__(self, why: str, least_bytes: int, jobs: Sequence[PlannedJob] = ()) -> None:
        super().__init__(why)
        self.least_bytes, self.jobs = least_bytes, tuple(jobs)


class Unit(Protocol):
    """`devices`: in the order of its stages."""

    @property
    def devices(self) -> tuple[Device, ...]: ...
    def seconds(self, job: PlannedJob) -> float:
        """Of the job with ideal products."""
        ...

    def plan(self, run: RunSpec, jobs: Sequence[PlannedJob]) -> UnitPlan:
        """Raises DoesNotFitError."""
        ...


@dataclass(frozen=True)
class OneGpu:
    """`base_bytes` of the base lie on it; the rest is brought for each micro-batch, `fetched_bytes` at `link_rate` a second. `in_parts`:
    whether the base is shared or streamed.
    """

    device: Device
    base_bytes: int
    fetched_bytes: int = 0
    link_rate: float = 1.0
    in_parts: bool = False

    @property
    def devices(self) -> tuple[Device, ...]:
        return (self.device,)

    def seconds(self, job: PlannedJob) -> float:
        parts = self.device.parts
        weights = parts.timed_weights_of(0, len(parts.layers), job.adapts_experts)
        return multiply_adds(job, weights, parts.width) / self.device.rate

    def plan(self, run: RunSpec, jobs: Sequence[PlannedJob], filled: float = 1.0) -> UnitPlan:
        """`filled`: share of the limit that micro-batches are chosen with."""
        parts = self.device.parts
        memory = replace((parts.in_parts if self.in_parts else None) or parts.memory, base_bytes=self.base_bytes)
        link_tokens = self.fetched_bytes / (self.device.token_seconds * self.link_rate / FASTER_PRODUCTS)
        cost = self.device.cost(memory, link_tokens)
        fitted = _fit(run, jobs, memory, self.device, cost, filled)
        tokens, layers = fitted.micro.token_budget, fitted.micro.recompute.layers(fitted.micro.token_budget)
        stream = StreamCost(self.fetched_bytes, self.link_rate, tokens * self.device.token_seconds * cost.products(tokens, layers))
        own = cost_of(fitted.micro, sample_lengths(jobs), cost)
        return UnitPlan(
            *(tokens, layers, own, stream.seconds, stream.exposed_seconds),
            *(fitted.predicted_bytes, self.device.limit_bytes, fitted.waiting),
        )


@dataclass(frozen=True)
class Streamed:
    """One GPU to which layers come from the host's memory, with as many of them on it as serve best."""

    device: Device

    @property
    def devices(self) -> tuple[Device, ...]:
        return (self.device,)

    def seconds(self, job: PlannedJob) -> float:
        return OneGpu(self.device, 0).seconds(job)

    def plan(self, run: RunSpec, jobs: Sequence[PlannedJob]) -> UnitPlan:
        sizes, device = self.device.parts.streamed, self.device
        assert sizes is not None, device.gpu.name
        if sizes.on_device(2) > device.limit_bytes:
            least = sizes.on_device(2)
            what = f"two layers of {gib(sizes.layer_bytes)} and what is in no layer take {gib(least)}"
            raise DoesNotFitError(f"{what}, and the limit is {gib(device.limit_bytes)}", least)

        def with_slots(slots: int) -> UnitPlan | DoesNotFitError | None:
            if sizes.on_device(slots) > device.limit_bytes:
                return None
            fetched = fetched_layers(sizes.num_layers, slots) * sizes.layer_bytes
            unit = OneGpu(device, sizes.on_device(slots), fetched, device.gpu.link_gb_per_second * 1e9, in_parts=True)
            try:
                return replace(unit.plan(run, jobs, MOST_FILLED if slots > 2 else 1.0), slots=slots)
            except DoesNotFitError as error:
                return error

        ordered = (
            run.layout == "streamed" and device.parts.memory.base_bytes <= device.limit_bytes
        )  # to leave room, so with few layers there
        found = choose_slots(
            2 if ordered else max(2, sizes.num_layers - 1),
            with_slots,
            lambda each: (isinstance(each, DoesNotFitError), each.waiting if isinstance(each, UnitPlan) else 0),
            lambda each: each.cost if isinstance(each, UnitPlan) else 1.0,
        )
        if isinstance(found, UnitPlan):
            return found
        assert found is not None, "two layers fit"
        raise found


@dataclass(frozen=True)
class Pipeline:
    """Stages on `devices`: layers `cuts[s]` on the s-th."""

    devices: tuple[Device, ...]
    cuts: tuple[tuple[int, int], ...]

    def seconds(self, job: PlannedJob) -> float:
        """Of its slowest stage."""
        return max(self._stage_seconds(job, stage) for stage in range(len(self.cuts)))

    def _stage_seconds(self, job: PlannedJob, stage: int) -> float:
        (first, end), device = self.cuts[stage], self.devices[stage]
        return multiply_adds(job, self._weights(stage, job.adapts_experts), (end - first) * device.parts.hidden_size) / device.rate

    def _weights(self, stage: int, adapts_experts: bool = True) -> int:
        """Of its linears, with what their features take."""
        (first, end), parts = self.cuts[stage], self.devices[stage].parts
        return parts.timed_weights_of(first, end, adapts_experts)

    def plan(self, run: RunSpec, jobs: Sequence[PlannedJob]) -> UnitPlan:
        """All stages take micro-batches of the one that has the least room."""
        count = len(self.cuts)
        fits: list[tuple[_Fitted, TokenCost, Sequence[PlannedJob]]] = []
        pipelines, overhead, tokens = dict[float, TokenCost](), self.overhead(), sum(map(trained_tokens, jobs))
        # pipelines: by what each token costs besides: all stages of alike layers share one
        for stage, ((first, end), device) in enumerate(zip(self.cuts, self.devices, strict=True)):
            memory = device.parts.stage_memory(first, end, stage, count, _reads_peers(self.devices))
            here = [within(job, device.parts, first, end) for job in jobs]
            cost = device.cost(memory)
            modelled = pipelines.setdefault(cost.fixed_tokens, in_stages(cost, count, jobs, overhead, tokens))
            cost = replace(cost, pipeline=modelled.pipeline)
            try:
                fits.append((_fit(run, here, memory, device, cost), cost, here))
            except DoesNotFitError as error:
                where = f"stage {stage} (layers {first} to {end - 1} on {device.gpu.name})"
                raise DoesNotFitError(f"{where}: {error}", error.least_bytes) from None
        budget = min(fitted.micro.token_budget for fitted, _, _ in fits)
        lengths, ideal, slowest, products, recomputed = sample_lengths(jobs), 0.0, 0.0, 0.0, 0
        for stage, (fitted, cost, _) in enumerate(fits):
            own = sum(self._stage_seconds(job, stage) for job in jobs)
            ideal = max(ideal, own)
            slowest = max(slowest, own * cost_of(MicroBatches(budget, fitted.micro.recompute), lengths, cost))
            layers = fitted.micro.recompute.layers(budget)
            recomputed += layers
            products = max(products, budget * 2 * self._weights(stage) / self.devices[stage].rate * cost.products(budget, layers))
        bubble = fits[0][1].bubble(budget)
        turn = (products + budget * self._copy_seconds() * (2 if count == 2 else 4)) / (1 - bubble)
        fullest = max(fits, key=lambda found: found[0].predicted_bytes / found[0].limit_bytes)[0]
        return UnitPlan(
            *(budget, recomputed, slowest / ideal if ideal else 1.0),
            *(turn, turn - products, fullest.predicted_bytes, fullest.limit_bytes, max(fitted.waiting for fitted, _, _ in fits)),
            bubble=bubble,
            layers=tuple(end - first for first, end in self.cuts),
        )

    def overhead(self) -> StageOverhead:
        """Of `in_stages`: a token's ideal products through the whole base take as long as all stages at the slowest one's speed."""
        count = len(self.cuts)
        token = count * max(2 * self._weights(stage) / device.rate for stage, device in enumerate(self.devices))
        graphs = self.devices[0].parts.memory.num_layers > 0  # else nothing is compiled
        launch = LAUNCH_SECONDS * max(end - first for first, end in self.cuts) if graphs else 0.0
        return StageOverhead(self._copy_seconds() / token, LATENCY_SECONDS / token, launch / token, host_ahead=True)

    def _copy_seconds(self) -> float:
        """Of a token's hidden states, or their gradient, at one end of the slowest boundary."""
        between = zip(self.devices, self.devices[1:], strict=False)
        rate = min(link_rate(left.gpu, right.gpu) for left, right in between)
        parts = self.devices[0].parts
        return parts.hidden_size * parts.memory.element_bytes / rate


def within(job: PlannedJob, parts: BaseParts, first: int, end: int) -> PlannedJob:
    """With its adapter's linears in the decoder layers from `first` up to `end` only; those in no layer are the last one's."""
    assert job.layout is not None, job.spec.name
    last = len(parts.layers) - 1
    places = ((shape, parts.layer_of(shape.module)) for shape in job.layout.shapes)
    kept = tuple(shape for shape, layer in places if first <= (last if layer is None else layer) < end)
    return replace(job, layout=AdapterLayout(kept))


def _reads_peers(devices: Sequence[Device]) -> bool:
    return all(device.gpu.peer_gb_per_second for device in devices)


def cut_pipeline(devices: tuple[Device, ...], jobs: Sequence[PlannedJob], recompute: Recompute = "auto") -> Pipeline:
    """Layers cut by the predicted seconds of all `jobs`, of weights alone, without features, as the engine cuts them, and by memory."""
    parts = devices[0].parts
    each = {weights: sum(multiply_adds(job, weights, parts.hidden_size) for job in jobs) for weights in set(parts.layer_weights)}
    head = sum(multiply_adds(job, parts.head_weights, 0) for job in jobs)
    adapter = max((job.layout.numel for job in jobs if job.layout is not None), default=0)
    longest = max((job.longest for job in jobs), default=1)
    limits = [device.limit_bytes for device in devices]
    cuts = cut_layers(
        [each[weights] for weights in parts.layer_weights],
        head,
        [device.rate for device in devices],
        *fitting([each.parts for each in devices], limits, adapter, longest, recompute, _reads_peers(devices)),
    )
    return Pipeline(devices, cuts)


@dataclass(frozen=True)
class _Fitted:
    micro: MicroBatches
    predicted_bytes: int
    limit_bytes: int
    waiting: int


def _fit(run: RunSpec, jobs: Sequence[PlannedJob], memory: MemoryModel, device: Device, cost: TokenCost, filled: float = 1.0) -> _Fitted:
    """Micro-batches of `jobs` on a GPU, and what it takes with as many of them as fit at once. Raises DoesNotFitError."""
    limit = device.limit_bytes
    if memory.base_bytes > limit:
        raise DoesNotFitError(f"{gib(memory.base_bytes)} of the base, and the limit is {gib(limit)}", memory.base_bytes)
    memory = counting_jobs(memory, jobs, run.deterministic)
    longest = max((job.longest for job in jobs), default=1)
    micro = choose(run, jobs, longest, memory, int(filled * limit), cost)
    largest = largest_micro_batch(micro.token_budget, longest)
    layouts = [job.layout for job in jobs if job.layout is not None]
    needed = [(job, memory.total_bytes([job.layout], largest, micro.recompute)) for job in jobs if job.layout is not None]
    if refused := [each for each in needed if each[1] > limit]:
        first, least = refused[0]
        raise DoesNotFitError(_too_large(first, memory, largest, micro.recompute, least, limit), least, [job for job, _ in refused])
    held = len(layouts)
    while held > 1 and memory.total_bytes(layouts[:held], largest, micro.recompute) > limit:
        held -= 1
    return _Fitted(micro, memory.total_bytes(layouts[:held], largest, micro.recompute), limit, len(layouts) - held)


def _too_large(job: PlannedJob, memory: MemoryModel, largest: int, recompute: RecomputePlan, needed: int, limit: int) -> str:
    recomputed = f" with {recompute.layers(largest)} of {memory.num_layers} layers recomputed" if memory.num_layers else ""
    return f"job {job.spec.name!r} needs {gib(needed)} for micro-batches of {largest:,} tokens{recomputed}, and the limit is {gib(limit)}"
