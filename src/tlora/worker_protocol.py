"""Messages between a worker and its controller, protocol 6: one JSON object a line over a socket that the worker opens.

A worker sends `Hello`: its identity and its state. The controller answers with `DesiredState`: the whole desired state; the latest counts,
and a lost one does no harm. The worker sends numbered reports (`Envelope`), again until an `Ack` counts them. `link/` carries the lines;
their consequences are decided elsewhere. Any other line is refused (`message_codec.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from tlora.job import BasePrecision, DType, JobSpec, LayoutSetting, MemoryLimit, Recompute, TrackerName, UnusedWeights
from tlora.message_codec import Codec, message
from tlora.protocol import BaseSpeed, JobGroup

PROTOCOL = 6
REFUSED = 2  # exit status of a worker that its controller has refused, or that found none


@dataclass(frozen=True, slots=True)
class Load:
    """Load `base_model` on `device`. `output_dir` gets a directory per job.

    `started_unix_seconds` is where the clock of the jobs' metrics begins, so that a job's rows go on when it moves. The other fields are
    those of a jobs file (`RunSpec`). `memory_limit`, by default what is free there, lowers a group's token budget, and a job that cannot
    fit below it fails. `layout` is of a worker with one GPU; several hold a base in parts where they must, and with `stages` so many GPUs
    hold it in stages, some of which other hosts may lend. With `calibrate` the worker tells what the base costs here (`Measured`).
    `base_name`: what adapters call a base that is a copy; else it is named by `base_model`.
    """

    base_model: str
    output_dir: str
    device: str
    started_unix_seconds: float
    deterministic: bool = False
    dtype: DType = "auto"
    base_precision: BasePrecision | None = None
    layout: LayoutSetting = "auto"
    unused_weights: UnusedWeights = "refuse"
    recompute: Recompute = "auto"
    memory_limit: MemoryLimit = "auto"
    report_to: tuple[TrackerName, ...] = ()
    calibrate: bool = False
    base_name: str = ""
    stages: int = 0


_SHARED = ("deterministic", "dtype", "base_precision", "layout", "unused_weights", "recompute", "memory_limit")


def settings_of(source: object) -> dict[str, Any]:
    """What a jobs file (`RunSpec`), a server's settings or a machine says of how workers hold a base and compute: fields of a `Load`."""
    return {name: getattr(source, name) for name in _SHARED}


@message
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


@dataclass(frozen=True, slots=True)
class Lending:
    """To a worker: start ranks on your GPUs for the worker of another host that leads their group, and listens at `address` with a
    certificate of this `fingerprint`. `key` lets you in. `gpus`: what that one calls yours, and your own number of each.
    """

    address: str
    fingerprint: str
    key: str = field(repr=False)
    gpus: dict[int, int]


# -- controller to worker ----------------------------------------------------------------------------------------------


@message
class DesiredState:
    """All that a worker shall have: the base, the GPUs, plan and weights of its group, and the jobs that shall be in now, which may be
    fewer than the group's. With `alone` the one job joins when all others have left. `stop`: checkpoint all jobs and exit, or, with
    `begins_anew`, dial again as a new worker without a base.

    `expected`: jobs that may come, told until the base is loaded, so that what they will launch is compiled meanwhile.

    `epoch` counts the controllers of a store, `generation` the wishes of one of them: anything older than the newest known is void.
    `gpus_order`: the generation in which the group's GPUs became what they are. `lease_seconds`: for so long after its last `Alive` that
    was answered, by its own clock, a worker that is cut off trains on. With `leased` its end cannot be seen from the controller's host:
    it must have ended by then. With `files_by_line` it does not see the paths that are named: what lies there is fetched and sent back.

    `listen`: an address of its host at which workers of other hosts come that lend it GPUs, those of its group's that are `lent`.
    `lend`: it has no group, and lends its own. `gpus`: of its host, with which one begins that has come with none (`HostLabels.any_of`).
    """

    epoch: int
    generation: int
    load: Load
    group: JobGroup | None = None
    jobs: tuple[Join, ...] = ()
    alone: bool = False
    stop: bool = False
    lease_seconds: float = 600.0
    expected: tuple[JobSpec, ...] = ()
    gpus_order: int = 0
    leased: bool = False
    files_by_line: bool = False
    begins_anew: bool = False
    listen: str = ""
    lent: tuple[int, ...] = ()
    lend: Lending | None = None
    gpus: tuple[int, ...] = ()


@message
class Ack:
    """The reports up to `seq` have been taken, and their consequences recorded.

    In answer to an `Alive`, `heard` is its `said_seconds`: the worker's lease runs from there. Else None: nothing is renewed.
    """

    seq: int
    heard: float | None = None


@message
class Refusal:
    """The controller refuses this worker: it checkpoints its jobs and exits."""

    reason: str


FromController = DesiredState | Ack | Refusal


# -- reports -----------------------------------------------------------------------------------------------------------


@message
class Loaded:
    """The base is on the device; whole, or else in parts that lie on other GPUs too, or in the host's memory."""

    whole: bool = True


@message
class Joined:
    """The job trains, beginning with step `steps` (0: from its start)."""

    job_id: str
    steps: int
    attempt: int = 0


@message
class Stepped:
    """`steps` optimizer steps of the job are through or queued since its submission; those since the last report took `step_seconds`
    each.
    """

    job_id: str
    steps: int
    step_seconds: float
    attempt: int = 0


