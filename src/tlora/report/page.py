"""One self-contained HTML page of sections, tables and charts: plotly.js and all numbers are inside it, nothing is ever loaded.

It does not know what it shows: no run, no job. Texts are escaped by the template `page.html`, unless they are `Markup`.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tlora.report.line_styles import LineStyle, render

FAINT_UP_TO = 12  # groups shown at once: above that, the raw values under the averages are a fog
ROWS_SHOWN = 40  # of a table; a button under a longer one shows the rest
_SHARED_FROM = 8  # numbers: shorter lists are cheaper written out than referred to


@dataclass(frozen=True)
class Chart:
    """A plotly figure (data and layout) under a title.

    Traces of one `legendgroup` are switched together by the page's legend. Traces with `meta.role` come in
    pairs: `raw` is a faint line under `mean`. With more than `FAINT_UP_TO` groups on show, `raw` is hidden unless the reader selects it.
    `layout.meta.x` names the x axes to choose from; each trace's `meta.x` has its values for them. `log` adds a switch between a
    logarithmic and a linear y axis; `yaxis.type` is the one shown first.
    """

    title: str
    figure: dict[str, Any]
    note: str = ""
    wide: bool = False
    log: bool = False

    @property
    def height(self) -> int:
        """In pixels."""
        return self.figure["layout"].get("height", 320) if "layout" in self.figure else 320

    @property
    def scale(self) -> str:
        """Scale of the y axis when the page opens: "log" or "linear"."""
        return self.figure["layout"].get("yaxis", {}).get("type", "linear")

    @property
    def values_below_log(self) -> int:
        """How many values a logarithmic y axis leaves out."""
        traces = [trace for trace in self.figure["data"] if trace.get("meta", {}).get("role") != "mean"]
        return sum(1 for trace in traces for value in trace["y"] if math.isfinite(value) and value <= 0)


@dataclass(frozen=True)
class LegendEntry:
    """One switch of the page's legend: a `legendgroup` of its charts and how that is drawn."""

    group: str
    look: LineStyle


@dataclass(frozen=True)
class Section:
    """A heading, its text, then charts in a grid. `legend` puts the page's legend above the charts of this section."""

    title: str
    html: str = ""
    charts: Sequence[Chart] = ()
    legend: Sequence[LegendEntry] = ()


def render_page(title: str, sections: Sequence[Section]) -> str:
    """The whole page. Lists of numbers that occur in several traces are written once."""
    shared: dict[str, int] = {}
    figures = [_share(_plain(chart.figure), shared) for section in sections for chart in section.charts]
    payload = json.dumps({"figures": figures, "shared": [json.loads(text) for text in shared]}, allow_nan=False, separators=(",", ":"))
    banner, library = _library() if figures else ("", packed(""))
    page = render(
        "page.html",
        title=title,
        sections=sections,
        banner=banner,
        library=library,
        payload=packed(payload),
        faint_up_to=FAINT_UP_TO,
        rows_shown=ROWS_SHOWN,
    )
    return str(page)


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
    """plotly.js: its licence banner, and the whole script compressed (which takes 0.3 s)."""
    from plotly.offline import get_plotlyjs  # takes 0.25 s, and most commands of the terminal write no page

    library = get_plotlyjs()
    return library[: library.find("*/") + 2], packed(library)


def packed(text: str) -> str:
    """gzip in base64: plotly.js takes 2.0 instead of 4.8 MB, and no text of a file can close the script element."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
