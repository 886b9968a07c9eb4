"""A run's report: reads the run directory, arranges tables and charts, writes report.html. Trains nothing, changes no other file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tlora import durable
from tlora.errors import CheckpointError, ConfigError
from tlora.report.charts import job_curves, learning_charts, run_charts
from tlora.report.line_styles import LineStyle, job_looks, keys_html, swept_fields, swept_values
from tlora.report.page import Chart, LegendEntry, Section, render_page
from tlora.report.rows import number, smoothing_window
from tlora.report.run_view import JobView, RunView, read_run
from tlora.report.tables import (
    RESULT_HEADS,
    Cell,
    TableRow,
    gpus_table,
    loss_note,
    name_cell,
    result_cells,
    results_table,
    run_facts,
    run_machine,
    spark_scale,
    table,
    trend_note,
)
from tlora.wording.losses import incomparable
from tlora.wording.numbers import DASH, duration_text, loss_text, quantity, setting_text, settings_text

_IN_SWEEP_COLUMNS = ("#best eval", "#rank")  # columns of the results that a sweep has as its score and its fields
_BY_TRAIN = "last train loss"  # what a sweep is ranked by that has no evaluation
_RISEN = 1.05  # a last loss above this times the first is more than a batch's noise


def sweep_sections(jobs: Sequence[JobView], looks: Mapping[str, LineStyle], window: int) -> list[Section]:
    """A section for each sweep among `jobs`, in file order."""
    names = dict.fromkeys(job.sweep_of for job in jobs if job.sweep_of)
    sections: list[Section] = []
    for name in names:
        members = [job for job in jobs if job.sweep_of == name]
        heat_map = sweep_heat_map(members)
        html = sweep_verdict(members) + sweep_table(members, looks, window)
        sections.append(Section(f"Sweep \u201c{name}\u201d, best first", html, (heat_map,) if heat_map else ()))
    return sections


def sweep_verdict(jobs: Sequence[JobView]) -> Markup:
    """The best job, the jobs that diverged or failed, and when the sweep ends."""
    best, *others = best_first(jobs)
    going = [job for job in jobs if job.status in ("training", "queued")]
    lines: list[Markup] = []
    if (score := known_score(best, jobs)) is not None:
        second = known_score(others[0], jobs) if others else None
        next_best = "" if second is None else f"; the next best, {others[0].name}: {loss_text(second)}"
        words = ("Best so far" if going else "Best", best.name, settings_text(best.settings), score_name(jobs), loss_text(score), next_best)
        lines.append(Markup("{}: <b>{}</b> ({}), {} <b>{}</b>{}.").format(*words))
    if score is not None and (why := incomparable([job.order for job in jobs], score_name(jobs) != _BY_TRAIN)):
        lines.append(Markup('<span class="bad">{}.</span>').format(why[0].upper() + why[1:]))
    wrong = [f"{job.name} ({trouble})" for job in jobs if (trouble := _trouble(job))]
    if wrong:
        failed = Markup('<span class="bad">Diverged or failed, {} of {}:</span> {}.')
        lines.append(failed.format(len(wrong), len(jobs), ", ".join(wrong)))
    elif any(job.train_rows for job in jobs):
        lines.append(Markup("No job diverged or failed."))
    if going:
        left = [seconds for job in going if (seconds := job.left_seconds) is not None]
        ends = f", about {duration_text(max(left))} left" if len(left) == len(going) else ""
        lines.append(Markup("{} of {} still running{}.").format(len(going), len(jobs), ends))
    return Markup().join(Markup('<p class="verdict">{}</p>').format(line) for line in lines)


def _trouble(job: JobView) -> str:
    """A job's problem, in words; empty if it has none."""
    if job.status == "failed":
        return "failed"
    if job.broken_step is not None:
        return f"loss not finite from step {job.broken_step:,.0f}"
    first, last = job.train_loss_first, job.train_loss
    return f"loss rose from {loss_text(first)} to {loss_text(last)}" if first and last and last > _RISEN * first > 0 else ""


def sweep_table(jobs: Sequence[JobView], looks: Mapping[str, LineStyle], window: int) -> Markup:
    """The jobs of one sweep, best first, with the values that they differ in."""
    fields, scale = swept_fields(jobs), spark_scale(jobs, window)
    kept = [at for at, head in enumerate(RESULT_HEADS) if head not in _IN_SWEEP_COLUMNS]
    rows: list[TableRow] = []
    for place, job in enumerate(best_first(jobs), start=1):
        score, results = known_score(job, jobs), result_cells(job, scale, looks[job.name])
        cells = (
            Cell(DASH if score is None else str(place), place),
            name_cell(job, looks[job.name]),
            *(Cell(setting_text(job.settings.get(field, DASH)), number(job.settings.get(field))) for field in fields),
            Cell(Markup("<b>{}</b>").format(loss_text(score_of(job, jobs))), score),
            *(results[at] for at in kept),
        )
        rows.append(TableRow(cells, "winner" if place == 1 and score is not None else ""))
    heads = ("#place", "job", *(f"#{field}" for field in fields), f"#{score_name(jobs)}", *(RESULT_HEADS[at] for at in kept))
    return table(heads, rows) + loss_note(jobs) + trend_note(scale)


