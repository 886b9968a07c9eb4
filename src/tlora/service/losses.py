"""A job's losses from its metrics, as lines of a picture: the newest part of the file, thinned out to what can be seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora.report.rows import read_rows
from tlora.wording.losses import recent_loss

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Losses:
    """(step, loss) in order. `train_loss` is the mean over the last steps; `tokens_per_second` is of the last row."""

    train: Points = ()
    evaluation: Points = ()
    train_loss: float | None = None
    tokens_per_second: float | None = None

    @property
    def steps(self) -> tuple[float, float]:
        found = [step for step, _ in (*self.train, *self.evaluation)]
        return (min(found), max(found)) if found else (0.0, 0.0)

    @property
    def range(self) -> tuple[float, float]:
        found = [loss for _, loss in (*self.train, *self.evaluation)]
        return (min(found), max(found)) if found else (0.0, 0.0)

    def line(self, points: Points, width: float, height: float) -> str:
        """`points` for an SVG polyline in a box of this size; one value alone is a level line."""
        placed = self._placed(points, width, height)
        if len(placed) == 1:
            placed = [(0.0, placed[0][1]), (width, placed[0][1])]
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)

    def dots(self, points: Points, width: float, height: float) -> str:
        """`points` for an SVG path whose round line ends are dots."""
        return " ".join(f"M{x:.1f},{y:.1f}h0" for x, y in self._placed(points, width, height))

    def _placed(self, points: Points, width: float, height: float) -> list[tuple[float, float]]:
        (first, last), (low, high) = self.steps, self.range
        across, up = last - first or 1.0, high - low or 1.0
        return [((step - first) / across * width, height - (loss - low) / up * height) for step, loss in points]


def read_losses(path: Path, most_bytes: int, most_points: int) -> Losses:
    """From the last `most_bytes` of a `metrics.jsonl`; none without one."""
    rows = read_rows(path, most_bytes)
    train, evaluation = _points(rows, "loss"), _points(rows, "eval_loss")
    rates = [float(rate) for row in rows if isinstance(rate := row.get("tokens_per_second"), int | float)]
    return Losses(_thinned(train, most_points), _thinned(evaluation, most_points), recent_loss(rows), rates[-1] if rates else None)


def _points(rows: Sequence[dict[str, Any]], key: str) -> Points:
    pairs = ((row.get("step"), row.get(key)) for row in rows)
    return tuple(
        (float(step), float(loss))
        for step, loss in pairs
        if isinstance(step, int | float) and isinstance(loss, int | float) and math.isfinite(loss)
    )


def _thinned(points: Points, most: int) -> Points:
    """Means over equal stretches, so that a curve of a million steps is drawn in an instant."""
    if len(points) <= most:
        return points
    found: list[tuple[float, float]] = []
    for index in range(most):
        part = points[index * len(points) // most : (index + 1) * len(points) // most]
        found.append((part[-1][0], sum(loss for _, loss in part) / len(part)))
    return tuple(found)
