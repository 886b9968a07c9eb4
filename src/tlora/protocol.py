"""Events of a cluster and actions in answer to them: two unions of frozen dataclasses, their JSON forms, and the values in them.

A scheduler folds events into its state and answers with actions; back ends (local, simulated) carry out actions and report events. Times
are seconds on the back end's clock and are passed with an event, not in it.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from tlora.json_file import value_of

DEFAULT_MAX_SLOWDOWN = 1.5


@dataclass(frozen=True, slots=True)
class JobProfile:
    """A job's data and adapter as a scheduler needs to know them before it runs; computed once where the data are read.

    `tokens_per_step` is the mean over the job's optimizer steps, `steps` their number. `length_histogram[k]` counts samples of
    2^k to 2^(k+1) - 1 tokens. `adapter_parameters` are those that are trained.
    """

    tokens_per_step: float
    steps: int
    longest_sample_tokens: int
    adapter_parameters: int
    length_histogram: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """How a group runs: `data_parallel` replicas (one per GPU), and the tokens of one micro-batch over all of them together.

    `recomputed_layers`: that such a micro-batch is predicted to recompute. Its workers count what each needs where they are.
    """

    data_parallel: int
    token_budget: int
    recomputed_layers: int = 0


@dataclass(frozen=True, slots=True)
class JobGroup:
    """Jobs that share one super-model on `gpus` under `plan`. `weights` are the jobs' shares of its capacity, in their order.

    A group without jobs is one that shall end.
    """

    group_id: str
    base_model: str
    gpus: tuple[int, ...]
    plan: ParallelPlan
    job_ids: tuple[str, ...]
    weights: tuple[float, ...]

    def on(self, gpus: tuple[int, ...]) -> JobGroup:
        """The same group on other GPUs, with as many tokens on each."""
        budget = self.plan.token_budget * len(gpus) // len(self.gpus)
        return replace(self, gpus=gpus, plan=replace(self.plan, data_parallel=len(gpus), token_budget=budget))

    def without(self, job_id: str) -> JobGroup:
        """The group with one member less; without jobs it is one that shall end."""
        left = [(name, weight) for name, weight in zip(self.job_ids, self.weights, strict=True) if name != job_id]
        return replace(self, job_ids=tuple([name for name, _ in left]), weights=tuple([weight for _, weight in left]))


@dataclass(frozen=True, slots=True)
class BaseSpeed:
    """How fast a base is on one GPU, with the meaning of `shape.cost.BaseConstants`."""

    tokens_per_second: float
    launch_seconds: float
    floor_seconds: float
    member_seconds: float


# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeAdded:
    """A node with its GPUs has come. GPU numbers are unique in the cluster."""

    node: str
    gpus: tuple[int, ...]
    rack: str = ""


@dataclass(frozen=True, slots=True)
class GpusLost:
    """GPUs, or whole nodes with them, are lost, and so are groups on them; their jobs wait again, from their last checkpoint."""

    gpus: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NodeDraining:
    """A node is to be left: nothing starts there any more, and its GPUs go as they come free. Its groups are stopped and their jobs go on
    elsewhere from their checkpoints; with `finish` they train to their end there. `NodeAdded` takes it back.
    """

    node: str
    finish: bool = False


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """`gpus` is what the job would get by itself: its alone speed, and so its slowdown, is counted on these.

    `max_slowdown` bounds the time between its optimizer steps, as a multiple of that alone. `priority` orders those that wait, the
    highest first; `deadline` is a time on the back end's clock by which it wishes to be done. `submitted_at`: when it was submitted, if
    that was to an earlier controller. `least_gpus`: with fewer its base does not fit. `on_one_host`: nor on GPUs of several, as its parts
    are shared there; else a base of which one GPU holds a part alone is in stages, wherever these are.
    """

    job_id: str
    base_model: str
    gpus: int
    profile: JobProfile
    tenant: str = ""
    priority: float = 0.0
    deadline: float | None = None
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN
    submitted_at: float | None = None
    least_gpus: int = 1
    on_one_host: bool = False


@dataclass(frozen=True, slots=True)
class GpusAsked:
    """A job that waits, or trains and will wait again, asks for so many GPUs then: the rest of its replicas take turns, or its base needs
    so many of the GPUs that there are. `least_gpus`, `on_one_host`: as `JobSubmitted` has them, by these GPUs; None: as before.

    The host that has come or gone is told of after the last of them; or a Tick follows, where an engine can bring others than before.
    """

    job_id: str
    gpus: int
    least_gpus: int | None = None
    on_one_host: bool | None = None

    def change(self, order: JobSubmitted) -> JobSubmitted:
        """The job as it asks from now on."""
        least = order.least_gpus if self.least_gpus is None else self.least_gpus
        return replace(
            order, gpus=self.gpus, least_gpus=least, on_one_host=order.on_one_host if self.on_one_host is None else self.on_one_host
        )


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a user asks of a job after its submission. One that is held is paused: it checkpoints, leaves its group and gets no GPU until it
    is released, and then waits for GPUs again.
    """

    job_id: str
    verb: Literal["cancel", "hold", "release"]


