"""What is told to the processes that train, and what these report: one frozen value a message.

A rank trains jobs on one GPU. It is led by `ranks/coordinator.py`, which owns a run of `tlora train`, or by `ranks/worker_group.py`, which
stands in for the trainer of a worker with several GPUs. Its commands are those of a worker with one GPU, and its reports those of
`worker_protocol.py`, beside what is said here. All ranks are processes of one version; those of a worker may be of several hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tlora.batching.replicas import ReplicaPlacement
from tlora.engine.watcher import RunProgress
from tlora.group.job_result import JobResult
from tlora.job import JobSpec, RunSpec
from tlora.link.lines import Buffer
from tlora.message_codec import Codec, message
from tlora.shape.stages import LayerRange
from tlora.worker_protocol import (
    Alive,
    Delayed,
    Failed,
    Finished,
    Join,
    Joined,
    Left,
    Load,
    Loaded,
    Measured,
    Memory,
    Refused,
    Stepped,
)

WAITS = {
    "exchange_wait_seconds": "for parts of jobs on other GPUs",
    "fetch_wait_seconds": "for layers of the shared base",
    "stage_wait_seconds": "for other stages",
}

# -- to whoever trains: beside `Join` ----------------------------------------------------------------------------------


@message
class Leave:
    """Checkpoint a job at its last optimizer step and let it go. Answered by `Left`, or, if the job has come to its end before, by how it
    ended, or by nothing. A rank that has a part of the job, whose lead rank is another, lets that go and answers nothing.
    """

    job_id: str


@message
class SetPlan:
    """From the next micro-batch on: its tokens, and the jobs' weights. How many layers it recomputes follows from the memory that is here.

    The budget is raised to the longest sample of a resident. `weights` also hold for jobs that join later.
    """

    token_budget: int
    weights: dict[str, float] = field(default_factory=dict[str, float])


@message
class SetGpus:
    """To a worker: have these GPUs, as its cluster counts them, while its jobs train. Answered by `GpusChanged` with the same `order`.
    Those that are `lent` are of other hosts, whose workers start the ranks there.
    """

    gpus: tuple[int, ...]
    order: int = 0
    lent: tuple[int, ...] = ()


@message
class Listen:
    """To a worker: let workers of other hosts lend it their GPUs, at this address of its host. Answered by `Listening`."""

    address: str


@message
class Stop:
    """Checkpoint all jobs and end."""


Command = Join | Leave | SetPlan | SetGpus | Listen | Stop

# -- to a rank of a run ------------------------------------------------------------------------------------------------


@message
class Open:
    """The first message: load the base of `run` on `device`. `started` is the run's beginning on the clock of `time.monotonic`, which all
    processes of a host share. `ended`: jobs that an earlier run has ended.
    """

    run: RunSpec
    resume: bool
    device: str
    started: float
    ended: Mapping[str, JobResult] = field(default_factory=dict[str, Any])


@message
class Assign:
    """The data of all jobs is tokenized; of `run`, as it is by now, these jobs are led here. Answered by `Ready`. `store`: a file
    by which ranks find each other. With `shared` they share the base, with `stages` each has these of its layers, and the last leads
    all jobs; `spans` are all jobs with replicas on several ranks. For jobs that are `kept_out` this rank has too little memory,
    but for a part that `spans` may give it.
    """

    run: RunSpec
    jobs: frozenset[str]
    store: str = ""
    shared: bool = False
    spans: Mapping[str, ReplicaPlacement] = field(default_factory=dict[str, ReplicaPlacement])
    stages: tuple[LayerRange, ...] = ()
    kept_out: frozenset[str] = frozenset()


@message
class BaseFacts:
    """What is known of the base's files, for `base.json`. The first comes when the run's directory is held: begin. No save happens until
    the base `is_known`. With a `problem` its files are not those that the run began with: nothing may be saved.
    """

    facts: Mapping[str, Any]
    is_known: bool = True
    problem: str = ""


# -- to a rank of a worker ---------------------------------------------------------------------------------------------


@message
class Enter:
    """The first message: load the base on `device`, together with the first `together` ranks of the worker. `store`: a file by which ranks
    find each other. `expected`: the jobs that will join first. `stages`: ranks that have the base in stages, as of `RankContext`.
    `slow_dtypes`: in which no rank of the group computes on a CPU, unless it is ordered.
    """

    load: Load
    device: str
    store: str
    together: int
    worker_pid: int
    expected: tuple[JobSpec, ...]
    stages: tuple[int, ...] = ()
    apart: bool = False
    slow_dtypes: tuple[str, ...] = ()


@message
class Spread:
    """The job shall be computed by all of `span`. Its first rank, which leads it, answers with `PartReady`, or as a `Join` that fails; the
    others are told when it has, and answer with `PartReady` or `Faulty`. `number` counts the placements of a worker's jobs.
    """

    join: Join
    span: ReplicaPlacement
    number: int = 0


@message
class Meet:
    """To the ranks of `span`, in one order for all jobs: make memory for the `numel` elements of a job's adapter that the others can read,
    or, where they are `apart` on several hosts, that is copied to them. Then it begins. `number` counts the meetings of a worker.
    """

    job_id: str
    span: ReplicaPlacement
    numel: int
    number: int
    apart: bool = False


# -- from rank `sender` to others of a job that spans them, through who leads them: gradients and state lie in memory that they read --


@message
class Published:
    """The job's lead rank has its weights and moments as it began, after `step` optimizer steps (`AdapterState`)."""

    job: str
    sender: int
    step: int
    updates: int = 0
    skipped: int = 0


