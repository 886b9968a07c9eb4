"""What the process that owns a run and its ranks say to each other: one frozen value a message, sent as it is by `link.py`.

A rank trains some of the run's jobs on one GPU. It is given jobs, and may be told to let one go; it tells what it has room for and what
has become of its jobs. All ranks are processes of one host and of one version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tlora.engine.watcher import RunProgress
from tlora.job import RunSpec

if TYPE_CHECKING:  # ranks are started before anybody has loaded torch
    from tlora.store.recorder import JobResult

# -- from the owner ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """The first message: load the base of `run` on `device`. `started` is the run's beginning on the clock of `time.monotonic`, which all
    processes of a host share.
    """

    run: RunSpec
    resume: bool
    device: str
    started: float


@dataclass(frozen=True)
class Assign:
    """The data of all jobs is tokenized; of `run`, as it is by now, these jobs begin here. Answered by `Ready`. With `store`, a file by
    which they find each other, all ranks share the base.
    """

    run: RunSpec
    jobs: frozenset[str]
    store: str = ""


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
class BaseKnown:
    """The base's files have been hashed. With a `problem` they are not those that the run began with: nothing may be saved."""

    facts: Mapping[str, Any]
    problem: str = ""


@dataclass(frozen=True)
class Stop:
    """Save all jobs and exit; the end of the connection says the same."""


Command = Open | Assign | Hold | Go | Take | LetGo | BaseKnown | Stop

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
    """The device that the rank was told to use: what it is, and the bytes that a run may take of it."""

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
    """How its jobs stand; about four times a second."""

    progress: RunProgress


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
    """The rank cannot go on. `kind`: the error's class in `tlora.errors`, where it is one of those that a user can mend."""

    reason: str
    kind: str = ""


@dataclass(frozen=True)
class Bye:
    """All is written, and nothing more will be."""


Report = Hello | Found | Ready | Shown | RowMade | Said | Began | Room | Full | Left | Ended | Broken | Bye
