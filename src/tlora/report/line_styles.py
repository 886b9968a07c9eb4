"""How pages look: colours and dashes of lines, the mark in front of a name, and the environment of the HTML templates."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tlora.wording.numbers import shorten

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
