"""What a group reports while it trains: one frozen value per event, to the one function that listens.

Reports come in the order of their events, from the thread that runs the group. They hold host values, except for adapter states: that of
`CheckpointDue` is still in use and must be copied before the listener returns; that of `Ended` belongs to the listener.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tlora.adapters.adamw import StepStats
from tlora.adapters.state import AdapterState
from tlora.batching.pack import MicroBatch
from tlora.group.progress import TrainingProgress

Status = Literal["done", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class Computed:
    """A micro-batch took `computed_tokens`, padding included; `left_tokens` more were on offer."""

    packed: MicroBatch
    computed_tokens: int
    left_tokens: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """A job's optimizer stepped; `loss` is the mean of that global batch, `metrics` are its objective's (`group.job_run.Means`)."""

    job_id: str
    progress: TrainingProgress
    stats: StepStats
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """`loss`: the mean of the job's evaluation set, and its objective's metrics there."""

    job_id: str
    progress: TrainingProgress
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointDue:
    """The job stands between two optimizer steps at which it should be saved."""

    job_id: str
    progress: TrainingProgress
    state: AdapterState


@dataclass(frozen=True, slots=True)
class Ended:
    """The job has left the group: with all its steps taken ("done"), at its last optimizer step ("stopped"), or because it "failed", with
    the reason. `state` is None for a job that could not join.
    """

    job_id: str
    progress: TrainingProgress
    status: Status
    reason: str = ""
    state: AdapterState | None = None


@dataclass(frozen=True, slots=True)
class Noted:
    """Something that a person should know, about the group as a whole."""

    line: str


Report = Computed | Stepped | Evaluated | CheckpointDue | Ended | Noted
Listener = Callable[[Report], None]
