"""What a simulation is given: trace, cluster, policy, load, seed, constants, conditions; and the jobs and costs that follow."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Literal, get_args

from pydantic import TypeAdapter, ValidationError

from tlora.byte_size import Bytes
from tlora.errors import ConfigError, DataError
from tlora.file_identity import FileIdentity, identity_of
from tlora.jobs_file.spelling import suggest
from tlora.protocol import BaseAdded
from tlora.scheduler.admission import why_never
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.settings import Settings
from tlora.scheduler.state import ClusterState
from tlora.shape import GPU_SHARE
from tlora.shape.cost import BaseConstants, CostModel
from tlora.shape.gpu_models import find_gpu
from tlora.shape.hardware import LIVE_GPU, cost_model, load_constants, nearest_of
from tlora.shape.predicted_constants import live_stage_rates
from tlora.sim.arrivals import at_load, compressed, first, natural_load, only, span_seconds
from tlora.sim.conditions import Conditions
from tlora.sim.machines import ClusterShape, Machines
from tlora.sim.mapping import BASES, RULES, SHAPES, DrawRules, MappedJob, logged_jobs, mapped_jobs
from tlora.sim.stages import asking_for_stages, memory_found, staged_memory
from tlora.sim.trace import SHIPPED, end_of, find_trace, is_directory, is_event_log, read_event_log, read_trace
from tlora.version import __version__
from tlora.wording.numbers import are, gib, quantity

SimulatedLayout = Literal["auto", "stages"]
LAYOUTS: tuple[SimulatedLayout, ...] = get_args(SimulatedLayout)
KERNELS = ("tlora", "peft", "trl")  # ours, and without the kernels' gain: PEFT at its best, and as TRL runs it, packed
NO_BOUND = 1e6  # a slowdown that no job ever has, for delta = inf: needs are divided by it, and infinity would make them 0
CONSTANTS = tuple(f.name for f in fields(BaseConstants) if f.name != "source")
MOST_GPUS = 1_000_000
_STATES_NAMED = 5
_CARD = "h200"  # that all sets of constants are of
_NODES = re.compile(r"(\d{1,7})x(\d{1,7})")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Equal ones give equal simulations, wall time apart.

    `load` None: arrivals as recorded. `jobs`: only so many, the first. `delta`: every job's bound on its slowdown, instead of its own.
    `kappa`: saturated tokens/s of our kernels over PEFT's, instead of the measured. `scale`: factors on constants of all kernels.
    `layout`: where bases lie, whole on each GPU ("auto") or in stages; `memory_limit`: bytes of a GPU that may be planned for, fewer than
    it has. `paper`: ranks and batches drawn as the reference draws them; `mixed`: jobs as recipes have them, over four bases. `closed`:
    all jobs are submitted at once, ignoring the trace's times.
    """

    trace: str = "ee9e8c"
    policy: str = "residual_capacity"
    kernels: str = "tlora"
    nodes: int = 16
    gpus_per_node: int = 8
    gpu: str = "h200"
    load: float | None = None
    jobs: int | None = None
    seed: int = 0
    delta: float | None = None
    kappa: float | None = None
    scale: tuple[tuple[str, float], ...] = ()
    paper: bool = False
    mixed: bool = False
    closed: bool = False
    layout: SimulatedLayout = "auto"
    memory_limit: int | None = None
    conditions: Conditions = field(default_factory=Conditions)

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Scene:
    """The jobs to replay, what was done to get them, and what of the trace does not count as it reads.

    `load` is the share of the GPUs that the jobs ask for by their recorded times; jobs that the cluster will reject do not count.
    """

    trace: str
    jobs: list[MappedJob]
    load: float
    notes: dict[str, object]
    warnings: list[str]


def contender(text: str, kernels: str) -> tuple[str, str]:
    """The policy and its kernels: those behind a slash, or else `kernels`. Raises ConfigError for what there is not."""
    name, slash, behind = text.partition("/")
    if name not in POLICIES:
        raise ConfigError(f"policy {name!r}: there is no such policy; {suggest(name, POLICIES)}")
    if slash and behind not in KERNELS:
        raise ConfigError(f"policy {text!r}: there are no kernels {behind!r}; {suggest(behind, KERNELS)}")
    return name, behind or kernels


def layout_named(text: str) -> SimulatedLayout:
    """Raises ConfigError for a layout that is not simulated."""
    known: dict[str, SimulatedLayout] = {layout: layout for layout in LAYOUTS}
    if text not in known:
        raise ConfigError(f"layout {text!r}: bases are simulated whole on each GPU (auto) or in stages; {suggest(text, LAYOUTS)}")
    return known[text]


