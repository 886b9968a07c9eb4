"""Messages between a worker and its controller, protocol 2: one JSON object a line over a socket that the worker opens.

A worker sends `Hello`: its identity and its state. The controller answers with `Want`: the whole desired state; the latest counts, and a
lost one does no harm. The worker sends numbered reports (`Said`), again until they are `Taken`. `link/` carries the lines; their
consequences are decided elsewhere. The parsers refuse any other line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from pydantic import Field, TypeAdapter
from pydantic_core import PydanticSerializationError, to_json

from tlora.job import BasePrecision, DType, JobSpec, Layout, MemoryLimit, Recompute, TrackerName, UnusedWeights
from tlora.protocol import BaseSpeed, JobGroup

PROTOCOL = 2
REFUSED = 2  # exit status of a worker that its controller has refused, or that found none


@dataclass(frozen=True, slots=True)
class Load:
    """Load `base_model` on `device`. `output_dir` gets a directory per job.

    `started_unix_seconds` is where the clock of the jobs' metrics begins, so that a job's rows go on when it moves. The other fields are
    those of a jobs file (`RunSpec`). `memory_limit`, by default what is free there, lowers a group's token budget, and a job that cannot
    fit below it fails. `layout` is of a worker with one GPU; several hold a base in parts where they must. With `calibrate` the worker
    tells what the base costs here (`Measured`).
    """

    base_model: str
    output_dir: str
    device: str
    started_unix_seconds: float
    deterministic: bool = False
    dtype: DType = "auto"
    base_precision: BasePrecision | None = None
    layout: Layout = "auto"
    unused_weights: UnusedWeights = "refuse"
    recompute: Recompute = "auto"
    memory_limit: MemoryLimit = "auto"
    report_to: tuple[TrackerName, ...] = ()
    calibrate: bool = False


@dataclass(frozen=True, slots=True)
class Join:
    """A job that shall be in, from its newest whole checkpoint in `output_dir` if it has one. `train_set` and `eval_set` are directories of
    its tokenized data, as the job's profile named them; without them, or when they are gone, the data is prepared again.

    `attempt` grows with each hand-over of the job, over all workers and controllers. One that has left a worker never joins it again.
    `tokens_per_step`, where it is known, says on how many GPUs of a worker the job is worth computing.
    """

    job: JobSpec
    train_set: str | None = None
    eval_set: str | None = None
    attempt: int = 0
    tokens_per_step: float | None = None


# -- controller to worker ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Want:
    """All that a worker shall have: the base, the plan and weights of its group, and the jobs that shall be in now, which may be fewer than
    the group's. With `alone` the one job joins when all others have left. `stop`: checkpoint all jobs and exit.

    `epoch` counts the controllers of a store, `generation` the wishes of one of them: anything older than the newest known is void.
    `lease_seconds`: for so long a worker that is cut off trains on.
    """

    epoch: int
    generation: int
    load: Load
    group: JobGroup | None = None
    jobs: tuple[Join, ...] = ()
    alone: bool = False
    stop: bool = False
    lease_seconds: float = 600.0
    kind: Literal["want"] = "want"


@dataclass(frozen=True, slots=True)
class Taken:
    """The reports up to `seq` have been taken, and their consequences recorded."""

    seq: int
    kind: Literal["taken"] = "taken"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The controller refuses this worker: it checkpoints its jobs and exits."""

    reason: str
    kind: Literal["refusal"] = "refusal"


FromController = Want | Taken | Refusal


# -- reports -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loaded:
    """The base is on the device."""

    kind: Literal["loaded"] = "loaded"


@dataclass(frozen=True, slots=True)
class Joined:
    """The job trains, beginning with step `steps` (0: from its start)."""

    job_id: str
    steps: int
    attempt: int = 0
    kind: Literal["joined"] = "joined"


@dataclass(frozen=True, slots=True)
class Stepped:
    """`steps` optimizer steps of the job are through or queued since its submission; those since the last report took `step_seconds`
    each.
    """

    job_id: str
    steps: int
    step_seconds: float
    attempt: int = 0
    kind: Literal["stepped"] = "stepped"


@dataclass(frozen=True, slots=True)
class Finished:
    """The adapter stands in the job's directory. `result` are the fields of `result.json` there."""

    job_id: str
    result: dict[str, Any]
    attempt: int = 0
    kind: Literal["finished"] = "finished"


