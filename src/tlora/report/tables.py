"""The tables of a run's page as HTML that reads without any script. Every text from a file is escaped here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from tlora.report.rows import column, smooth, thin
from tlora.report.run_view import JobView, RunView
from tlora.report.wording import DASH, MINUS, count_text, duration_text, loss_text

_SPARK_POINTS = 60
_SHOWN_ELSEWHERE = ("jobs", "versions", "status", "started", "base_parameters")
_NUMBER = ' class="number"'


def results_table(jobs: Sequence[JobView], colours: Mapping[str, str]) -> str:
    """A row per job, in the order of the jobs file; the page's script sorts it by any column."""
    heads = ("job", "status", "#rank", "#steps", "#train loss", "", "#eval loss", "#best eval", "#tokens", "#time")
    return table(heads, [_result_row(job, colours[job.name]) for job in jobs])


def _result_row(job: JobView, colour: str) -> str:
    reason = f'<div class="reason">{escape(job.reason)}</div>' if job.reason else ""
    steps = f"{job.steps:,}" + (f" / {job.total_steps:,}" if job.total_steps and job.total_steps != job.steps else "")
    best = loss_text(job.eval_loss_best) + (f' <span class="faint">@{job.best_step:,}</span>' if job.best_step is not None else "")
    cells = (
        f'<th scope="row">{dot(colour)}{escape(job.name)}{reason}</th>',
        f'<td><span class="status {_status_class(job.status)}">{escape(job.status)}</span></td>',
        cell(DASH if job.rank is None else str(job.rank), job.rank),
        cell(steps, job.steps),
        cell(change(job.train_loss_first, job.train_loss), job.train_loss),
        f"<td>{_sparkline(column(job.train_rows, 'loss'), colour)}</td>",
        cell(change(job.eval_loss_first, job.eval_loss), job.eval_loss),
        cell(best if job.eval_loss_best is not None else DASH, job.eval_loss_best),
        cell(f"{job.num_tokens:,}", job.num_tokens),
        cell(duration_text(job.seconds), job.seconds),
    )
    return f'<tr data-job="{escape(job.name)}">{"".join(cells)}</tr>'


def run_facts(run: RunView) -> str:
    """The run at a glance (tiles), and under a fold everything run.json says about it."""
    spec = run.spec
    counts: dict[str, int] = {}
    for job in run.jobs:
        counts[job.status] = counts.get(job.status, 0) + 1
    rates = [rate for rate in column(run.rows, "tokens_per_second") if math.isfinite(rate)]
    tiles = (
        ("jobs", str(len(run.jobs)), ", ".join(f"{count} {status}" for status, count in counts.items())),
        ("tokens", count_text(run.num_tokens), f"{run.num_tokens:,}"),
        ("wall time", duration_text(run.seconds), ""),
        ("throughput", _rate_text(_mean_rate(run, rates)), f"tokens; peak {_rate_text(max(rates))}" if rates else "tokens"),
        _packing_tile(run, "packing", "with a whole token budget on offer"),
        _packing_tile(run, "tail", "less than a token budget on offer", "tail_"),
        *_base_tile(spec.get("base_parameters")),
        ("device", str(spec.get("device", DASH)), ""),
        ("status", str(spec.get("status", "unknown")), _started(spec.get("started"))),
    )
    shown = "".join(
        f'<div class="tile"><div class="label">{escape(label)}</div><div class="value">{escape(value)}</div>'
        f'<div class="faint">{escape(extra)}</div></div>'
        for label, value, extra in tiles
    )
    return f'<div class="tiles">{shown}</div>{_settings(run)}'


def _packing_tile(run: RunView, label: str, when: str, prefix: str = "") -> tuple[str, str, str]:
    """Padding and fill over the whole run, from the rows' counts: a mean of the rows would weigh a nearly idle second like a busy one."""
    sums = (
        sum(n for n in column(run.rows, prefix + key) if math.isfinite(n)) for key in ("tokens", "computed", "offered", "micro_batches")
    )
    tokens, computed, offered, micro_batches = sums
    if not computed or not offered:
        return label, DASH, f"no micro-batch {when}"
    shares = f"fill {100 * tokens / offered:.1f} %, padding {100 * (1 - tokens / computed):.1f} %"
    return label, shares, f"{micro_batches:,.0f} micro-batches {when}"


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


def table(heads: Sequence[str], rows: Sequence[str]) -> str:
    """A table that the page's script sorts; a head that begins with # stands over numbers, which are compared by value."""
    cells = [f'<th scope="col"{_NUMBER if name[:1] == "#" else ""}>{escape(name.removeprefix("#"))}</th>' for name in heads]
    head, body = "".join(cells), "".join(rows)
    return f'<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def cell(content: str, value: float | None) -> str:
    """A right-aligned cell of ready HTML; `value` is what sorting compares."""
    key = f' data-value="{value!r}"' if value is not None and math.isfinite(value) else ""
    return f'<td class="number"{key}>{content}</td>'


def change(first: float | None, last: float | None) -> str:
    """first → last and the change in percent, green when the loss fell."""
    if first is None or last is None:
        return loss_text(last)
    text = f"{loss_text(first)} → {loss_text(last)}"
    if not (math.isfinite(first) and math.isfinite(last)) or first <= 0 or first == last:
        return text
    percent = f"{100 * (last - first) / first:+.0f} %".replace("-", MINUS)
    return f'{text} <span class="change {"good" if last < first else "bad"}">{percent}</span>'


def dot(colour: str) -> str:
    return f'<span class="dot" style="background:{colour}"></span>'


def _status_class(status: str) -> str:
    return status if status in ("done", "failed", "stopped", "training", "evaluating") else "waiting"


def _sparkline(values: Sequence[float], colour: str, width: int = 110, height: int = 24) -> str:
    """The smoothed curve as an inline picture of a few hundred bytes; nothing for fewer than two finite values."""
    curve = smooth(values)
    points = [(index, curve[index]) for index in thin([curve], _SPARK_POINTS) if math.isfinite(curve[index])] if curve else []
    if len(points) < 2:
        return ""
    low, high = min(value for _, value in points), max(value for _, value in points)
    across, up = (width - 4) / max(1, len(values) - 1), (height - 4) / ((high - low) or 1)
    path = " ".join(f"{2 + index * across:.1f},{height - 2 - (value - low) * up:.1f}" for index, value in points)
    return (
        f'<svg class="spark" width="{width}" height="{height}" viewBox="0 0 {width} {height}" aria-hidden="true">'
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-linejoin="round"/></svg>'
    )
