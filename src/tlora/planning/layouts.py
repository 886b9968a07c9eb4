"""Every layout of a run on given GPUs, the fastest first, by predicted seconds, and why each other is slower or not feasible. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tlora.batching.placement import Placement, place
from tlora.batching.replicas import ReplicaPlacement, part_text
from tlora.errors import CapacityError
from tlora.job import RunSpec
from tlora.planning.holders import Holders, find_holders, longest_parts
from tlora.planning.job_work import choose_replicas, trained_tokens
from tlora.planning.layout_units import Device, DoesNotFitError, OneGpu, Streamed, Unit, UnitPlan, cut_pipeline
from tlora.planning.planned_job import PlannedJob
from tlora.shape.gpu_models import link_rate
from tlora.shape.layout import FORMS, Form, Layout
from tlora.shape.memory import MOST_GPUS
from tlora.wording.numbers import are, gib

_NOT_BY_ROWS = "its layers cannot be cut into rows"
_BY_ORDER = "a mixture's layers are not compiled there, so that a run orders it: layout: "
_BY_ROOM = "the whole base leaves room for as large micro-batches, so that a run orders it: layout: streamed"
_SEEN = 0.005  # shares below it are not told of

# How many times as fast, by prediction, a form must be than the one that stands, to be taken in its place. With a shared base, or one in
# stages, a lost GPU ends the run, and a prediction is off by up to a tenth (docs/reference/layouts.md,
# docs/adr/067-what-stages-take-besides.md).
LEAST_GAIN: Mapping[Form, float] = {"whole": 1.1, "shared": 1.1, "streamed": 1.1, "stages": 1.1}


def pays(form: Form, seconds: float, standing_seconds: float) -> bool:
    """Whether a run takes `form` in place of what stands, by the predicted times of both."""
    return seconds * LEAST_GAIN[form] <= standing_seconds


@dataclass(frozen=True)
class LayoutPlan:
    """A feasible layout. `gpus`: in the order of its ranks. `unit` is the plan of the GPU or pipeline that is through last; `seconds`:
    until then. `why`: what keeps it from its GPUs' speed.
    """

    layout: Layout
    gpus: tuple[str, ...]
    unit: UnitPlan
    seconds: float
    tokens_per_second: float
    why: tuple[str, ...]


@dataclass(frozen=True)
class RefusedLayout:
    """A layout that is not feasible, and why. `least_bytes`: of a GPU with which it would be, at least; 0 where memory is not why."""

    name: str
    why: str
    least_bytes: int = 0


@dataclass(frozen=True)
class LayoutPlans:
    """`feasible`: the fastest first."""

    feasible: tuple[LayoutPlan, ...]
    refused: tuple[RefusedLayout, ...]


def is_trained(layout: Layout, gpus: int) -> bool:
    """Whether a run on so many GPUs can have it: it has one pipeline, through all of them, and streams to one GPU only."""
    return layout.gpus == gpus and (layout.form != "stages" or layout.replicas == 1)


def plan_layouts(
    run: RunSpec, jobs: Sequence[PlannedJob], devices: Sequence[Device], forms: Collection[Form] = FORMS, trained: bool = False
) -> LayoutPlans:
    """For a run of `jobs`, none of which has problems, on `devices`, in their order. `forms`: that are looked at; `trained`: of these the
    layouts alone that a run on all `devices` can have.
    """
    assert devices and not any(job.problems for job in jobs), [job.problems for job in jobs]
    if run.links == "host":
        devices = [replace(device, gpu=replace(device.gpu, peer_gb_per_second=0.0)) for device in devices]
    found = list(_tried(run, jobs, tuple(devices), forms, trained))
    feasible = [each for each in found if isinstance(each, LayoutPlan)]
    feasible.sort(key=lambda found: (-found.tokens_per_second, found.layout.gpus))  # stable: of equals the simplest form
    return LayoutPlans(tuple(feasible), tuple(each for each in found if isinstance(each, RefusedLayout)))


def _tried(
    run: RunSpec, jobs: Sequence[PlannedJob], devices: tuple[Device, ...], forms: Collection[Form] = FORMS, trained: bool = False
) -> Iterator[LayoutPlan | RefusedLayout]:
    for form, layout, units, why_not in _candidates(run, jobs, devices):
        if form not in forms or (trained and not is_trained(layout, len(devices))):
            continue
        if why_not is None and run.layout not in ("auto", form):
            why_not = f"the jobs file orders layout: {run.layout}"
        if why_not is None and form == "streamed" and run.layout != form and not _gains_from_room(run, jobs, units[0].devices[0]):
            why_not = _BY_ROOM
        if why_not is not None:
            yield RefusedLayout(str(layout), why_not)
            continue
        try:
            yield _predict(run, jobs, layout, units, len(devices))
        except DoesNotFitError as error:
            yield RefusedLayout(str(layout), str(error), error.least_bytes)


def _candidates(
    run: RunSpec, jobs: Sequence[PlannedJob], devices: tuple[Device, ...]
) -> Iterator[tuple[Form, Layout, tuple[Unit, ...], str | None]]:
    """Each layout with its units, or why there is none."""
    count, parts = len(devices), devices[0].parts
    whole = tuple(OneGpu(device, device.parts.memory.base_bytes) for device in devices)
    yield "whole", _weighted("whole", whole), whole, None
    if count > 1:
        why_not = _why_not_shared(run, devices)
        shared = () if why_not else _shared(devices)
        yield "shared", _weighted("shared", shared) if shared else Layout("shared", count), shared, why_not
    fastest = max(devices, key=lambda device: device.rate)
    why_not = _NOT_BY_ROWS if fastest.parts.streamed is None else _why_not_by_itself(run, fastest, "streamed")
    yield "streamed", Layout("streamed"), (Streamed(fastest),), why_not
    why_no_stages = _why_no_stages(run, jobs, devices)
    for stages in range(2, count + 1):
        replicas = count // stages
        if why_no_stages:
            yield "stages", Layout("stages", replicas, stages), (), why_no_stages
            continue
        if stages > len(parts.layers):
            yield "stages", Layout("stages", replicas, stages), (), f"the base has {len(parts.layers)} layers"
            continue
        pipelines = tuple(cut_pipeline(devices[first * stages : (first + 1) * stages], jobs, run.recompute) for first in range(replicas))
        yield "stages", _weighted("stages", pipelines, stages), pipelines, None


def _why_not_shared(run: RunSpec, devices: tuple[Device, ...]) -> str | None:
    apart = next((device.gpu for device in devices if not device.gpu.peer_gb_per_second), None)
    if not devices[0].parts.shared_bytes:
        return _NOT_BY_ROWS
    if why_not := _why_not_by_itself(run, devices[0], "shared"):
        return why_not
    if apart is not None and run.links == "host":
        return "the jobs file orders links: host"
    return None if apart is None else f"{apart.name}s cannot read each other's memory"


def _why_not_by_itself(run: RunSpec, device: Device, form: Form) -> str | None:
    """Of a base that no run has in that form without an order."""
    return f"{_BY_ORDER}{form}" if device.parts.in_parts is not None and run.layout != form else None


def _gains_from_room(run: RunSpec, jobs: Sequence[PlannedJob], device: Device) -> bool:
    """Whether a base that is whole on `device` would be trained faster with more room, without which no run streams it (`streaming.py`)."""
    whole = OneGpu(device, device.parts.memory.base_bytes)
    try:
        cost = whole.plan(run, jobs).cost
    except DoesNotFitError:
        return True
    return pays("streamed", replace(whole, device=replace(device, limit_bytes=1 << 60)).plan(run, jobs).cost, cost)


def _why_no_stages(run: RunSpec, jobs: Sequence[PlannedJob], devices: tuple[Device, ...]) -> str:
    """As a run in stages refuses base, jobs or GPUs."""
    kinds = dict.fromkeys(device.gpu.name for device in devices)
    if run.deterministic and len(kinds) > 1:
        return f"deterministic: {' and '.join(kinds)} give other last bits, and each job is computed by all stages"
    rows = [job.spec.name for job in jobs if job.layout is not None and any(shape.out_features == 0 for shape in job.layout.shapes)]
    if rows:
        return f"{rows[0]} trains rows of the embedding, which needs embedding and head in one place"
    if not run.deterministic and any(device.parts.takes_plain_path for device in devices):
        return "it takes the plain path on these GPUs, and stages there need the fused kernels"
    return devices[0].parts.no_stages


def _shared(devices: tuple[Device, ...]) -> tuple[OneGpu, ...]:
    """Each GPU fetches what the others hold of each layer, forwards and back, but for the last two of each direction."""
    count = len(devices)
    rate = min(link_rate(one.gpu, other.gpu) for one in devices for other in devices)

    def unit(device: Device) -> OneGpu:
        parts = device.parts
        layers = sum(parts.layer_bytes) / max(1, len(parts.layers))
        fetched = 2 * max(0, len(parts.layers) - 2) * layers * (count - 1) / count
        return OneGpu(device, parts.shared_bytes[count - 1], round(fetched), rate, in_parts=True)

    return tuple(map(unit, devices))


def _weighted(form: Form, units: Sequence[Unit], stages: int = 1) -> Layout:
    """Shares by the units' speeds; equal where these are."""
    rates = [min(device.rate for device in unit.devices) for unit in units]
    even = max(rates) <= min(rates)
    return Layout(form, len(units), stages, () if even else tuple(rate / sum(rates) for rate in rates))