def score_of(job: JobView, jobs: Sequence[JobView]) -> float | None:
    """The score of a sweep's job: the best eval loss since training began, or the last train loss if no job was evaluated since."""
    return job.trained_eval_best if any(other.trained_eval_best is not None for other in jobs) else job.train_loss


def known_score(job: JobView, jobs: Sequence[JobView]) -> float | None:
    """The score if it is finite."""
    score = score_of(job, jobs)
    return score if score is not None and math.isfinite(score) else None


def score_name(jobs: Sequence[JobView]) -> str:
    return "best eval loss" if any(job.trained_eval_best is not None for job in jobs) else _BY_TRAIN


def best_first(jobs: Sequence[JobView]) -> list[JobView]:
    """Jobs by score; those without a finite one last, in file order."""

    def rank(job: JobView) -> tuple[bool, float]:
        score = known_score(job, jobs)
        return score is None, score or 0.0

    return sorted(jobs, key=rank)


def sweep_heat_map(jobs: Sequence[JobView]) -> Chart | None:
    """The score over the two swept fields; None for another number of fields."""
    fields = swept_fields(jobs)
    if len(fields) != 2:
        return None
    vertical, horizontal = sorted(fields, key=lambda field: len({setting_text(job.settings.get(field)) for job in jobs}))
    rows, columns = (swept_values(jobs, field) for field in (vertical, horizontal))
    cells: dict[tuple[str, str], JobView] = {
        (setting_text(job.settings.get(vertical)), setting_text(job.settings.get(horizontal))): job for job in reversed(best_first(jobs))
    }
    best = best_first(jobs)[0]

    def grid(value: Callable[[JobView], Any]) -> list[list[Any]]:
        return [[value(cells[row, at]) if (row, at) in cells else None for at in columns] for row in rows]

    def words(job: JobView) -> str:
        score = known_score(job, jobs)
        return escape(job.status) if score is None else ("★ " if job is best else "") + loss_text(score)

    trace = {
        "type": "heatmap",
        "x": [escape(value) for value in columns],
        "y": [escape(value) for value in rows],
        "z": grid(lambda job: score_of(job, jobs)),
        "text": [[text or "" for text in line] for line in grid(words)],
        "customdata": [[name or "" for name in line] for line in grid(lambda job: escape(job.name))],
        "texttemplate": "%{text}",
        "colorscale": "Viridis",
        "reversescale": True,
        "xgap": 3,
        "ygap": 3,
        "showscale": False,  # the numbers are in the cells
        "hovertemplate": "<b>%{customdata}</b><br>%{z:.4f}<extra></extra>",
    }
    layout = {
        "height": max(200, 110 + 48 * len(rows)),
        "xaxis": {"type": "category", "title": {"text": escape(horizontal)}, "showgrid": False},
        "yaxis": {"type": "category", "title": {"text": escape(vertical)}, "showgrid": False},
    }
    return Chart(
        f"{score_name(jobs).capitalize()} over {vertical} and {horizontal}", {"data": [trace], "layout": layout}, wide=len(columns) > 6
    )


def write_report(run_dir: Path) -> Path:
    """Write `run_dir`/report.html from the rows there are, atomically, and return its path. The run of a cluster's output directory is in
    `jobs/` there.

    ConfigError if `run_dir` has no run or cannot be written.
    """
    if not (run_dir / "run.json").exists() and (run_dir / "jobs" / "run.json").is_file():
        run_dir /= "jobs"
    page = report_page(read_run(run_dir))
    target = run_dir / "report.html"
    try:
        durable.write_file(target, page)
    except CheckpointError as error:  # its remedies are for a training run
        reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else str(error)
        raise ConfigError(
            f"{target} cannot be written ({reason}): the report needs about 3 MB and write permission in the run's directory; "
            "free space or change its mode, then run `tlora report` again"
        ) from error
    return target


def report_page(run: RunView) -> str:
    """The page of one run: first each job's result, last how the machine was used."""
    looks = job_looks(run.jobs)
    curves = job_curves(run, looks)
    window = smoothing_window(max((len(job.train_rows) for job in run.jobs), default=0))
    learning, over_time = learning_charts(run, curves), run_charts(run, curves)
    legend = [LegendEntry(curve.job.name, looks[curve.job.name]) for curve in curves] if learning or over_time else []
    empty = "" if legend else Markup('<p class="faint">No rows yet: the charts appear once the first optimizer step is logged.</p>')
    single = [job for job in run.jobs if not job.sweep_of]
    sections = [Section("", run_facts(run)), *sweep_sections(run.jobs, looks, window)]
    if single:
        sections.append(Section("Results", results_table(single, looks, window)))
    sections += [
        Section("Curves", empty + keys_html(run.jobs), [*learning, *over_time], legend),
        Section("Run", run_machine(run) + gpus_table(run)),
    ]
    return render_page(_title(run), sections)


def _title(run: RunView) -> str:
    base = str(run.spec.get("base_model") or "an unknown base")
    if Path(base).is_absolute() or base.startswith("."):
        base = Path(base).name  # the last part names the model; the settings have the whole path
    return f"{quantity(len(run.jobs), 'LoRA job')} over {base}"