@message
class Finished:
    """The adapter stands in the job's directory. `result` are the fields of `result.json` there."""

    job_id: str
    result: dict[str, Any]
    attempt: int = 0


@message
class Failed:
    job_id: str
    reason: str
    attempt: int = 0


@message
class Left:
    """The job has left this worker at `steps`; None for a checkpoint that could not be written, or was not begun."""

    job_id: str
    steps: int
    checkpoint: str | None
    attempt: int = 0


@message
class Refused:
    """The job cannot join now, but can later: its memory does not fit next to the jobs here, or its directory is still locked."""

    job_id: str
    reason: str
    attempt: int = 0


@message
class Delayed:
    """The job is here, or has just been refused, and does not go on until there is what it waits for: `why`, in words for its owner."""

    job_id: str
    why: str
    attempt: int = 0


@message
class Settled:
    """The desired state of `generation` is reached. `jobs` are those that are here, with their attempts; the others have ended."""

    generation: int
    jobs: dict[str, int] = field(default_factory=dict[str, int])


@message
class Ending:
    """The worker releases its jobs and exits by itself."""

    reason: str


@message
class Farewell:
    """The last report: its jobs are let go and its ranks have ended. The process writes nothing any more."""


@message
class Measured:
    """The measured speed of the loaded base on the worker's GPU, which is a `device`."""

    device: str
    speed: BaseSpeed


@message
class Memory:
    """How many bytes may be taken on each of the sender's GPUs, in their order, as it found before it loaded the base. A rank of a run also
    says what its device is, whether it reads the memory of the others, and the floating-point operations a second that training makes
    there, by the table of GPUs or a product that was timed; 0 of a CPU.
    """

    limit_bytes: tuple[int, ...]
    device: str = ""
    reads_peers: bool = True
    flops: float = 0.0


@message
class GpusChanged:
    """The worker has these GPUs now, in ascending order, and its jobs are on them. `refused`: why they are not those that were wanted;
    then its jobs have noticed nothing. With `fixed` it can never have others. `order`: the last `DesiredState.gpus_order` that it answers.
    """

    gpus: tuple[int, ...]
    refused: str = ""
    fixed: bool = False
    order: int = 0


@message
class Listening:
    """Workers of other hosts may come to `address`, with `key`. `problem`: why they cannot."""

    address: str
    fingerprint: str
    key: str = field(repr=False)
    problem: str = ""


JobReport = Joined | Stepped | Delayed | Finished | Failed | Left | Refused
JobEnd = Finished | Failed | Left | Refused  # the attempt is over
Report = Loaded | Measured | Memory | GpusChanged | Listening | JobReport | Settled | Ending | Farewell


# -- worker to controller ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeldJob:
    """A job that a worker has, or whose end is not acknowledged yet. `steps` as of its last report."""

    job_id: str
    attempt: int
    steps: int
    resident: bool


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as its driver calls it, or "cpu". `memory_bytes` 0: unknown. `uuid` "": it has none."""

    kind: str
    memory_bytes: int = 0
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """What joins two of a host's GPUs, by their numbers there: `kind` is nvidia-smi's, as NV18, PIX or SYS."""

    first: int
    second: int
    kind: str


@dataclass(frozen=True, slots=True)
class HostLabels:
    """The host of a worker. `failure_domain`: what fails as one (a rack, a zone); "" for the host alone. `devices` are those of the
    worker's GPUs, in their order, `links` those between them. `boot`: the kernel's id of this boot. `address`: where workers of other hosts
    reach it, if it says so; else at the address from which it has come. `processor`: what its CPU is. `any_of`: GPUs of the host of which
    it can have any, as all the processes that its agent has started, one for each; `devices` are then those. Empty: its own alone.
    `process`: what the agent calls this one, as no other ever; `ended`: those that are no more, nor any process that they have started.
    """

    name: str
    failure_domain: str = ""
    boot: str = ""
    devices: tuple[Device, ...] = ()
    links: tuple[DeviceLink, ...] = ()
    address: str = ""
    processor: str = ""
    any_of: tuple[int, ...] = ()
    process: str = ""
    ended: tuple[str, ...] = ()


@message
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
    host: HostLabels | None = None
    protocol: int = PROTOCOL


@message
class Envelope:
    """A report: the `seq`-th of its worker, made when `generation` was the last that it knew."""

    seq: int
    generation: int
    report: Annotated[Report, Field(discriminator="kind")]


Phase = Literal["loading", "waiting", "compiling", "training"]


@message
class Alive:
    """A sign of life. `count` grows with all work in `phase`; `in_flight` are the jobs of the micro-batch under way. `said_seconds`: when
    it was said, by a clock of the worker's that runs while its host sleeps.
    """

    generation: int
    phase: Phase
    count: int
    in_flight: tuple[str, ...] = ()
    said_seconds: float | None = None


FromWorker = Hello | Envelope | Alive

_FROM_CONTROLLER: Codec[FromController] = Codec(FromController)
_FROM_WORKER: Codec[FromWorker] = Codec(FromWorker)
controller_line, parse_controller_line = _FROM_CONTROLLER.encode, _FROM_CONTROLLER.decode
worker_line, parse_worker_line = _FROM_WORKER.encode, _FROM_WORKER.decode
