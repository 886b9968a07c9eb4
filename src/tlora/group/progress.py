"""How far a job is."""

from __future__ import annotations

from dataclasses import dataclass


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
    data: str = ""  # which tokenized set the steps were taken on
    eval_data: str = ""  # and the evaluations
