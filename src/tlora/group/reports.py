"""What a group reports while it trains: one frozen value per event, to the one function that listens.

Reports come in the order of their events, from the thread that runs the group. They hold host values, except for adapter states: that of
`CheckpointDue` is still in use and must be copied before the listener returns; that of `Ended` belongs to the listener.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tlora.adapters.adamw import StepStats
from tlora.adapters.state import AdapterState
from tlora.batching.pack import MicroBatch
from tlora.group.job_result import Status


@dataclass(frozen=True)
class TrainingProgress:
    """One value per moment of a job; losses are means per trained token. The order of samples and dropout follow from `step` and the
    spec's seed alone. What the optimizer counts (updates, skipped steps) is in the `AdapterState`.

    A checkpoint keeps all of it. The checkpoint writer fills in `seconds` and `unlogged`: the group has no clock and writes
    no metrics.
    """

    step: int = 0
    num_tokens: int = 0
    seconds: float = 0.0  # of training, over all runs of this job
    evaluated_step: int = -1
    loss_first: float | None = None
    losses: tuple[float, ...] = ()  # of the latest steps
    unlogged: tuple[float, ...] = ()  # since the last row of metrics
    eval_first: float | None = None
    eval_last: float | None = None
    best_eval: float | None = None
    best_step: int = -1
    evals_without_gain: int = 0
    skipped_steps: int = 0  # that changed nothing, because their loss or gradient was not finite
    first_skipped: int = -1
    finished: bool = False
    nano_batches: int = 0  # that a global batch of all jobs is cut into over stages; 0: not found yet
    nano_batches_of: str = ""  # stages and jobs that it was found for
    replica_weights: tuple[float, ...] = ()  # of a job that spans ranks, once they were corrected by measured seconds
    weights_since: int = -1  # optimizer steps after which they count
    data: str = ""  # which tokenized set the steps were taken on
    eval_data: str = ""  # and the evaluations


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
class Reweighted:
    """The ranks that compute a job take unlike times: from the global batch after `progress.weights_since` steps on its replicas have
    `progress.replica_weights`.
    """

    job_id: str
    progress: TrainingProgress


@dataclass(frozen=True, slots=True)
class Noted:
    """Something that a person should know, about the group as a whole."""

    line: str


Report = Computed | Stepped | Evaluated | CheckpointDue | Ended | Reweighted | Noted
Listener = Callable[[Report], None]