def _predict(run: RunSpec, jobs: Sequence[PlannedJob], layout: Layout, units: tuple[Unit, ...], gpus: int) -> LayoutPlan:
    """Raises DoesNotFitError."""
    by_unit = [{job.spec.name: unit.seconds(job) for job in jobs} for unit in units]
    seconds, totals = by_unit[0], [sum(each.values()) for each in by_unit]
    speeds = [totals[0] / total if total else 1.0 for total in totals]
    kinds = [unit.devices[0].gpu.name for unit in units] if run.deterministic else ()  # each job then stays on one
    holders = _holders(run, jobs, units) if layout.form == "whole" else Holders()
    replicas = choose_replicas(jobs, seconds, len(units), run.deterministic)
    placement = place(seconds, len(units), replicas, speeds, holders.whole, kinds, holders.part)
    spanning = [replace(job, span=placement.spans.get(job.spec.name)) for job in jobs]
    plans: dict[tuple[int, tuple[str, ...]], UnitPlan] = {}
    ends: list[tuple[float, UnitPlan]] = []
    for number, unit in enumerate(units):
        names = {*placement.jobs[number], *placement.parts(number)}
        held = [_on(number, job) for job in spanning if number in holders.whole.get(job.spec.name, (number,)) or job.spec.name in names]
        here = held if run.deterministic else [job for job in held if job.spec.name in names] or held
        key = [other.devices for other in units].index(unit.devices), tuple(job.spec.name for job in here)  # alike units plan alike
        if key not in plans:
            plans[key] = unit.plan(run, here)
        ends.append((placement.seconds[number] * plans[key].cost, plans[key]))
    end, last = max(ends, key=lambda found: found[0])
    fullest = max((plan for _, plan in ends), key=lambda plan: plan.predicted_bytes / plan.limit_bytes)
    shown = replace(last, predicted_bytes=fullest.predicted_bytes, limit_bytes=fullest.limit_bytes)
    rate = sum(trained_tokens(job) for job in jobs) / end if end else 0.0
    names = tuple(device.gpu.name for unit in units for device in unit.devices)
    return LayoutPlan(layout, names, shown, end, rate, _why(layout, shown, placement, gpus))


