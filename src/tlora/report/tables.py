"""The tables of a run's page, as HTML that needs no script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from markupsafe import Markup

from tlora.report.line_styles import DASHES, LineStyle, mark, render
from tlora.report.rows import column, smooth, thin
from tlora.report.run_view import ENDED, KILLED, JobView, RunView
from tlora.wording.losses import RECENT_STEPS
from tlora.wording.numbers import DASH, MINUS, count_text, duration_text, loss_text, place_names, quantity

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


def sparkline(job: JobView, scale: SparkScale | None, look: LineStyle) -> Markup:
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


_SHOWN_ELSEWHERE = ("jobs", "versions", "status", "started", "base_parameters", "gpus", "homes", "spans", "kernels")


@dataclass(frozen=True)
class Cell:
    """A cell's text (escaped unless it is Markup); `value` is the sort key in a column of numbers."""

    content: str
    value: float | None = None

    @property
    def is_sortable(self) -> bool:
        return self.value is not None and math.isfinite(self.value)


@dataclass(frozen=True)
class TableRow:
    """A row of a table; `style` is a class of the page's style sheet."""

    cells: Sequence[Cell]
    style: str = ""


RESULT_HEADS = ("status", "#train loss", "trend", "#eval loss", "#best eval", "#steps", "#rank", "#tokens", "#time")


def results_table(jobs: Sequence[JobView], looks: Mapping[str, LineStyle], window: int) -> Markup:
    """A row per job, in the order of the jobs file; the page's script sorts it by any column."""
    scale = spark_scale(jobs, window)
    rows = [TableRow((name_cell(job, looks[job.name]), *result_cells(job, scale, looks[job.name]))) for job in jobs]
    return table(("job", *RESULT_HEADS), rows) + loss_note(jobs) + trend_note(scale)


def name_cell(job: JobView, look: LineStyle) -> Cell:
    reason = Markup('<div class="reason">{}</div>').format(job.reason) if job.reason else ""
    return Cell(Markup("{}{}{}").format(mark(look), job.name, reason))


def result_cells(job: JobView, scale: SparkScale | None, look: LineStyle) -> list[Cell]:
    """A job's cells under `RESULT_HEADS`."""
    steps = f"{job.steps:,}" + (f" / {job.total_steps:,}" if job.total_steps and job.total_steps != job.steps else "")
    step = "" if job.best_step is None else Markup(' <span class="faint">@{:,}</span>').format(job.best_step)
    return [
        _status_cell(job),
        Cell(change(job.train_loss_first, job.train_loss), job.train_loss),
        Cell(sparkline(job, scale, look)),
        Cell(change(job.eval_loss_first, job.eval_loss), job.eval_loss),
        Cell(DASH if job.eval_loss_best is None else loss_text(job.eval_loss_best) + step, job.eval_loss_best),
        Cell(steps, job.steps),
        Cell(DASH if job.rank is None else str(job.rank), job.rank),
        Cell(f"{job.num_tokens:,}", job.num_tokens),
        Cell(duration_text(job.seconds), job.seconds),
    ]


def loss_note(jobs: Sequence[JobView]) -> Markup:
    """The caption of the column of train losses; empty where no job has one."""
    text = '<p class="faint">Train loss: of the first step, and the mean over the last {} steps.</p>'
    return Markup(text).format(RECENT_STEPS) if any(job.train_loss is not None for job in jobs) else Markup()


def trend_note(scale: SparkScale | None) -> Markup:
    """The caption of the trend column; empty if no trend is drawn."""
    text = '<p class="faint">Trend: the train loss, averaged over about {} rows back, all of this table on one scale ({}).</p>'
    return Markup(text).format(scale.window, scale.text()) if scale else Markup()