@dataclass(frozen=True, slots=True)
class StepsDone:
    """`steps` optimizer steps of a job are through since its submission; the latest took `step_seconds` each, waiting included."""

    job_id: str
    group_id: str
    steps: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class JobFinished:
    job_id: str


@dataclass(frozen=True, slots=True)
class JobFailed:
    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class GroupReady:
    """A group that was started, or whose GPUs or members were changed, runs as wanted."""

    group_id: str


@dataclass(frozen=True, slots=True)
class GroupFound:
    """A group of an earlier controller runs as `group`, with `jobs`, which are submitted by this. It is taken over as it is. `steps`: those
    of each of the group's jobs so far, in its order.

    After the last of them a `Tick` follows: a decision before it could claim the GPUs of a group that is not reported yet.
    """

    group: JobGroup
    jobs: tuple[JobSubmitted, ...]
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupLost:
    """A group ended by itself; its jobs wait again."""

    group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class GroupKept:
    """A group that was given more GPUs runs on without them, on `gpus`: there it could not begin, for `reason`."""

    group_id: str
    gpus: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class BaseAdded:
    """Jobs may ask for a base whose weights take so many bytes. A scheduler has been given its costs before: a log says it for those who
    replay it.
    """

    base_model: str
    base_bytes: int


@dataclass(frozen=True, slots=True)
class BaseMeasured:
    """A worker has measured a base on this cluster's GPUs (`device` names them): replaces what was assumed before."""

    base_model: str
    device: str
    speed: BaseSpeed


@dataclass(frozen=True, slots=True)
class MemoryFound:
    """How many bytes may be planned for on each of these GPUs, in their order: as the driver tells of them at first, then what a worker
    has found free.
    """

    gpus: tuple[int, ...]
    memory_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KindsFound:
    """What each of these GPUs is, in their order, as its driver calls it, and the speed of training there against an H200."""

    gpus: tuple[int, ...]
    kinds: tuple[str, ...]
    speeds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class GpusUnheard:
    """Nothing is heard of the workers on these GPUs, whose jobs stay with them until their end is proven, and which get no other meanwhile;
    `why` is words for those who wait for them, and "" when somebody is heard there again.
    """

    gpus: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class JobDelayed:
    """A job of a group does not go on until its next steps are done; `why`: what it waits for, in words for its owner."""

    job_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: decisions that depend on it may change."""


Event = (
    NodeAdded
    | GpusLost
    | NodeDraining
    | JobSubmitted
    | GpusAsked
    | JobRequest
    | StepsDone
    | JobFinished
    | JobFailed
    | GroupReady
    | GroupFound
    | GroupLost
    | GroupKept
    | BaseAdded
    | BaseMeasured
    | MemoryFound
    | KindsFound
    | GpusUnheard
    | JobDelayed
    | Tick
)


# -- actions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Load the base on the group's GPUs and let its jobs join, each from its checkpoint if it has one."""

    group: JobGroup


@dataclass(frozen=True, slots=True)
class ChangeGroup:
    """Make a running group what is given: members that are new join, those that are missing checkpoint and leave, GPUs and plan change."""

    group: JobGroup


@dataclass(frozen=True, slots=True)
class StopGroup:
    """Checkpoint and release the jobs that are left; free the GPUs."""

    group_id: str


@dataclass(frozen=True, slots=True)
class RejectJob:
    """The job can never run here, for `reason`."""

    job_id: str
    reason: str


Action = StartGroup | ChangeGroup | StopGroup | RejectJob

_EARLIER = {"JobCancelled": "cancel", "JobHeld": "hold", "JobReleased": "release"}  # types in older logs
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (*typing.get_args(Event), *typing.get_args(Action))}


def to_json(item: Event | Action) -> dict[str, Any]:
    """A dict for `json.dumps`, with the name of the type under "type"."""
    return {"type": type(item).__name__, **asdict(item)}


def from_json(found: Mapping[str, Any]) -> Event | Action:
    """The inverse of `to_json`. Unknown types and fields, and values of another type, raise ValueError."""
    if (verb := _EARLIER.get(str(found.get("type")))) is not None:
        found = {**found, "type": JobRequest.__name__, "verb": verb}
    kind = _KINDS.get(str(found.get("type")))
    if kind is None:
        raise ValueError(f"unknown event or action {found.get('type')!r}; known are {', '.join(_KINDS)}")
    values = {key: value for key, value in found.items() if key != "type"}
    return cast("Event | Action", value_of(kind, values, strict=True))
