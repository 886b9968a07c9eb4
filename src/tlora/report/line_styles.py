"""How pages look: colours and dashes of lines, those of each job with the key that explains them, the mark in front of a name, and the
environment of the HTML templates.

Jobs of a sweep are drawn by the values that it varies: the numeric field with the most values sets the colour, on a scale from blue to gold
that colour-blind readers can tell apart; the next field sets the dash. Other jobs get six categorical colours, then the same ones dashed.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tlora.report.rows import number
from tlora.report.run_view import JobView
from tlora.wording.numbers import setting_text, shorten

DASHES = {"solid": "none", "dash": "6 3", "dot": "1.5 3", "longdash": "10 3", "dashdot": "6 3 1.5 3", "longdashdot": "10 3 1.5 3"}
CATEGORIES = 6  # the first of `job_colours`, which stay distinct for colour-blind eyes
# Evenly spaced to eyes without one of the three receptors (8 CIELAB units or more), and visible on white and on near-black.
_SEQUENCE = (
    *((55, 50, 180), (45, 79, 188), (36, 104, 195), (28, 129, 192), (23, 153, 170)),
    *((63, 177, 122), (95, 186, 94), (130, 190, 73), (171, 190, 59), (225, 190, 40)),
)


@dataclass(frozen=True)
class LineStyle:
    """A line's colour (#rrggbb) and its dash, one of `DASHES`."""

    colour: str
    dash: str = "solid"


def mark(look: LineStyle) -> Markup:
    """A short line in this colour and dash, as HTML to put before a name."""
    line = Markup('<line x1="1" y1="4" x2="23" y2="4" stroke="{}" stroke-width="4" stroke-dasharray="{}"/>')
    svg = Markup('<svg class="mark" width="24" height="8" viewBox="0 0 24 8" aria-hidden="true">{}</svg>')
    return svg.format(line.format(look.colour, DASHES[look.dash]))


def sequence_colours(count: int) -> list[str]:
    """`count` colours in even steps along the sequence; its middle for a single one."""
    places = [(len(_SEQUENCE) - 1) * (at / (count - 1) if count > 1 else 0.5) for at in range(count)]
    colours: list[str] = []
    for place in places:
        left = min(int(place), len(_SEQUENCE) - 2)
        mixed = (round(a + (b - a) * (place - left)) for a, b in zip(_SEQUENCE[left], _SEQUENCE[left + 1], strict=True))
        colours.append("#" + "".join(f"{channel:02x}" for channel in mixed))
    return colours


# Hues that stay apart on white and on near-black. The first six (near those of Okabe and Ito) stay apart for colour-blind eyes too.
_PALETTE = ("#0b72c4", "#d95f02", "#12a37c", "#d074a8", "#d9a200", "#57b5ec", "#8b6fe8", "#7a9a01", "#e5487f", "#a8714a")


def job_colours(count: int) -> list[str]:
    """A colour for each of `count` jobs; beyond ten, hues a golden angle apart, alternating in lightness."""
    if count <= len(_PALETTE):
        return list(_PALETTE[:count])
    colours: list[str] = []
    for index in range(count):
        hue = (0.6 + index * 0.381966) % 1
        red, green, blue = colorsys.hls_to_rgb(hue, (0.5, 0.42, 0.6)[index % 3], (0.75, 0.6, 0.65)[index % 3])
        colours.append(f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}")
    return colours


def render(template: str, /, **values: Any) -> Markup:
    """A file of `templates/` with `values` put in, each escaped unless it is `Markup`."""
    return Markup(_environment().get_template(template).render(values))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tlora.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"mark": mark, "shorten": shorten}
    return environment


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


def job_looks(jobs: Sequence[JobView]) -> dict[str, LineStyle]:
    """The `LineStyle` of each job, by name."""
    names = dict.fromkeys(job.sweep_of for job in jobs if job.sweep_of)
    looks: dict[str, LineStyle] = {}
    for name in names:
        looks |= _sweep_looks([job for job in jobs if job.sweep_of == name])
    others = [job.name for job in jobs if job.name not in looks]
    colours, dashes = job_colours(min(len(others), CATEGORIES)), list(DASHES)
    return looks | {name: LineStyle(colours[at % CATEGORIES], dashes[at // CATEGORIES % len(dashes)]) for at, name in enumerate(others)}


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


def _sweep_looks(jobs: Sequence[JobView]) -> dict[str, LineStyle]:
    coded = _coded_fields(jobs)
    if not coded:
        return {}  # nothing known to differ: drawn like jobs outside a sweep
    colours, dashes = _colour_key(jobs, coded[0]), _dash_key(jobs, coded[1]) if len(coded) > 1 else {}
    second = coded[1] if dashes else ""
    return {job.name: LineStyle(colours.get(_value(job, coded[0]), _MISSING), dashes.get(_value(job, second), "solid")) for job in jobs}


def _value(job: JobView, field: str) -> str:
    return setting_text(job.settings[field]) if field in job.settings else ""


def keys_html(jobs: Sequence[JobView]) -> Markup:
    """The key as HTML: what colours and dashes mean, one line per sweep."""
    lines = Markup()
    for name in dict.fromkeys(job.sweep_of for job in jobs if job.sweep_of):
        members = [job for job in jobs if job.sweep_of == name]
        coded = _coded_fields(members)
        parts = [
            _key_part("colour", field, {value: LineStyle(colour) for value, colour in _colour_key(members, field).items()})
            for field in coded[:1]
        ]
        parts += [
            _key_part("dash", field, {value: LineStyle(_MISSING, dash) for value, dash in _dash_key(members, field).items()})
            for field in coded[1:2]
        ]
        lines += render("key.html", sweep=name, parts=parts, untold=coded[2:]) if parts else ""
    return lines


def _key_part(what: str, field: str, looks: Mapping[str, LineStyle]) -> tuple[str, str, Mapping[str, LineStyle], int]:
    """`what`, `field`, the look of each value, and the number of values. Of more than `_KEY_VALUES`, eight are chosen evenly."""
    values = list(looks)
    if len(values) > _KEY_VALUES:
        values = [values[round(at * (len(values) - 1) / 7)] for at in range(8)]
    return what, field, {value: looks[value] for value in values}, len(looks)