def _status_cell(job: JobView) -> Cell:
    cell = Markup('<span class="status {}">{}</span>').format(_status_class(job.status), job.status)
    if job.gpu is not None:
        numbers = ", ".join(map(str, (job.gpu, *job.parts_on)))
        cell += Markup('<div class="faint">{} {}</div>').format(place_names(job.device)[bool(job.parts_on)], numbers)
    if job.left_seconds is not None:
        cell += Markup('<div class="faint">about {} left</div>').format(duration_text(job.left_seconds))
    if job.broken_step is not None:
        cell += Markup('<div class="bad">loss not finite from step {:,.0f}</div>').format(job.broken_step)
    return Cell(cell)


def run_facts(run: RunView) -> Markup:
    """The run at a glance, as tiles."""
    counts: dict[str, int] = {}
    for job in run.jobs:
        counts[job.status] = counts.get(job.status, 0) + 1
    rates = [rate for rate in column(run.rows, "tokens_per_second") if math.isfinite(rate)]
    peak = f"; peak {_rate_text(max(rates))}" if rates else ""
    tiles = (
        ("status", str(run.spec.get("status", "unknown")), _when(run)),
        ("jobs", str(len(run.jobs)), ", ".join(f"{count} {status}" for status, count in counts.items())),
        ("wall time", duration_text(run.seconds), _started(run.spec.get("started"))),
        ("throughput", _rate_text(_mean_rate(run, rates)), f"{run.num_tokens:,} tokens{peak}"),
    )
    return render("tiles.html", tiles=tiles)


def run_machine(run: RunView) -> Markup:
    """Packing, base and device as tiles, versions, and, folded, everything else in run.json."""
    tiles = (
        _packing_tile(run, "packing", "with a whole token budget on offer"),
        _packing_tile(run, "tail", "less than a token budget on offer", "tail_"),
        *_base_tile(run.spec.get("base_parameters")),
        ("device", _device(run), f"kernels: {kernels}" if isinstance(kernels := run.spec.get("kernels"), str) else ""),
    )
    versions = run.spec.get("versions")
    named = versions.items() if isinstance(versions, dict) else ()
    facts = [(key, _fact(value)) for key, value in run.spec.items() if key not in _SHOWN_ELSEWHERE]
    line = " · ".join(f"{name} {version}" for name, version in named)
    return render("tiles.html", tiles=tiles) + render("settings.html", versions=line, title="Settings of the run", facts=facts)


_WAITS = {"exchange_wait_seconds": "waited for other GPUs", "fetch_wait_seconds": "waited for the base's layers"}


def gpus_table(run: RunView) -> Markup:
    """Each GPU's work, and how long it waited without computing; empty for a run on one GPU."""
    gpus = run.spec.get("gpus")
    if not isinstance(gpus, dict) or len(gpus) < 2:
        return Markup()
    waits = {key: title for key, title in _WAITS.items() if any(key in facts for facts in gpus.values())}
    heads = (place_names(_device(run))[0], "jobs", "#token budget", *(f"#{title}" for title in waits.values()))
    lines: list[TableRow] = []
    for number, facts in gpus.items():
        jobs = [job.name for job in run.jobs if str(job.gpu) == number]
        jobs += [f"a part of {job.name}" for job in run.jobs if number in map(str, job.parts_on)]
        budget = facts.get("token_budget")
        cells = [Cell(number), Cell(", ".join(jobs) or DASH), Cell(f"{budget:,}" if isinstance(budget, int) else DASH, budget)]
        for key in waits:
            seconds = facts.get(key)
            cells.append(Cell(duration_text(seconds), seconds) if isinstance(seconds, int | float) else Cell(DASH))
        lines.append(TableRow(cells))
    return table(heads, lines)


def _device(run: RunView) -> str:
    name, gpus = str(run.spec.get("device", DASH)), run.spec.get("gpus")
    return f"{len(gpus)} of {name}" if isinstance(gpus, dict) and len(gpus) > 1 else name