def memory_of(text: str | None) -> int | None:
    """Bytes, from "24GiB". Raises ConfigError."""
    if text is None:
        return None
    try:
        return TypeAdapter[int](Bytes).validate_python(text)
    except ValidationError:
        raise ConfigError(f"memory limit {text!r}: is no number of bytes. Write such as 24GiB") from None


def check_names(scenario: Scenario) -> None:
    """Raises ConfigError for a trace, type of GPU or kernels that there are not, with the one that was probably meant."""
    try:
        find_trace(scenario.trace)
    except DataError:
        if is_directory(scenario.trace):
            raise ConfigError(f"trace {scenario.trace!r}: is a directory. Give a file in it, such as a cluster's events.jsonl") from None
        raise ConfigError(
            f"trace {scenario.trace!r}: there is neither such a file nor such a shipped trace; {suggest(scenario.trace, SHIPPED)}"
        ) from None
    for what, name, known in (("gpu", scenario.gpu, load_constants()), ("kernels", scenario.kernels, KERNELS)):
        if name not in known:
            raise ConfigError(f"{what} {name!r}: there are no constants of it; {suggest(name, known)}")


def read_nodes(text: str) -> tuple[int, int]:
    """Nodes, and GPUs of each, from "16x8"."""
    matched = _NODES.fullmatch(text.strip().lower())
    if matched is None or not 0 < int(matched[1]) * int(matched[2]) <= MOST_GPUS:
        raise ConfigError(f"nodes {text!r}: write their number, an x, and the GPUs of each, such as 16x8; at most {MOST_GPUS:,} GPUs")
    return int(matched[1]), int(matched[2])


def num_nodes(gpus: int, gpus_per_node: int) -> int:
    """How many nodes have `gpus` GPUs between them. Raises ConfigError where that is no whole number."""
    if gpus > MOST_GPUS:
        raise ConfigError(f"{gpus:,} GPUs are too many to simulate. Give at most {MOST_GPUS:,}")
    if gpus < 1 or gpus % gpus_per_node:
        raise ConfigError(
            f"{quantity(gpus, 'GPU is', 'GPUs are')} no whole number of nodes of {gpus_per_node}. "
            f"Give a multiple of {gpus_per_node}, or other nodes (16x8)"
        )
    return gpus // gpus_per_node


def cost_of(scenario: Scenario, kernels: str) -> CostModel:
    """What the cluster's bases cost under `kernels`, with the scenario's changes to the constants."""
    bases = _like(scenario, kernels)
    cost = _with_layout(scenario, cost_model(scenario.gpu, kernels, bases, dict(scenario.scale)), bases)
    if scenario.kappa is None or kernels != "tlora":
        return cost
    plain = cost_of(scenario, "peft").constants
    assumed = CostModel(
        {
            name: replace(
                constants,
                tokens_per_second=scenario.kappa * plain[name].tokens_per_second,
                source={**constants.source, "tokens_per_second": f"assumed: {scenario.kappa:g} times that of PEFT"},
            )
            for name, constants in cost.constants.items()
            if name in plain
        },
        stage_rates=cost.stage_rates,
    )
    assumed.memory = {name: memory for name, memory in cost.memory.items() if name in plain}
    return assumed


def _with_layout(scenario: Scenario, cost: CostModel, like: Mapping[str, str]) -> CostModel:
    """With the memory limit, and bases in stages where that is ordered. `like`: the base with constants that each costs as. Stages send
    through the host's memory: GPUs that read each other's have no use for them.
    """
    constants, limit = cost.constants, scenario.memory_limit
    if limit is not None:
        told = f"memory limit of {gib(limit)}"
        for name, own in constants.items():
            if limit > own.gpu_bytes * GPU_SHARE:
                raise ConfigError(f"memory limit {gib(limit)}: a run may use {gib(own.gpu_bytes * GPU_SHARE)} of a GPU. Give less")
            constants[name] = replace(own, gpu_bytes=limit / GPU_SHARE, source={**own.source, "gpu_bytes": told})
    if scenario.layout != "stages":
        return CostModel(constants) if limit is not None else cost
    staged = CostModel(constants, stage_rates=live_stage_rates(find_gpu(_CARD), "host"))
    staged.memory = {
        name: staged_memory(SHAPES[like[name]], own.base_bytes, own.activation_bytes_per_token) for name, own in constants.items()
    }
    return staged


def _asking(scenario: Scenario, jobs: list[MappedJob]) -> list[MappedJob]:
    """What the jobs ask for where bases lie in stages; by our kernels, whose constants all bases have."""
    if scenario.layout != "stages":
        return jobs
    shapes = {name: SHAPES[base] for name, base in _like(scenario, "tlora").items()}
    return asking_for_stages(jobs, cost_of(scenario, "tlora"), scenario.num_gpus, shapes)


