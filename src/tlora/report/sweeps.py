"""A sweep's jobs, best first: what they are ranked by, their table, and a heat map when two fields were swept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from tlora.report.page import Chart, Section
from tlora.report.rows import number
from tlora.report.run_view import JobView
from tlora.report.tables import cell, change, dot, table
from tlora.report.wording import DASH, duration_text, loss_text, setting_text


def sweep_sections(jobs: Sequence[JobView], colours: Mapping[str, str]) -> list[Section]:
    """A section for each sweep among `jobs`, in file order."""
    names = dict.fromkeys(job.sweep_of for job in jobs if job.sweep_of)
    sections: list[Section] = []
    for name in names:
        members = [job for job in jobs if job.sweep_of == name]
        heat_map = sweep_heat_map(members)
        sections.append(Section(f"Sweep \u201c{name}\u201d, best first", sweep_table(members, colours), (heat_map,) if heat_map else ()))
    return sections


def sweep_table(jobs: Sequence[JobView], colours: Mapping[str, str]) -> str:
    """The jobs of one sweep, best first, with the values that they differ in."""
    fields = swept_fields(jobs)
    heads = ("#", "job", *(f"#{field}" for field in fields), f"#{score_name(jobs)}", "#train loss", "#eval loss", "#tokens", "#time")
    rows: list[str] = []
    for place, job in enumerate(best_first(jobs), start=1):
        score = score_of(job, jobs)
        known = score is not None and math.isfinite(score)
        cells = (
            cell(str(place) if known else DASH, place),
            f'<th scope="row">{dot(colours[job.name])}{escape(job.name)}</th>',
            *(cell(escape(setting_text(job.settings.get(field, DASH))), number(job.settings.get(field))) for field in fields),
            cell(f"<b>{loss_text(score)}</b>", score),
            cell(change(job.train_loss_first, job.train_loss), job.train_loss),
            cell(change(job.eval_loss_first, job.eval_loss), job.eval_loss),
            cell(f"{job.num_tokens:,}", job.num_tokens),
            cell(duration_text(job.seconds), job.seconds),
        )
        rows.append(('<tr class="winner">' if place == 1 and known else "<tr>") + "".join(cells) + "</tr>")
    return table(heads, rows)


def swept_fields(jobs: Sequence[JobView]) -> list[str]:
    """The fields that a sweep varies, in the order in which its jobs name them."""
    return list(dict.fromkeys(field for job in jobs for field in job.settings))


def score_of(job: JobView, jobs: Sequence[JobView]) -> float | None:
    """What a sweep is ranked by: the best eval loss, or the last train loss when no job of it was evaluated."""
    return job.eval_loss_best if any(other.eval_loss_best is not None for other in jobs) else job.train_loss


def score_name(jobs: Sequence[JobView]) -> str:
    return "best eval loss" if any(job.eval_loss_best is not None for job in jobs) else "last train loss"


def best_first(jobs: Sequence[JobView]) -> list[JobView]:
    """Jobs by score; those without a finite one last, in file order."""

    def rank(job: JobView) -> tuple[bool, float]:
        score = score_of(job, jobs)
        return (False, score) if score is not None and math.isfinite(score) else (True, 0.0)

    return sorted(jobs, key=rank)


def sweep_heat_map(jobs: Sequence[JobView]) -> Chart | None:
    """The score over the two fields that a sweep varies; None for another number of fields."""
    fields = swept_fields(jobs)
    if len(fields) != 2:
        return None
    vertical, horizontal = sorted(fields, key=lambda field: len({setting_text(job.settings.get(field)) for job in jobs}))
    rows, columns = (_swept_values(jobs, field) for field in (vertical, horizontal))
    cells: dict[tuple[str, str], JobView] = {
        (setting_text(job.settings.get(vertical)), setting_text(job.settings.get(horizontal))): job for job in reversed(best_first(jobs))
    }
    best = best_first(jobs)[0]

    def grid(value: Callable[[JobView], Any]) -> list[list[Any]]:
        return [[value(cells[row, at]) if (row, at) in cells else None for at in columns] for row in rows]

    def words(job: JobView) -> str:
        score = score_of(job, jobs)
        known = score is not None and math.isfinite(score)
        return ("★ " if job is best else "") + loss_text(score) if known else escape(job.status)

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
        "showscale": False,  # the numbers stand in the cells
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


def _swept_values(jobs: Sequence[JobView], field: str) -> list[str]:
    """The values of one field as written: numbers in their order, others as they came."""
    values = list(dict.fromkeys((number(job.settings.get(field)), setting_text(job.settings.get(field))) for job in jobs))
    if all(math.isfinite(size) for size, _ in values):
        values.sort(key=lambda pair: pair[0])
    return list(dict.fromkeys(text for _, text in values))