@message
class Fetched:
    """The sender has read what the job's lead rank published."""

    job: str
    sender: int


@message
class Sent:
    """The sender's gradients for the global batch after `step` steps are there; perhaps none, as it has no samples of it. `parts`: of each
    part that went through as `group.job_run.BatchLosses.values`. `seconds` that they took (0: not measured). `weights`, of the job's lead
    rank: those of the replicas from the next global batch on.
    """

    job: str
    sender: int
    step: int
    parts: tuple[tuple[float, ...], ...]
    tokens: int
    seconds: float = 0.0
    weights: tuple[float, ...] = ()


@message
class Written:
    """Rank `sender` has written `size` bytes from `start` on into its memory of the meeting `number`. They follow the line, for rank `to`,
    which is of another host and cannot read them there, and come before any note that announces them.
    """

    number: int
    sender: int
    to: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Sending:
    """A message with the bytes that follow its line."""

    written: Written
    content: Buffer


@message
class Faulty:
    """To who leads: the rank cannot compute its part of the job."""

    job: str
    reason: str


@dataclass(frozen=True)
class StageRow:
    """A unit of a micro-batch as the stages before the last one need it: `supermodel.batch.BatchRow` without what is trained."""

    job_id: str
    input_ids: tuple[int, ...]
    lengths: tuple[int, ...]
    normalizer: float
    dropout_key: tuple[int, int, int] | None


@message
class StageBatch:
    """From the last stage to all before it: the next micro-batch of the stream (`group.pipeline.Pipeline.announce`). It ends the global
    batches of the jobs `through`, and of those in `replicas` the part of a replica that is not their last.
    """

    trains: bool
    rows: tuple[StageRow, ...]
    pad_to: int
    most_tokens: int
    compared: tuple[str, ...]
    through: tuple[str, ...]
    replicas: tuple[str, ...] = ()


@message
class StageChange:
    """From the last stage to all before it, to be made in its place in the stream. States go through a channel, in the same order. With
    a new `epoch` nothing that was announced before is computed any more: all begin anew, without any gradients, or go on.

    A step whose verdict is open is a "check" first (`supermodel.optimizer_steps.PartStep`); "state" is sent back.
    """

    what: Literal["enter", "reference", "check", "step", "state", "leave", "recompute", "begin anew", "go on"]
    job_id: str = ""
    spec: JobSpec | None = None
    total_steps: int = 0
    counters: tuple[int, int, int] = (0, 0, 0)  # of the state with which a job enters: step, updates, skipped
    clip: float = 1.0  # of a step
    applied: bool = False  # likewise
    stretches: tuple[tuple[int, ...], ...] = ()  # by rank, of a state: numbers that follow each other in the whole adapter
    most_tokens: tuple[int, ...] = ()  # of a `RecomputePlan`
    epoch: int = 0


Note = Published | Fetched | Sent
StageOrder = StageBatch | StageChange


def addressees(note: Note, span: ReplicaPlacement) -> tuple[int, ...]:
    """The receivers among the ranks that compute the job."""
    return (span.lead_rank,) if isinstance(note, Fetched) else tuple(rank for rank in span.ranks if rank != note.sender)


# -- from a rank -------------------------------------------------------------------------------------------------------


@message
class Hello:
    """The first message. `software`: versions by library; `run_digest`: of the jobs file as this rank read it, empty where it takes the
    owner's. `slow_dtypes`: for which its CPU has no instructions.
    """

    rank: int
    pid: int
    host: str
    software: Mapping[str, str]
    run_digest: str = ""
    slow_dtypes: tuple[str, ...] = ()


@message
class Ready:
    """The base is loaded. `facts` as in `run.json`; `threads` as `engine.session.Loaded.threads`."""

    facts: Mapping[str, Any]
    threads: int | None
    warnings: tuple[str, ...]
    plan: str  # in a line


@message
class Shown:
    """The progress of its jobs, and tokens per second of those whose lead rank is another; about four times a second."""

    progress: RunProgress
    rates: Mapping[str, float] = field(default_factory=dict[str, float])


@message
class RowMade:
    """A row of `run.jsonl`."""

    row: Mapping[str, Any]


@message
class LogLine:
    line: str


@message
class Broken:
    """The rank has failed. `error`: its class in `tlora.errors`, if it is one that a user can mend."""

    reason: str
    error: str = ""


@message
class Bye:
    """All is written, and nothing more will be. `waited`: seconds that the rank computed nothing, by what it waited for (`WAITS`)."""

    waited: Mapping[str, float] = field(default_factory=dict[str, float])


@message
class PartReady:
    """All is ready here for the job to begin, as placed by the `Spread` of that `number`. Its sets are told by its lead rank, so that the
    others need not prepare them again.
    """

    job_id: str
    numel: int
    train_set: str
    eval_set: str | None = None
    number: int = 0


JobReport = Joined | Refused | Finished | Left | Note | Written | Faulty | StageOrder
# of any rank; `Refused` by a run's: the first job that waits has no room
ToRank = Join | Leave | SetPlan | Stop | Open | Assign | BaseFacts | Enter | Spread | Meet | Note | Written | StageOrder
ReportOfRun = Hello | Memory | Ready | Shown | RowMade | LogLine | Broken | Bye
ReportOfWorker = Memory | Loaded | Measured | Alive | PartReady | Stepped | Delayed | Failed
FromRank = JobReport | ReportOfRun | ReportOfWorker

TO_RANK: Codec[ToRank] = Codec(ToRank)
FROM_RANK: Codec[FromRank] = Codec(FromRank)