def _like(scenario: Scenario, kernels: str) -> dict[str, str]:
    """By base, the one whose constants it has."""
    measured = load_constants().get(scenario.gpu, {}).get(kernels, {})
    bases = {name: name for name in measured} | BASES
    if measured:
        bases |= {name: nearest_of(measured, size) for name, size in _logged_bases(scenario).items() if name not in bases}
    return bases


def _logged_bases(scenario: Scenario) -> dict[str, int]:
    """The bytes of the bases that an event log names; none of a table."""
    if scenario.trace in SHIPPED:
        return {}
    path = find_trace(scenario.trace)[1]
    return _bases_in(str(path), identity_of(path.stat()))


@functools.lru_cache(maxsize=8)
def _bases_in(path: str, _: FileIdentity) -> dict[str, int]:
    """The file is read once for all the policies of a command."""
    if not is_event_log(path):
        return {}
    return {item.base_model: item.base_bytes for _, item in read_event_log(path) if isinstance(item, BaseAdded) and item.base_bytes > 0}


def scene_of(scenario: Scenario) -> Scene:
    """Reads the trace and makes its rows jobs. Raises DataError and ConfigError."""
    if scenario.closed:
        return _closed(scenario)
    anchor = cost_of(replace(scenario, layout="auto"), "peft")
    if scenario.trace not in SHIPPED and is_event_log(scenario.trace):
        return _logged_scene(scenario, anchor)
    trace = read_trace(scenario.trace)
    if scenario.jobs is not None:
        trace = first(trace, scenario.jobs)
    rules = _rules_of(scenario, anchor)
    jobs = _asking(scenario, mapped_jobs(trace, anchor, scenario.seed, scenario.gpus_per_node, rules))
    rejected, warnings = _rejected(scenario, jobs)
    admitted = only(trace, {job.job_id for job in trace.jobs} - set(rejected)) if rejected else trace
    if scenario.load is not None:
        trace = at_load(trace, scenario.num_gpus, scenario.load, admitted)
        jobs = [replace(job, submit_seconds=row.submit_seconds) for job, row in zip(jobs, trace.jobs, strict=True)]
        admitted = compressed(admitted, trace.compression)
    notes: dict[str, object] = {"arrivals": _arrivals(trace.compression)}
    if trace.filters:
        notes["filters"] = "; ".join(trace.filters)
    for reason, count in trace.skipped.items():
        notes[f"rows left out: {reason}"] = count
    load = natural_load(admitted, scenario.num_gpus) if span_seconds(admitted) else math.inf
    unknown = Counter(row.state for row in trace.jobs if end_of(row.state) == "unknown")
    if unknown:
        named = ", ".join(f"{state!r} ({count:,})" for state, count in unknown.most_common(_STATES_NAMED))
        warnings.append(
            f"{quantity(unknown.total(), 'job')} ended in a state that is not known ({named}); they run, and no completion time "
            "counts them. "
            "Known are COMPLETED, CANCELLED, FAILED and others (docs/reference/simulator.md)"
        )
    return Scene(trace.name, _with_delta(jobs, scenario.delta), load, notes, warnings)


def _rules_of(scenario: Scenario, anchor: CostModel) -> DrawRules:
    if scenario.paper and scenario.mixed:
        raise ConfigError("--paper and --mixed both say what is drawn for a job. Leave one out")
    rules = RULES["paper" if scenario.paper else "mixed" if scenario.mixed else "default"]
    unknown = [base for base, _ in rules.bases if base not in anchor.constants]
    if unknown:
        raise ConfigError(f"gpu {scenario.gpu!r} has no constants of {unknown[0]}, which --mixed draws. Add --gpu {LIVE_GPU}")
    return rules


def _closed(scenario: Scenario) -> Scene:
    """The same jobs, all there from the first second: a load without end."""
    if scenario.load is not None:
        raise ConfigError(f"load {scenario.load:g}: with --closed all jobs are submitted at once, so that there is no load. Leave one out")
    scene = scene_of(replace(scenario, closed=False))
    jobs = [replace(job, submit_seconds=0.0) for job in scene.jobs]
    return replace(scene, jobs=jobs, load=math.inf, notes=scene.notes | {"arrivals": "all at once"})


def inputs_digest(scenario: Scenario) -> str:
    """A short name of what the scenario does not say itself: the contents of its trace, the constants of its GPU, what our policy is tuned
    to, and the program's version. With others it is another name.
    """
    digest = blake2b(find_trace(scenario.trace)[1].read_bytes(), digest_size=6)
    digest.update(repr((__version__, Settings())).encode())
    for kernels in KERNELS:
        for base, constants in sorted(load_constants().get(scenario.gpu, {}).get(kernels, {}).items()):
            digest.update(repr((kernels, base, [getattr(constants, name) for name in CONSTANTS])).encode())
    return digest.hexdigest()


