"""The tables of a run's page as HTML that reads without any script. Every text from a file is escaped here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from tlora.report.looks import Look, mark
from tlora.report.rows import column
from tlora.report.run_view import JobView, RunView
from tlora.report.sparklines import SparkScale, spark_scale, sparkline
from tlora.wording.numbers import DASH, MINUS, count_text, duration_text, loss_text

_SHOWN_ELSEWHERE = ("jobs", "versions", "status", "started", "base_parameters")
_NUMBER = ' class="number"'


@dataclass(frozen=True)
class Cell:
    """A cell of ready HTML; `value` is what sorting compares under a head of numbers."""

    html: str
    value: float | None = None


@dataclass(frozen=True)
class Line:
    """A row of a table; `style` is a class of the page's style sheet."""

    cells: Sequence[Cell]
    style: str = ""


RESULT_HEADS = ("status", "#train loss", "trend", "#eval loss", "#best eval", "#steps", "#rank", "#tokens", "#time")


def results_table(jobs: Sequence[JobView], looks: Mapping[str, Look], window: int) -> str:
    """A row per job, in the order of the jobs file; the page's script sorts it by any column."""
    scale = spark_scale(jobs, window)
    rows = [Line((name_cell(job, looks[job.name]), *result_cells(job, scale, looks[job.name]))) for job in jobs]
    return table(("job", *RESULT_HEADS), rows) + trend_note(scale)


def name_cell(job: JobView, look: Look) -> Cell:
    reason = f'<div class="reason">{escape(job.reason)}</div>' if job.reason else ""
    return Cell(f"{mark(look)}{escape(job.name)}{reason}")


def result_cells(job: JobView, scale: SparkScale | None, look: Look) -> list[Cell]:
    """A job's cells under `RESULT_HEADS`."""
    steps = f"{job.steps:,}" + (f" / {job.total_steps:,}" if job.total_steps and job.total_steps != job.steps else "")
    best = loss_text(job.eval_loss_best) + (f' <span class="faint">@{job.best_step:,}</span>' if job.best_step is not None else "")
    return [
        _status_cell(job),
        Cell(change(job.train_loss_first, job.train_loss), job.train_loss),
        Cell(sparkline(job, scale, look)),
        Cell(change(job.eval_loss_first, job.eval_loss), job.eval_loss),
        Cell(best if job.eval_loss_best is not None else DASH, job.eval_loss_best),
        Cell(steps, job.steps),
        Cell(DASH if job.rank is None else str(job.rank), job.rank),
        Cell(f"{job.num_tokens:,}", job.num_tokens),
        Cell(duration_text(job.seconds), job.seconds),
    ]


def trend_note(scale: SparkScale | None) -> str:
    if scale is None:
        return ""
    return (
        f'<p class="faint">Trend: the train loss, averaged over about {scale.window} rows back, '
        f"all of this table on one scale ({scale.text()}).</p>"
    )


def _status_cell(job: JobView) -> Cell:
    left = "" if job.left_seconds is None else f'<div class="faint">about {duration_text(job.left_seconds)} left</div>'
    broken = "" if job.broken_step is None else f'<div class="bad">loss not finite from step {job.broken_step:,.0f}</div>'
    return Cell(f'<span class="status {_status_class(job.status)}">{escape(job.status)}</span>{left}{broken}')


def run_facts(run: RunView) -> str:
    """The run at a glance, as tiles."""
    counts: dict[str, int] = {}
    for job in run.jobs:
        counts[job.status] = counts.get(job.status, 0) + 1
    rates = [rate for rate in column(run.rows, "tokens_per_second") if math.isfinite(rate)]
    peak = f"; peak {_rate_text(max(rates))}" if rates else ""
    return _tiles(
        ("status", str(run.spec.get("status", "unknown")), _when(run)),
        ("jobs", str(len(run.jobs)), ", ".join(f"{count} {status}" for status, count in counts.items())),
        ("wall time", duration_text(run.seconds), _started(run.spec.get("started"))),
        ("throughput", _rate_text(_mean_rate(run, rates)), f"{run.num_tokens:,} tokens{peak}"),
    )


def run_machine(run: RunView) -> str:
    """Packing, base and device as tiles, versions, and under a fold everything else that run.json says."""
    tiles = _tiles(
        _packing_tile(run, "packing", "with a whole token budget on offer"),
        _packing_tile(run, "tail", "less than a token budget on offer", "tail_"),
        *_base_tile(run.spec.get("base_parameters")),
        ("device", str(run.spec.get("device", DASH)), ""),
    )
    return tiles + _settings(run)


def _tiles(*tiles: tuple[str, str, str]) -> str:
    shown = "".join(
        f'<div class="tile"><div class="label">{escape(label)}</div><div class="value">{escape(value)}</div>'
        f'<div class="faint">{escape(extra)}</div></div>'
        for label, value, extra in tiles
    )
    return f'<div class="tiles">{shown}</div>'