def _when(run: RunView) -> str:
    """When a running run ends, as far as it can be estimated from its jobs; what to do about a killed one."""
    if run.spec.get("status") == KILLED:
        return "its process is gone; the same command continues it, `tlora train` with --resume"
    if run.spec.get("status") in ENDED:
        return ""
    left = [job.left_seconds for job in run.jobs if job.status == "training"]
    known = [seconds for seconds in left if seconds is not None]
    unknown = len(left) - len(known) + sum(job.status == "queued" for job in run.jobs)
    parts = [f"about {duration_text(max(known))} left"] if known else []
    parts += [f"{quantity(unknown, 'job')} cannot be estimated yet"] if unknown else []
    return ", ".join([*parts, "as of the last row"]) if parts else ""


def _packing_tile(run: RunView, label: str, when: str, prefix: str = "") -> tuple[str, str, str]:
    """Padding and fill over the whole run, from the rows' counts: a mean of the rows would weight a nearly idle second like a busy one."""
    sums = (
        sum(n for n in column(run.rows, prefix + key) if math.isfinite(n)) for key in ("tokens", "computed", "offered", "micro_batches")
    )
    tokens, computed, offered, micro_batches = sums
    if not computed or not offered:
        return label, DASH, f"no micro-batch {when}"
    counted = quantity(round(micro_batches), "micro-batch", "micro-batches")
    return label, f"{100 * tokens / offered:.1f} % full", f"padding {100 * (1 - tokens / computed):.1f} %; {counted} {when}"


def _base_tile(parameters: object) -> list[tuple[str, str, str]]:
    if not isinstance(parameters, int) or isinstance(parameters, bool) or parameters < 0:
        return []  # a run of before this was recorded
    return [("base", count_text(parameters), f"{parameters:,} frozen parameters")]


def _rate_text(rate: float) -> str:
    return f"{count_text(rate)}/s" if math.isfinite(rate) else DASH


def _mean_rate(run: RunView, rates: Sequence[float]) -> float:
    """Mean of the rows, which are equally far apart; without rows, all trained tokens over the wall time."""
    if rates:
        return sum(rates) / len(rates)
    return run.num_tokens / run.seconds if run.seconds > 0 else math.nan


def _started(value: object) -> str:
    """The start as a date and minutes, from a Unix time or ISO 8601; other text unchanged."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e11:
        return f"started {datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M} UTC"
    try:
        return f"started {datetime.fromisoformat(str(value)):%Y-%m-%d %H:%M %Z}".rstrip()
    except ValueError:
        return f"started {value}" if value else ""


def _fact(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def table(heads: Sequence[str], lines: Sequence[TableRow]) -> Markup:
    """A table that the page's script sorts; a head that begins with # marks a column of numbers, compared by value.

    The cell under `job`, `policy` or the first head names its row. On a narrow screen each row of a table with more than three columns
    becomes a block in which each cell follows its head.
    """
    columns = [(head.removeprefix("#"), head.startswith("#")) for head in heads]
    naming = next((at for at, (name, _) in enumerate(columns) if name in ("job", "policy")), 0)
    return render("table.html", heads=columns, lines=lines, naming=naming)


def change(first: float | None, last: float | None) -> str:
    """first → last and the change in percent, green when the loss fell; no percent where it rounds to nothing."""
    if first is None or last is None:
        return loss_text(last)
    text = f"{loss_text(first)} → {loss_text(last)}"
    if not (math.isfinite(first) and math.isfinite(last)) or first <= 0:
        return text
    percent = 100 * (last - first) / first
    if abs(percent) < 0.5:
        return text
    shown = f"{percent:+.0f}" if percent > -99 else f"{math.ceil(10 * percent) / 10:+.1f}"  # a loss above zero has not fallen by 100 %
    span = Markup('{} <span class="change {}">{} %</span>')
    return span.format(text, "good" if last < first else "bad", shown.replace("-", MINUS))


def _status_class(status: str) -> str:
    return status if status in ("done", "failed", "stopped", "training", "evaluating") else "waiting"
