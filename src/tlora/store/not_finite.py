"""The notes on steps and evaluations whose numbers are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tlora.group.reports import Ended, Evaluated, Stepped
from tlora.job import JobSpec


def skipped_step(report: Stepped) -> str | None:
    """The note on the first optimizer step that was skipped."""
    if report.progress.skipped_steps != 1 or report.stats.applied:
        return None
    what = "gradient" if math.isfinite(report.loss) else "loss"
    return (
        f"step {report.progress.step} changed nothing: its {what} is not finite. Look at the job's data, its learning rate and the base's "
        "dtype. More such steps are counted"
    )


def evaluation(spec: JobSpec, report: Evaluated) -> str | None:
    """The note on an evaluation without a finite loss."""
    if math.isfinite(report.loss):
        return None
    kept = ["it is never the best"] if spec.load_best_model_at_end else []
    kept += ["early_stopping_patience does not count it"] if spec.early_stopping_patience else []
    return ": ".join([f"the evaluation at step {report.progress.step} has no finite loss", *([" and ".join(kept)] if kept else [])])


def at_the_end(spec: JobSpec, report: Ended) -> Iterator[str]:
    """The summary at the job's end."""
    p = report.progress
    if p.skipped_steps:
        yield (
            f"{p.skipped_steps} of {p.step} steps changed nothing: their loss or gradient was not finite; first at step {p.first_skipped}. "
            "Mean losses are over the others"
        )
    if report.status == "done" and spec.load_best_model_at_end and p.best_step < 0 and not math.isfinite(p.eval_last or 0.0):
        yield "no evaluation had a finite loss, so none is the best: its adapter is that of the last step"
