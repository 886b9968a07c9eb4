"""What "train loss" means wherever it is shown: the mean over a job's last steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

RECENT_STEPS = 10


def recent_loss(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """The mean over the rows of `metrics.jsonl` that the last `RECENT_STEPS` steps are in, of those that are finite; None without any.

    With `logging_steps: 1` this is the `train_loss` of `result.json`; a row of more steps counts with all of them.
    """
    losses = [(row["step"], row["loss"]) for row in rows if _is_number(row.get("step")) and "loss" in row]
    recent = [loss for step, loss in losses if step > losses[-1][0] - RECENT_STEPS]
    finite = [float(loss) for loss in recent if _is_number(loss)]
    return sum(finite) / len(finite) if finite else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
