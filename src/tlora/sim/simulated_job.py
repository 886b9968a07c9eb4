"""How far a simulated job is, and how its windows of 10 optimizer steps went: arithmetic over stretches of constant speed.

Knows neither groups nor events; the caller says how long the job ran, was paused or waited.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tlora.protocol import JobSubmitted
from tlora.sim.records import FinalState, JobRecord

WINDOW_STEPS = 10
_WHOLE = 1e-6  # steps; so near to a whole number they are one, as they are sums of quotients


@dataclass(slots=True)
class SimulatedJob:
    """One job. `alone_step_seconds` is T0, its actual step alone on its own GPUs with the same kernels, at its submission.
    `fastest_step_seconds` is the least on any GPUs: a sample is not divided, so that a step uses no more GPUs than it has samples.

    Windows follow each other; none is counted before its tenth step. A window's time includes all time after the job has begun to run in
    its group, also pauses because another job joins or its GPUs change; and a move from group to group at one moment, with checkpoint,
    start and join. It excludes waiting for a group, and the start of the group that the job then gets, or gets after a loss: that is
    queueing. A window is beyond its bound if it took more than 10 * max_slowdown * T0 and the tolerance of one micro-batch.
    Steps that a failure has undone are counted again when they are run again. A window has a move in it if the job was paused in it.
    """

    spec: JobSubmitted
    ends: FinalState
    submitted_seconds: float
    tokens_per_step: float  # actual
    alone_step_seconds: float
    speed: float  # its micro-batches' actual time over the predicted
    most_gpus: int = 1  # that have samples of each step
    fastest_step_seconds: float = 0.0
    state: FinalState = "unfinished"
    started_seconds: float = math.nan
    finished_seconds: float = math.nan
    # in its group
    group_id: str | None = None
    weight: float = 1.0
    runs: bool = False
    step_seconds: float = 0.0  # between its steps while it runs
    resume_at: float = 0.0  # until then it is paused
    counts: bool = False  # whether pauses count in its windows
    joined_at: float = 0.0
    joined_steps: float = 0.0
    left_at: float = -math.inf
    # sums
    steps: float = 0.0
    gpu_seconds: float = 0.0
    regroupings: int = 0  # times that it left a group before its end, or ran while its group's GPUs changed; losses are none
    window_steps: float = 0.0
    window_seconds: float = 0.0
    window_moves: bool = False  # whether it was paused in this window
    window_slack: float = 0.0  # the longest micro-batch for which it was paused
    windows: int = 0
    windows_beyond: int = 0
    windows_with_moves: int = 0
    windows_with_moves_beyond: int = 0
    group_seconds: float = 0.0  # in a group from its first run on, standing still or not
    paused_seconds: float = 0.0  # of these, standing still
    slowdown_sum: float = 0.0
    worst_slowdown: float = math.nan
    total_steps: float = field(init=False)
    bound_seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self.total_steps = float(self.spec.profile.steps)
        self.bound_seconds = WINDOW_STEPS * self.spec.max_slowdown * self.alone_step_seconds * (1 + 1e-9)

    def go_on(self, now: float) -> None:
        """It runs from now on."""
        self.runs = self.counts = True
        if math.isnan(self.started_seconds):
            self.started_seconds = now

    def run(self, seconds: float, micro_batch_seconds: float) -> None:
        """`seconds` at `step_seconds`, in a group of these micro-batches."""
        each = self.step_seconds
        self.group_seconds += seconds
        steps = seconds / each
        self.steps += steps
        missing = WINDOW_STEPS - self.window_steps
        if steps < missing - _WHOLE:
            self.window_steps += steps
            self.window_seconds += seconds
            return
        self._close(1, self.window_seconds + missing * each, micro_batch_seconds)
        more = steps - missing
        full, rest = divmod((more if more > 0 else 0.0) + _WHOLE, WINDOW_STEPS)
        if full:
            self._close(int(full), WINDOW_STEPS * each, micro_batch_seconds)
        self.window_steps = rest - _WHOLE if rest > _WHOLE else 0.0
        self.window_seconds = self.window_steps * each

    def stand(self, seconds: float) -> None:
        """`seconds` in a group without a step."""
        if self.counts:
            self.window_seconds += seconds
            self.window_moves = True
        if self.started_seconds == self.started_seconds:  # not nan
            self.group_seconds += seconds
            self.paused_seconds += seconds

    def undo(self, to_steps: float) -> None:
        """What is done beyond `to_steps` is lost: what is left of a window's steps takes the longer."""
        self.window_steps = max(0.0, self.window_steps - (self.steps - to_steps))
        self.steps = to_steps

    def check_point(self, now: float) -> None:
        """It goes on from a checkpoint of now; of a step that is under way nothing is kept."""
        self.undo(self.whole_steps)
        self.joined_at, self.joined_steps = now, self.steps

    @property
    def whole_steps(self) -> float:
        return float(math.floor(self.steps + _WHOLE))

    def checkpointed_steps(self, now: float, interval_seconds: float) -> float:
        """As of its last checkpoint: one is written every `interval_seconds` from its joining on, at its present speed."""
        since = (now - self.joined_at) % interval_seconds
        done = self.steps - since / self.step_seconds if self.runs else self.steps
        return max(self.joined_steps, float(math.floor(done)))

    def _close(self, count: int, seconds: float, micro_batch_seconds: float) -> None:
        """`count` windows of `seconds` each."""
        slowdown = seconds / (WINDOW_STEPS * self.alone_step_seconds)
        self.windows += count
        self.slowdown_sum += count * slowdown
        if not slowdown <= self.worst_slowdown:  # or nan
            self.worst_slowdown = slowdown
        if seconds > self.bound_seconds and seconds > self.bound_seconds + max(micro_batch_seconds, self.window_slack):
            self.windows_beyond += count
            self.windows_with_moves_beyond += count * self.window_moves
        self.windows_with_moves += count * self.window_moves
        self.window_slack, self.window_moves = 0.0, False

    def record(self) -> JobRecord:
        spec = self.spec
        return JobRecord(
            job_id=spec.job_id,
            tenant=spec.tenant,
            base_model=spec.base_model,
            gpus=spec.gpus,
            submitted_seconds=self.submitted_seconds,
            started_seconds=self.started_seconds,
            finished_seconds=self.finished_seconds,
            state=self.state,
            tokens_per_step=self.tokens_per_step,
            steps=self.steps,
            alone_seconds=self.steps * self.alone_step_seconds,
            max_slowdown=spec.max_slowdown,
            windows=self.windows,
            windows_beyond=self.windows_beyond,
            regroupings=self.regroupings,
            gpu_seconds=self.gpu_seconds,
            worst_slowdown=self.worst_slowdown,
            mean_slowdown=self.slowdown_sum / self.windows if self.windows else math.nan,
            most_gpus=self.most_gpus,
            windows_with_moves=self.windows_with_moves,
            windows_with_moves_beyond=self.windows_with_moves_beyond,
            group_seconds=self.group_seconds,
            paused_seconds=self.paused_seconds,
        )