def _on(number: int, job: PlannedJob) -> PlannedJob:
    """With the samples that are computed on GPU `number`."""
    most = job.span.longest_on(number) if job.span is not None else 0
    return replace(job, longest=min(most, job.longest)) if most else job


def _holders(run: RunSpec, jobs: Sequence[PlannedJob], units: Sequence[Unit]) -> Holders:
    """Of jobs for which some of the units have too little memory. None of them is kept away where one fits on none: the plan says so."""
    limits = [unit.devices[0].limit_bytes for unit in units]
    if len(set(limits)) == 1:
        return Holders()

    def refused(here: Sequence[PlannedJob], limit: int) -> tuple[PlannedJob, ...]:
        try:
            units[limits.index(limit)].plan(run, here)
        except DoesNotFitError as error:
            return error.jobs
        return ()

    def parts(job: PlannedJob, limit: int) -> Iterator[PlannedJob]:
        spanning = replace(job, span=ReplicaPlacement(max(2, job.spec.gpus), (0, 1)))
        memory = units[limits.index(limit)].devices[0].parts.memory
        return (replace(spanning, longest=longest) for longest in longest_parts(run, spanning, memory, limit))

    return find_holders(jobs, limits, refused, parts) or Holders()


def _why(layout: Layout, unit: UnitPlan, placement: Placement, gpus: int) -> tuple[str, ...]:
    """What it loses against ideal products on all GPUs."""
    found: list[str] = []
    if layout.gpus < gpus:
        found.append(f"{layout.gpus} of {gpus} GPUs {are(layout.gpus)} used")
    busy = sum(placement.seconds) / len(placement.seconds) / placement.end if placement.end else 1.0
    if busy < 1 - _SEEN:
        found.append(f"replicas compute {busy:.0%} of the time: jobs are too few or too uneven to share")
    found += [f"GPU {gpu} has {part_text(*each)}" for gpu in range(len(placement.jobs)) for each in placement.longest_samples(gpu).items()]
    if unit.bubble > _SEEN:
        found.append(f"stages wait {unit.bubble:.0%} of the time: global batches are too small to fill {layout.stages} of them")
    waits = unit.exposed_seconds - unit.bubble * unit.micro_batch_seconds
    if waits > _SEEN * unit.micro_batch_seconds:
        found.append(f"{waits / unit.micro_batch_seconds:.0%} of a micro-batch waits for the link")
    if unit.recomputed_layers:
        found.append(f"recomputed layers: {unit.recomputed_layers}")
    if unit.waiting:
        found.append(f"jobs that wait until others have left: {unit.waiting}")
    return tuple(found)