def _when(run: RunView) -> str:
    """When a run that goes on will end, as far as its jobs can tell."""
    if run.spec.get("status") in ("done", "stopped", "failed"):
        return ""
    left = [job.left_seconds for job in run.jobs if job.status == "training"]
    known = [seconds for seconds in left if seconds is not None]
    unknown = len(left) - len(known) + sum(job.status == "queued" for job in run.jobs)
    parts = [f"about {duration_text(max(known))} left"] if known else []
    parts += [f"{unknown} {'job' if unknown == 1 else 'jobs'} cannot be estimated yet"] if unknown else []
    return ", ".join([*parts, "as of the last row"]) if parts else ""


def _packing_tile(run: RunView, label: str, when: str, prefix: str = "") -> tuple[str, str, str]:
    """Padding and fill over the whole run, from the rows' counts: a mean of the rows would weigh a nearly idle second like a busy one."""
    sums = (
        sum(n for n in column(run.rows, prefix + key) if math.isfinite(n)) for key in ("tokens", "computed", "offered", "micro_batches")
    )
    tokens, computed, offered, micro_batches = sums
    if not computed or not offered:
        return label, DASH, f"no micro-batch {when}"
    padding = f"padding {100 * (1 - tokens / computed):.1f} %"
    return label, f"{100 * tokens / offered:.1f} % full", f"{padding}; {micro_batches:,.0f} micro-batches {when}"


def _base_tile(parameters: object) -> list[tuple[str, str, str]]:
    if not isinstance(parameters, int) or isinstance(parameters, bool) or parameters < 0:
        return []  # a run that was written before it was counted
    return [("base", count_text(parameters), f"{parameters:,} frozen parameters")]


def _rate_text(rate: float) -> str:
    return f"{count_text(rate)}/s" if math.isfinite(rate) else DASH


def _mean_rate(run: RunView, rates: Sequence[float]) -> float:
    """Mean of the rows, which are equally far apart; without rows, all trained tokens over the wall time."""
    if rates:
        return sum(rates) / len(rates)
    return run.num_tokens / run.seconds if run.seconds > 0 else math.nan


def _started(value: object) -> str:
    """The start as a date and minutes, from a Unix time or ISO 8601; other text as it is."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e11:
        return f"started {datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M} UTC"
    try:
        return f"started {datetime.fromisoformat(str(value)):%Y-%m-%d %H:%M %Z}".rstrip()
    except ValueError:
        return f"started {value}" if value else ""


def _settings(run: RunView) -> str:
    versions = run.spec.get("versions")
    facts = {key: value for key, value in run.spec.items() if key not in _SHOWN_ELSEWHERE}
    named = versions.items() if isinstance(versions, dict) else ()
    line = " · ".join(escape(f"{name} {version}") for name, version in named)
    listed = "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(_fact(value))}</dd>" for key, value in facts.items())
    fold = f"<details><summary>Settings of the run</summary><dl>{listed}</dl></details>" if listed else ""
    return (f'<p class="versions">{line}</p>' if line else "") + fold


def _fact(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def table(heads: Sequence[str], lines: Sequence[Line]) -> str:
    """A table that the page's script sorts; a head that begins with # stands over numbers, which are compared by value.

    The cell under `job`, `policy` or the first head names its row. On a narrow screen each row of a table with more than three columns
    becomes a block in which every cell has its head before it.
    """
    names = [name.removeprefix("#") for name in heads]
    styles = [_NUMBER if name[:1] == "#" else "" for name in heads]
    naming = next((at for at, name in enumerate(names) if name in ("job", "policy")), 0)
    head = "".join(f'<th scope="col"{style}>{escape(name)}</th>' for name, style in zip(names, styles, strict=True))
    rows: list[str] = []
    for line in lines:
        cells = [
            f'<th scope="row">{cell.html}</th>'
            if at == naming
            else f'<td{styles[at]}{_sort_key(cell.value)} data-label="{escape(names[at])}">{cell.html}</td>'
            for at, cell in enumerate(line.cells)
        ]
        rows.append(f"<tr{_class(line.style)}>{''.join(cells)}</tr>")
    kind = "sortable blocks" if len(heads) > 3 else "sortable"
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _sort_key(value: float | None) -> str:
    return f' data-value="{value!r}"' if value is not None and math.isfinite(value) else ""


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
    shown = f"{percent:+.0f}" if percent > -99 else f"{math.ceil(10 * percent) / 10:+.1f}"  # what is not zero has not fallen by 100 %
    return f'{text} <span class="change {"good" if last < first else "bad"}">{shown.replace("-", MINUS)} %</span>'


def _status_class(status: str) -> str:
    return status if status in ("done", "failed", "stopped", "training", "evaluating") else "waiting"