@dataclass(frozen=True, slots=True)
class Failed:
    job_id: str
    reason: str
    attempt: int = 0
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True)
class Left:
    """The job has left this worker at `steps`; None for a checkpoint that could not be written, or was not begun."""

    job_id: str
    steps: int
    checkpoint: str | None
    attempt: int = 0
    kind: Literal["left"] = "left"


@dataclass(frozen=True, slots=True)
class Refused:
    """The job cannot join now, but can later: its memory does not fit next to the jobs here, or its directory is still locked."""

    job_id: str
    reason: str
    attempt: int = 0
    kind: Literal["refused"] = "refused"


@dataclass(frozen=True, slots=True)
class Settled:
    """The desired state of `generation` is reached. `jobs` are those that are here, with their attempts; the others have ended."""

    generation: int
    jobs: dict[str, int] = field(default_factory=dict[str, int])
    kind: Literal["settled"] = "settled"


@dataclass(frozen=True, slots=True)
class Ending:
    """The worker releases its jobs and exits by itself."""

    reason: str
    kind: Literal["ending"] = "ending"


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured speed of the loaded base on the worker's GPU, which is a `device`."""

    device: str
    speed: BaseSpeed
    kind: Literal["measured"] = "measured"


@dataclass(frozen=True, slots=True)
class Memory:
    """How many bytes may be taken on each of the worker's GPUs, in their order, as it found before it loaded the base."""

    limit_bytes: tuple[int, ...]
    kind: Literal["memory"] = "memory"


JobReport = Joined | Stepped | Finished | Failed | Left | Refused
JobEnd = Finished | Failed | Left | Refused  # the attempt is over
Report = Loaded | Measured | Memory | JobReport | Settled | Ending


# -- worker to controller ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeldJob:
    """A job that a worker has, or whose end is not acknowledged yet. `steps` as of its last report."""

    job_id: str
    attempt: int
    steps: int
    resident: bool


@dataclass(frozen=True, slots=True)
class Hello:
    """The first line of a connection. `incarnation` names the process, over all its connections; `generation` is the last that it knows, of
    the controller `epoch`; `last_seq` the last report that was taken. `load` is what it has loaded, or is loading, and `group` what the
    controller has sent it about its group.
    """

    incarnation: str
    gpus: tuple[int, ...]
    versions: dict[str, str]
    load: Load | None = None
    loaded: bool = False
    group: JobGroup | None = None
    jobs: tuple[HeldJob, ...] = ()
    epoch: int = 0
    generation: int = 0
    last_seq: int = 0
    protocol: int = PROTOCOL
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True, slots=True)
class Said:
    """A report: the `seq`-th of its worker, made when `generation` was the last that it knew."""

    seq: int
    generation: int
    report: Annotated[Report, Field(discriminator="kind")]
    kind: Literal["said"] = "said"


Phase = Literal["starting", "loading", "waiting", "compiling", "training"]


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life. `count` grows with all work in `phase`; `in_flight` are the jobs of the micro-batch under way."""

    generation: int
    phase: Phase
    count: int
    in_flight: tuple[str, ...] = ()
    kind: Literal["alive"] = "alive"


FromWorker = Hello | Said | Alive

_FROM_CONTROLLER: TypeAdapter[FromController] = TypeAdapter(Annotated[FromController, Field(discriminator="kind")])
_FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(Annotated[FromWorker, Field(discriminator="kind")])


def controller_line(message: FromController) -> bytes:
    """A message as a line. A JobSpec is sent with the fields that were set only, so that fields that the user left open stay open."""
    return _line(_FROM_CONTROLLER, message)


def worker_line(message: FromWorker) -> bytes:
    """With a line end."""
    return _line(_FROM_WORKER, message)


def parse_controller_line(line: bytes) -> FromController:
    """The inverse of `controller_line`. Raises ValueError."""
    return _FROM_CONTROLLER.validate_json(line)


def parse_worker_line(line: bytes) -> FromWorker:
    """The inverse of `worker_line`. Raises ValueError."""
    return _FROM_WORKER.validate_json(line)


def _line(adapter: TypeAdapter[Any], message: FromController | FromWorker) -> bytes:
    """A message as bytes. A lone surrogate, which a reason may quote from a file, has no UTF-8 form and becomes a question mark."""
    try:
        return adapter.dump_json(message, exclude_unset=True) + b"\n"
    except PydanticSerializationError:
        return to_json(_encodable(adapter.dump_python(message, exclude_unset=True))) + b"\n"


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(inner) for key, inner in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_encodable(inner) for inner in cast("list[Any]", value)]
    return value