def no_layout(run: RunSpec, jobs: Sequence[PlannedJob], devices: Sequence[Device], plans: LayoutPlans) -> CapacityError:
    """Of GPUs on which no layout is feasible, what would fit: another one than is ordered, fewer bits, more GPUs, or larger ones."""
    parts, device = devices[0].parts, devices[0]
    remedies: list[str] = []
    needed = min((each for each in plans.refused if each.least_bytes), key=lambda each: each.least_bytes, default=None)

    def is_feasible(run: RunSpec, devices: Sequence[Device]) -> bool:
        return any(isinstance(each, LayoutPlan) for each in _tried(run, jobs, tuple(devices)))

    others = [each for each in ("auto", *FORMS) if each != run.layout]  # a mixture is in parts by order alone
    if other := next((each for each in others if is_feasible(run.model_copy(update={"layout": each}), devices)), None):
        remedies.append(f"layout: {other}")
    more = range(len(devices) + 1, MOST_GPUS + 1)
    if count := next((count for count in more if is_feasible(run, [device] * count)), None):
        remedies.append(f"--gpus {count}")
    limit, base_bytes = max(device.limit_bytes for device in devices), parts.memory.base_bytes
    lacking = min((each.least_bytes - limit for each in plans.refused if each.least_bytes), default=0)
    smaller = [name for name, count in parts.precision_bytes.items() if base_bytes - count >= lacking]
    if needed is not None and run.base_precision is None and smaller:  # a mixture's experts stay as they are
        remedies.append(f"base_precision: {smaller[-1]}, to try with this command")
    if needed is not None:
        remedies.append(f"GPUs on which a run may take more than {gib(needed.least_bytes)} ({needed.name})")
    reasons = "; ".join(f"{each.name}: {each.why}" for each in plans.refused)
    return CapacityError(f"no layout fits. {reasons}. Would fit: {', or '.join(remedies) or 'a smaller base'}")
