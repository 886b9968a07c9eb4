"""How each job is drawn: by the values that its sweep varies, where there are any, and what the colours and dashes mean.

The numeric field with most values gives the colour, along a sequence from blue to gold whose steps colour-blind eyes see too; the next
field gives the dash. Jobs outside a sweep get six categorical colours, then the same ones dashed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from tlora.report.looks import CATEGORIES, DASHES, Look, job_colours, sequence_colours
from tlora.report.rows import number
from tlora.report.run_view import JobView
from tlora.report.templates import render
from tlora.wording.numbers import setting_text

_MISSING = "#8a929c"  # of a job without the field, and of the key's dashes
_KEY_VALUES = 24  # of a field that are all in the key; of more, an even choice


def swept_fields(jobs: Sequence[JobView]) -> list[str]:
    """The fields that a sweep varies, in the order in which its jobs name them."""
    return list(dict.fromkeys(field for job in jobs for field in job.settings))


def swept_values(jobs: Sequence[JobView], field: str) -> list[str]:
    """The values of one field as written: numbers in their order, others as they came."""
    values = list(dict.fromkeys((number(job.settings[field]), setting_text(job.settings[field])) for job in jobs if field in job.settings))
    if all(math.isfinite(size) for size, _ in values):
        values.sort(key=lambda pair: pair[0])
    return list(dict.fromkeys(text for _, text in values))


def job_looks(jobs: Sequence[JobView]) -> dict[str, Look]:
    """A look for each job's name."""
    names = dict.fromkeys(job.sweep_of for job in jobs if job.sweep_of)
    looks: dict[str, Look] = {}
    for name in names:
        looks |= _sweep_looks([job for job in jobs if job.sweep_of == name])
    others = [job.name for job in jobs if job.name not in looks]
    colours, dashes = job_colours(min(len(others), CATEGORIES)), list(DASHES)
    return looks | {name: Look(colours[at % CATEGORIES], dashes[at // CATEGORIES % len(dashes)]) for at, name in enumerate(others)}


def _coded_fields(jobs: Sequence[JobView]) -> list[str]:
    """The fields with several values: that of the colour first, that of the dash second."""
    several = [field for field in swept_fields(jobs) if len(swept_values(jobs, field)) > 1]

    def weight(field: str) -> tuple[bool, int]:
        return not _is_numeric(jobs, field), -len(swept_values(jobs, field))

    return sorted(several, key=weight)


def _is_numeric(jobs: Sequence[JobView], field: str) -> bool:
    return all(math.isfinite(number(job.settings[field])) for job in jobs if field in job.settings)


def _colour_key(jobs: Sequence[JobView], field: str) -> dict[str, str]:
    values = swept_values(jobs, field)
    if _is_numeric(jobs, field):
        return dict(zip(values, sequence_colours(len(values)), strict=True))
    return dict(zip(values, job_colours(len(values)), strict=True))


def _dash_key(jobs: Sequence[JobView], field: str) -> dict[str, str]:
    dashes = list(DASHES)
    return {value: dashes[at % len(dashes)] for at, value in enumerate(swept_values(jobs, field))}


def _sweep_looks(jobs: Sequence[JobView]) -> dict[str, Look]:
    coded = _coded_fields(jobs)
    if not coded:
        return {}  # nothing known to differ: drawn like jobs outside a sweep
    colours, dashes = _colour_key(jobs, coded[0]), _dash_key(jobs, coded[1]) if len(coded) > 1 else {}
    second = coded[1] if dashes else ""
    return {job.name: Look(colours.get(_value(job, coded[0]), _MISSING), dashes.get(_value(job, second), "solid")) for job in jobs}


def _value(job: JobView, field: str) -> str:
    return setting_text(job.settings[field]) if field in job.settings else ""


def keys_html(jobs: Sequence[JobView]) -> Markup:
    """What colours and dashes mean, a line for each sweep."""
    lines = Markup()
    for name in dict.fromkeys(job.sweep_of for job in jobs if job.sweep_of):
        members = [job for job in jobs if job.sweep_of == name]
        coded = _coded_fields(members)
        parts = [
            _key_part("colour", field, {value: Look(colour) for value, colour in _colour_key(members, field).items()})
            for field in coded[:1]
        ]
        parts += [
            _key_part("dash", field, {value: Look(_MISSING, dash) for value, dash in _dash_key(members, field).items()})
            for field in coded[1:2]
        ]
        lines += render("key.html", sweep=name, parts=parts, untold=coded[2:]) if parts else ""
    return lines


def _key_part(what: str, field: str, looks: Mapping[str, Look]) -> tuple[str, str, Mapping[str, Look], int]:
    """Each value with its look; of too many to tell apart, an even choice. Last, their count."""
    values = list(looks)
    if len(values) > _KEY_VALUES:
        values = [values[round(at * (len(values) - 1) / 7)] for at in range(8)]
    return what, field, {value: looks[value] for value in values}, len(looks)
