"""The lines between a back end and a worker (`engine/worker.py`): commands on its stdin, reports on its stdout, JSON a line.

What is to be done is decided elsewhere; here is only how it is said. `parse_command` and `parse_report` refuse what is not one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from tlora.job import BasePrecision, DType, JobSpec, MemoryLimit, Recompute, TrackerName


@dataclass(frozen=True, slots=True)
class Load:
    """The first command: load `base_model` on `device`. `output_dir` gets a directory per job.

    `started_unix_seconds` is where the clock of the jobs' metrics begins, so that a job's rows go on when it moves. The other fields are
    those of a jobs file (`RunSpec`). `recompute` other than "auto" overrides a Share's; a `memory_limit` lowers a Share's token budget, and
    a job that cannot fit below it fails.
    """

    base_model: str
    output_dir: str
    device: str
    started_unix_seconds: float
    deterministic: bool = False
    dtype: DType = "auto"
    base_precision: BasePrecision | None = None
    recompute: Recompute = "auto"
    memory_limit: MemoryLimit = "auto"
    report_to: tuple[TrackerName, ...] = ()
    kind: Literal["load"] = "load"


@dataclass(frozen=True, slots=True)
class Join:
    """Let a job in, from its newest whole checkpoint in `output_dir` if it has one. `train_set` and `eval_set` are directories of its
    tokenized data, as the job's profile named them; without them, or when they are gone, the data is prepared again.
    """

    job: JobSpec
    train_set: str | None = None
    eval_set: str | None = None
    kind: Literal["join"] = "join"


@dataclass(frozen=True, slots=True)
class Leave:
    """Checkpoint a job at its last optimizer step and let it go. Answered by `Left`, or by nothing if the job has ended before."""

    job_id: str
    kind: Literal["leave"] = "leave"


@dataclass(frozen=True, slots=True)
class Share:
    """From the next micro-batch on: its tokens, the decoder layers that backward computes again, and the jobs' weights.

    The budget is raised to the longest sample of a resident. `weights` also hold for jobs that join later.
    """

    token_budget: int
    recomputed_layers: int = 0
    weights: dict[str, float] = field(default_factory=dict[str, float])
    kind: Literal["share"] = "share"


@dataclass(frozen=True, slots=True)
class Stop:
    """Checkpoint all jobs and exit; the end of stdin and SIGTERM say the same."""

    kind: Literal["stop"] = "stop"


Command = Load | Join | Leave | Share | Stop


@dataclass(frozen=True, slots=True)
class Loaded:
    """The base is on the device."""

    kind: Literal["loaded"] = "loaded"


@dataclass(frozen=True, slots=True)
class Joined:
    """The job trains, beginning with step `steps` (0: from its start)."""

    job_id: str
    steps: int
    kind: Literal["joined"] = "joined"


@dataclass(frozen=True, slots=True)
class Stepped:
    """`steps` optimizer steps of the job are through or queued since its submission; those since the last report took `step_seconds`
    each.
    """

    job_id: str
    steps: int
    step_seconds: float
    kind: Literal["stepped"] = "stepped"


@dataclass(frozen=True, slots=True)
class Finished:
    """The adapter stands in the job's directory. `result` are the fields of `result.json` there."""

    job_id: str
    result: dict[str, Any]
    kind: Literal["finished"] = "finished"


@dataclass(frozen=True, slots=True)
class Failed:
    job_id: str
    reason: str
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True)
class Left:
    """The job is gone from here at `steps`; None for a checkpoint that could not be written, or was not begun."""

    job_id: str
    steps: int
    checkpoint: str | None
    kind: Literal["left"] = "left"


Report = Loaded | Joined | Stepped | Finished | Failed | Left

_COMMANDS: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="kind")])
_REPORTS: TypeAdapter[Report] = TypeAdapter(Annotated[Report, Field(discriminator="kind")])


def command_line(command: Command) -> bytes:
    """With a line end. Of a JobSpec only what was set is said, so that what the person left open stays open."""
    return _COMMANDS.dump_json(command, exclude_unset=True) + b"\n"


def report_line(report: Report) -> bytes:
    return _REPORTS.dump_json(report) + b"\n"


def parse_command(line: bytes) -> Command:
    """What `command_line` gave. Raises ValueError."""
    return _COMMANDS.validate_json(line)


def parse_report(line: bytes) -> Report:
    """What `report_line` gave. Raises ValueError."""
    return _REPORTS.validate_json(line)
