"""One self-contained HTML page of sections, tables and charts: plotly.js and all numbers are inside it, nothing is ever loaded.

Generic: knows no run, no job. Text in `Section.html` and notes must be escaped by whoever makes it; titles are escaped here.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any

from tlora.report.looks import Look, mark
from tlora.report.page_script import SCRIPT
from tlora.report.page_style import STYLE
from tlora.wording.numbers import shorten

# The page may run what is written in it and load nothing at all, whatever a plot or a name tries.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_NO_SCRIPT = '<noscript><p class="faint">Without JavaScript there are no charts; the tables hold all results.</p></noscript>'
_SHARED_FROM = 8  # numbers: shorter lists are cheaper written out than referred to


@dataclass(frozen=True)
class Chart:
    """A plotly figure (data and layout) under a title.

    Traces of one `legendgroup` are switched together by the page's legend. Of traces with `meta.role`, `raw` is faint under `mean` and
    only shows while few groups are on, until the reader asks for `raw` alone. `layout.meta.x` names alternatives of the x axis, whose
    values are each trace's `meta.x`. `log` offers a switch between a logarithmic y axis and a linear one; `yaxis.type` is the first shown.
    """

    title: str
    figure: dict[str, Any]
    note: str = ""  # HTML
    wide: bool = False
    log: bool = False


@dataclass(frozen=True)
class LegendEntry:
    """One switch of the page's legend: a `legendgroup` of its charts and how that is drawn."""

    group: str
    look: Look


@dataclass(frozen=True)
class Section:
    """A heading, ready HTML, then charts in a grid. `legend` puts the page's legend at the top of this section's charts."""

    title: str
    html: str = ""
    charts: Sequence[Chart] = ()
    legend: Sequence[LegendEntry] = ()


def render_page(title: str, sections: Sequence[Section]) -> str:
    """The whole page. Lists of numbers that occur in several traces are written once."""
    shared: dict[str, int] = {}
    figures = [_share(_plain(chart.figure), shared) for section in sections for chart in section.charts]
    payload = json.dumps({"figures": figures, "shared": [json.loads(text) for text in shared]}, allow_nan=False, separators=(",", ":"))
    numbers = iter(range(len(figures)))
    body = "".join(_section(section, numbers) for section in sections)
    banner, library = _library() if figures else ("", _packed(""))
    scripts = (
        f"<!--\n{escape(banner)}\n--><script type='text/plain' id='library'>{library}</script>"
        f"<script type='text/plain' id='payload'>{_packed(payload)}</script><script>{SCRIPT}</script>"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style><noscript><style>.legend,.charts{{display:none}}</style></noscript></head>\n<body><main><h1>{escape(title)}</h1>{_NO_SCRIPT}{body}</main>\n{scripts}</body></html>\n"
    )


def _section(section: Section, numbers: Iterator[int]) -> str:
    heading = f"<h2>{escape(section.title)}</h2>" if section.title else ""
    charts = "".join(_figure(chart, next(numbers)) for chart in section.charts)
    grid = f'<div class="charts">{charts}</div>' if charts else ""
    return f"<section>{heading}{section.html}{_legend(section.legend)}{grid}</section>\n"


def _figure(chart: Chart, number: int) -> str:
    note = f"<figcaption>{chart.note}</figcaption>" if chart.note else ""
    layout = chart.figure.get("layout", {})
    scale, unshown = _scale_switch(chart, number) if chart.log else ("", "")
    return (
        f'<figure{_class("wide" if chart.wide else "")}><div class="head"><h3>{escape(chart.title)}</h3>{scale}</div>'
        f'{note}{unshown}<div class="plot" id="chart-{number}" style="height:{layout.get("height", 320)}px"></div></figure>'
    )


def _scale_switch(chart: Chart, number: int) -> tuple[str, str]:
    """Two buttons, and what a logarithmic axis leaves out."""
    shown = chart.figure["layout"].get("yaxis", {}).get("type", "linear")
    buttons = "".join(
        f'<button type="button" data-chart="{number}" data-scale="{name}" aria-pressed="{str(name == shown).lower()}">{name}</button>'
        for name in ("log", "linear")
    )
    traces = [trace for trace in chart.figure["data"] if trace.get("meta", {}).get("role") != "mean"]
    low = sum(1 for trace in traces for value in trace["y"] if math.isfinite(value) and value <= 0)
    text = f"{low:,} {'value' if low == 1 else 'values'} of zero or below {'is' if low == 1 else 'are'} left out: see linear."
    unshown = f'<p class="unshown"{"" if shown == "log" else " hidden"}>{text}</p>' if low else ""
    return f'<div class="scales" role="group" aria-label="y axis">{buttons}</div>', unshown


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _legend(entries: Sequence[LegendEntry]) -> str:
    if not entries:
        return ""
    chips = "".join(
        f'<button type="button" class="chip" aria-pressed="true" data-group="{escape(entry.group)}" title="{escape(entry.group)}">'
        f"{mark(entry.look)}{escape(shorten(entry.group, 28))}</button>"
        for entry in entries
    )
    find = '<input type="search" id="find" placeholder="find a job" aria-label="find a job">' if len(entries) > 12 else ""
    several = '<button type="button" id="all">all</button><button type="button" id="none">none</button>' if len(entries) > 1 else ""
    axis = '<label id="axis" hidden>x axis <select></select></label>'
    lines = (
        '<label id="lines" hidden>lines <select><option value="mean">averaged</option><option value="raw">every logged step</option>'
        "</select></label>"
    )
    fold = f'<details open><summary id="shown">{len(entries)} of {len(entries)} shown</summary><div class="chips">{chips}</div></details>'
    return f'<div class="legend"><div class="controls">{axis}{lines}{several}{find}</div>{fold}</div>'


def _plain(value: Any) -> Any:
    """JSON's values only: numbers to five digits (a pixel needs four), null for what is not finite (a gap in a line)."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.5g}")
    return value


def _share(value: Any, shared: dict[str, int]) -> Any:
    """Replace each longer list of plain values by {"$": its number in `shared`}."""
    if isinstance(value, dict):
        return {key: _share(entry, shared) for key, entry in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) < _SHARED_FROM or any(isinstance(entry, dict | list) for entry in value):
        return [_share(entry, shared) for entry in value]
    return {"$": shared.setdefault(json.dumps(value, separators=(",", ":")), len(shared))}


@cache
def _library() -> tuple[str, str]:
    """plotly.js: the banner with its licence, and all of it, packed, which takes 0.3 s."""
    from plotly.offline import get_plotlyjs  # takes 0.25 s, and most commands of the terminal write no page

    library = get_plotlyjs()
    return library[: library.find("*/") + 2], _packed(library)


def _packed(text: str) -> str:
    """gzip in base64: plotly.js takes 2.0 instead of 4.8 MB, and no text of a file can end the script element it stands in."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
