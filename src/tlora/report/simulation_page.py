"""The page of a simulation: its result, charts, all metrics with their bounds, ratios, the groups, settings, and the origin of constants.

Takes plain numbers and rows (`simulation_view.py`) and gives HTML in one piece. Simulates nothing and writes no file.
"""

from __future__ import annotations

from markupsafe import Markup

from tlora.report.page import LegendEntry, Section, render_page
from tlora.report.simulation_charts import gain_charts, simulation_charts
from tlora.report.simulation_gantt import gantt_html
from tlora.report.simulation_tables import constants_html, metrics_html, ratios_html, result_html, settings_html, verdict_html
from tlora.report.simulation_view import SimulationView, looks


def simulation_page(view: SimulationView) -> str:
    """The page as one self-contained HTML text. It needs no network, and its tables need no JavaScript."""
    drawn = looks(view)
    charts = simulation_charts(view, drawn)
    groups = gantt_html(view)
    shown = {trace.get("legendgroup") for chart in charts for trace in chart.figure["data"]}
    legend = [LegendEntry(name, look) for name, look in drawn.items() if name in shown]
    sections = [
        Section("", verdict_html(view), gain_charts(view, drawn)),
        Section("Policies", result_html(view, drawn)),
        Section("Curves", "" if charts else Markup('<p class="faint">No job was done and nothing was sampled.</p>'), charts, legend),
        Section("All metrics", metrics_html(view, drawn)),
    ]
    if ratios := ratios_html(view, drawn):
        sections.append(Section("How many times better", ratios))
    if groups:
        sections.append(Section("Groups", groups))
    sections.append(Section("Settings", settings_html(view)))
    if view.constants:
        sections.append(Section("Constants", constants_html(view.constants)))
    return render_page(view.title, sections)
