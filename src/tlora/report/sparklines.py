"""A job's train loss as a small chart in a table's row. All jobs of a table are drawn on one scale, so that equal jobs look equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tlora.report.looks import DASHES, Look
from tlora.report.rows import column, smooth, thin
from tlora.report.run_view import JobView
from tlora.wording.numbers import loss_text

_POINTS = 60
_WIDTH, _HEIGHT, _EDGE = 120, 30, 2
_LEAST_SPAN = math.log10(2)  # what falls by a few percent must look nearly flat


@dataclass(frozen=True)
class SparkScale:
    """The range of the losses of several jobs: from `low` to `high` (log10 of them unless `linear`), over steps up to `steps`."""

    low: float
    high: float
    steps: float
    linear: bool
    window: int

    def height(self, loss: float) -> float:
        """From 0 at the bottom to 1 at the top. On a log scale, values of zero or below are at the bottom."""
        at = loss if self.linear else math.log10(loss) if loss > 0 else self.low
        return (min(max(at, self.low), self.high) - self.low) / (self.high - self.low)

    def text(self) -> str:
        low, high = (value if self.linear else 10**value for value in (self.low, self.high))
        return f"{'linear' if self.linear else 'log'}, {loss_text(low)} to {loss_text(high)}, steps to {self.steps:,.0f}"


def spark_scale(jobs: Sequence[JobView], window: int) -> SparkScale | None:
    """One scale for all `jobs`; None when none of them has two finite losses."""
    curves = [_averages(job, window) for job in jobs]
    points = [point for curve in curves if len(curve) > 1 for point in curve]
    if not points:
        return None
    positive = [loss for _, loss in points if loss > 0]
    losses = [math.log10(loss) for loss in positive] or [loss for _, loss in points]
    middle, half = (min(losses) + max(losses)) / 2, max(max(losses) - min(losses), _LEAST_SPAN) / 2
    return SparkScale(middle - half, middle + half, max(step for step, _ in points), not positive, window)


def sparkline(job: JobView, scale: SparkScale | None, look: Look) -> Markup:
    """The averaged losses as an inline SVG of a few hundred bytes; empty for fewer than two finite values."""
    points = _averages(job, scale.window) if scale else []
    if scale is None or len(points) < 2:
        return Markup()
    across, up = (_WIDTH - 2 * _EDGE) / (scale.steps or 1), _HEIGHT - 2 * _EDGE
    kept = thin([[loss for _, loss in points]], _POINTS)
    path = " ".join(f"{_EDGE + points[at][0] * across:.1f},{_HEIGHT - _EDGE - scale.height(points[at][1]) * up:.1f}" for at in kept)
    svg = Markup(
        '<svg class="spark" width="{0}" height="{1}" viewBox="0 0 {0} {1}" aria-hidden="true"><polyline points="{2}" fill="none"'
        ' stroke="{3}" stroke-width="1.6" stroke-linejoin="round" stroke-dasharray="{4}"/></svg>'
    )
    return svg.format(_WIDTH, _HEIGHT, path, look.colour, DASHES[look.dash])


def _averages(job: JobView, window: int) -> list[tuple[float, float]]:
    """(step, trailing average of the loss) where both are finite."""
    steps, losses = column(job.train_rows, "step"), smooth(column(job.train_rows, "loss"), window)
    return [(step, loss) for step, loss in zip(steps, losses, strict=True) if math.isfinite(step) and math.isfinite(loss)]
