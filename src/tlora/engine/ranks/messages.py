"""What the process that owns a run and its ranks say to each other: one frozen value a message, sent as it is by `link.py`.

A rank trains some of the run's jobs on one GPU. It is given jobs, and may have to release one; it reports its free memory and what has
become of its jobs. All ranks are processes of one host and of one version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tlora.batching.replicas import Span
from tlora.engine.watcher import RunProgress
from tlora.job import RunSpec

if TYPE_CHECKING:  # ranks are started before torch is loaded
    from tlora.store.job_result import JobResult

WAITS = {
    "exchange_wait_seconds": "for parts of jobs on other GPUs",
    "fetch_wait_seconds": "for layers of the shared base",
}

# -- from the owner ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """The first message: load the base of `run` on `device`. `started` is the run's beginning on the clock of `time.monotonic`, which all
    processes of a host share. `ended`: jobs that an earlier run has ended.
    """

    run: RunSpec
    resume: bool
    device: str
    started: float
    ended: Mapping[str, JobResult] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Assign:
    """The data of all jobs is tokenized; of `run`, as it is by now, these jobs have their home here. Answered by `Ready`. `store`: a file
    by which ranks find each other. With `shared` they share the base; `spans` are all jobs with replicas on several ranks.
    """

    run: RunSpec
    jobs: frozenset[str]
    store: str = ""
    shared: bool = False
    spans: Mapping[str, Span] = field(default_factory=dict[str, Span])


@dataclass(frozen=True)
class Hold:
    """The next thing on the line is the open file whose lock keeps other runs out of the run's directory, to be held until the end."""


@dataclass(frozen=True)
class Go:
    """The run's directory is held: begin. `base_facts` are what is known of the base's files, for `base.json`; with `base_is_known` no save
    has to wait for more.
    """

    base_facts: Mapping[str, Any]
    base_is_known: bool


@dataclass(frozen=True)
class Take:
    """One more job, from its newest checkpoint if it has one."""

    job: str


@dataclass(frozen=True)
class LetGo:
    """The job shall go on elsewhere. Answered by `Left`, or by `Ended` if it has come to its end by itself."""

    job: str


@dataclass(frozen=True)
class Unfollow:
    """The job, whose home is another rank, needs this one no longer."""

    job: str


@dataclass(frozen=True)
class Mail:
    """What rank `sender` tells of a job that this one computes a part of."""

    sender: int
    note: Published | Fetched | Sent


@dataclass(frozen=True)
class BaseKnown:
    """The base's files have been hashed. With a `problem` they are not those that the run began with: nothing may be saved."""

    facts: Mapping[str, Any]
    problem: str = ""


@dataclass(frozen=True)
class Stop:
    """Save all jobs and exit; the end of the connection says the same."""


Command = Open | Assign | Hold | Go | Take | LetGo | Unfollow | Mail | BaseKnown | Stop

# -- from one rank to others of a job that spans them, through the owner: gradients and state lie in memory that they read themselves --


@dataclass(frozen=True)
class Published:
    """The job's home has its weights and moments as it began, after `step` optimizer steps (`AdapterState`)."""

    job: str
    step: int
    updates: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Fetched:
    """The sender has read what the job's home published."""

    job: str


@dataclass(frozen=True)
class Sent:
    """The sender's gradients for the global batch after `step` steps are there; perhaps none, as it has no samples of it. `parts`: of each
    part that went through as `group.job_run.Passed.values`.
    """

    job: str
    step: int
    parts: tuple[tuple[float, ...], ...]
    tokens: int


@dataclass(frozen=True)
class Faulty:
    """To the owner: the sender cannot compute its part of the job."""

    job: str
    reason: str


Note = Published | Fetched | Sent | Faulty


def addressees(note: Published | Fetched | Sent, sender: int, span: Span) -> tuple[int, ...]:
    """The receivers among the ranks that compute the job."""
    return (span.home,) if isinstance(note, Fetched) else tuple(rank for rank in span.ranks if rank != sender)


# -- from a rank -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first message. `software`: versions by library; `run_digest`: of the jobs file as this rank read it, empty where it takes the
    owner's.
    """

    rank: int
    pid: int
    host: str
    software: Mapping[str, str]
    run_digest: str = ""


@dataclass(frozen=True)
class Found:
    """The device that the rank has to use: what it is, and the bytes that a run may take of it."""

    device: str
    limit_bytes: int


@dataclass(frozen=True)
class Ready:
    """The base is loaded. `facts` as in `run.json`; `threads` as `engine.session.Loaded.threads`."""

    facts: Mapping[str, Any]
    threads: int | None
    warnings: tuple[str, ...]
    plan: str  # in a line


@dataclass(frozen=True)
class Shown:
    """The progress of its jobs, and tokens per second of those whose home rank is another; about four times a second."""

    progress: RunProgress
    rates: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class RowMade:
    """A row of `run.jsonl`."""

    row: Mapping[str, Any]


@dataclass(frozen=True)
class Said:
    line: str


@dataclass(frozen=True)
class Began:
    job: str


@dataclass(frozen=True)
class Room:
    """None of its jobs waits any more; one more would perhaps fit."""


@dataclass(frozen=True)
class Full:
    """The first of its jobs that wait has no room now."""


@dataclass(frozen=True)
class Left:
    """The job was let go: saved at its last optimizer step, if it had begun."""

    job: str


@dataclass(frozen=True)
class Ended:
    result: JobResult


@dataclass(frozen=True)
class Broken:
    """The rank has failed. `kind`: the error's class in `tlora.errors`, if it is one that a user can mend."""

    reason: str
    kind: str = ""


@dataclass(frozen=True)
class Bye:
    """All is written, and nothing more will be. `waited`: seconds that the rank computed nothing, by what it waited for (`WAITS`)."""

    waited: Mapping[str, float] = field(default_factory=dict[str, float])


Report = Hello | Found | Ready | Shown | RowMade | Said | Began | Room | Full | Left | Ended | Broken | Bye | Note