def _logged_scene(scenario: Scenario, anchor: CostModel) -> Scene:
    if scenario.load is not None:
        raise ConfigError(f"load {scenario.load:g}: {scenario.trace} is an event log, which is replayed as it happened. Leave the load out")
    name, path = find_trace(scenario.trace)
    jobs = _asking(scenario, logged_jobs(read_event_log(path), anchor, scenario.gpus_per_node)[: scenario.jobs])
    if not jobs:
        raise ConfigError(f"{path}: no job was submitted in this event log. Give one with jobs")
    rejected, warnings = _rejected(scenario, jobs)
    constants = load_constants().get(scenario.gpu, {}).get("tlora", {})
    for base, size in _logged_bases(scenario).items():
        if base not in (*constants, *BASES) and any(job.job.base_model == base for job in jobs):
            like = nearest_of(constants, size)
            size_text = f"{size / 1e9:.3g} GB"
            warnings.append(f"{base!r} ({size_text}) has no constants on {scenario.gpu}: it costs what {like} does, the nearest in size")
    if scenario.layout == "auto" and (parted := sum(job.job.least_gpus > 1 for job in jobs)):
        warnings.append(
            f"{quantity(parted, 'job')} asked for several GPUs to hold a base in parts, and {are(parted)} simulated with all of it on "
            "each. For stages give --layout stages, and as --memory-limit what a run might use of those GPUs"
        )
    admitted = [job for job in jobs if job.job.job_id not in rejected]
    span = admitted[-1].submit_seconds - admitted[0].submit_seconds
    asked = math.fsum(job.job.gpus * job.replayed_seconds for job in admitted)
    load = asked / span / scenario.num_gpus if span else math.inf
    return Scene(name, _with_delta(jobs, scenario.delta), load, {"arrivals": "as in the event log"}, warnings)


def _rejected(scenario: Scenario, jobs: list[MappedJob]) -> tuple[dict[str, str], list[str]]:
    """By job, why neither set of kernels lets it run on this cluster; and the warning that follows. Raises ConfigError if it is all."""
    shape = ClusterShape(scenario.nodes, scenario.gpus_per_node)
    rejected = rejections(jobs, shape, [cost_of(scenario, kernels) for kernels in ("peft", "tlora")])
    warning = warning_of(rejected, jobs)
    return rejected, [warning] if warning else []


def _arrivals(compression: float) -> str:
    if compression == 1:
        return "as recorded"
    return f"compressed {compression:.4g} times" if compression > 1 else f"stretched {1 / compression:.4g} times"


def _with_delta(jobs: list[MappedJob], delta: float | None) -> list[MappedJob]:
    if delta is None:
        return jobs
    return [replace(job, job=replace(job.job, max_slowdown=min(delta, NO_BOUND))) for job in jobs]


def rejections(jobs: Sequence[MappedJob], shape: ClusterShape, costs: Sequence[CostModel]) -> dict[str, str]:
    """By job, why the scheduler rejects it: the reason under the last of `costs`. A job that one of them admits is not here."""
    reason_by_job: dict[str, str] = {}
    states = [_empty_cluster(shape, cost) for cost in costs]
    for job in jobs:
        reasons = [why_never(state, job.job) for state in states]
        if all(reasons):
            reason_by_job[job.job.job_id] = str(reasons[-1])
    return reason_by_job


def warning_of(rejected: dict[str, str], jobs: Sequence[MappedJob]) -> str:
    """One line on the rejected jobs; empty without any. Raises ConfigError if every job is rejected."""
    if not rejected:
        return ""
    name, reason = next(iter(rejected.items()))
    if len(rejected) == len(jobs):
        raise ConfigError(
            f"no job of this trace can run on this cluster. {name!r}, the first, is rejected: {reason}; or simulate other GPUs (--gpus, "
            "--nodes, --memory-limit)"
        )
    asked = {job.job.job_id: job.job.gpus * job.recorded_seconds for job in jobs}
    total = sum(asked.values())
    share = f", {sum(asked[name] for name in rejected) / total:.1%} of the GPU time asked for," if total else ""
    return (
        f"{len(rejected):,} of {len(jobs):,} jobs{share} can never run on this cluster and are rejected; load counts the others only. "
        f"{name!r}, the first: {reason}"
    )


def _empty_cluster(shape: ClusterShape, cost: CostModel) -> ClusterState:
    state = ClusterState(cost)
    for node in Machines(shape, Conditions()).added():
        state.add_node(node.node, node.rack, node.gpus)
    if (told := memory_found(cost, shape.num_gpus)) is not None:
        state.find_memory(told.gpus, told.memory_bytes)
    return state
