"""The page of a simulation: its result, charts, all metrics with their bounds, ratios, the groups, settings, and the origin of constants.

Takes plain numbers and rows (`simulation_view.py`) and gives HTML in one piece. Simulates nothing and writes no file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from tlora.report.line_styles import LineStyle, job_colours, mark, render
from tlora.report.page import LegendEntry, Section, packed, render_page
from tlora.report.rows import JsonObject, number
from tlora.report.simulation_charts import gain_charts, simulation_charts
from tlora.report.simulation_view import SimulationView, gains_of, leader_of, looks, shown_first
from tlora.report.tables import Cell, TableRow, table
from tlora.wording.metrics import GROUPS, TIMES, Metric, decomposition_text, metric_text
from tlora.wording.numbers import DASH, duration_text, quantity

_RATIOS = ("mean_jct_seconds", "median_jct_seconds", "p90_jct_seconds", "p99_jct_seconds", "makespan_seconds", "tokens_per_second")
_RATIOS_OF_USE = ("useful_utilisation", "allocated_utilisation")
_RESULT = (  # the metrics that a page opens with
    *("mean_jct_seconds", "median_jct_seconds", "p99_jct_seconds", "mean_jct_over_bound", "queueing_share"),
    *("windows_beyond_share", "missing_jobs_share", "late_jobs_share", "useful_utilisation", "shared_gpu_share"),
)
_SETTINGS_PER_TABLE = 8
_EVEN = 0.005  # a ratio this near to 1 is neither better nor worse: it reads as 1.00


def metrics_html(view: SimulationView, drawn: Mapping[str, LineStyle]) -> Markup:
    """One table per kind of metric, one row per policy, the best of each column in green; then the definitions of the metrics."""
    tables: dict[str, Markup] = {}
    for title, metrics in GROUPS.items():
        best = {metric.key: _best(metric, [policy.metrics for policy in view.policies]) for metric in metrics}
        rows: list[TableRow] = []
        for policy in view.policies:
            cells = [_metric_cell(metric, number(policy.metrics.get(metric.key)), best[metric.key]) for metric in metrics]
            rows.append(TableRow((_name_cell(policy.name, drawn), *cells)))
        tables[title] = table(("policy", *(f"#{metric.label}" for metric in metrics)), rows)
    meanings = [(metric.label, metric.meaning) for metrics in GROUPS.values() for metric in metrics]
    return _titled(tables) + render("settings.html", versions="", title="What each column means", facts=meanings)


def _titled(tables: Mapping[str, Markup]) -> Markup:
    return Markup().join(Markup('<h3 class="sub">{}</h3>{}').format(title, table_) for title, table_ in tables.items())


def _best(metric: Metric, policies: Sequence[Mapping[str, float]]) -> str:
    """The best value as it is displayed; empty if all are displayed alike."""
    values = [value for metrics in policies if math.isfinite(value := number(metrics.get(metric.key)))]
    if not metric.better or len({metric_text(metric.kind, value) for value in values}) < 2:
        return ""
    return metric_text(metric.kind, min(values) if metric.better == "less" else max(values))


def _metric_cell(metric: Metric, value: float, best: str) -> Cell:
    text = metric_text(metric.kind, value)
    return Cell(Markup('<b class="good">{}</b>').format(text) if text == best else text, value)


def _name_cell(name: str, drawn: Mapping[str, LineStyle]) -> Cell:
    return Cell(mark(drawn[name]) + name)


def ratios_html(view: SimulationView, drawn: Mapping[str, LineStyle]) -> Markup:
    """Ratios: each policy against the reference in all metrics, then against every other policy in mean and p99 JCT."""
    tables: dict[str, Markup] = {}
    against = [row for row in view.ratios if row["against"] == view.reference]
    if against:
        tables[f"Against {view.reference}"] = _reference_table(against, drawn)
    names = [policy.name for policy in view.policies]
    if len(names) > 1 and view.ratios:
        for key, label in (("mean_jct_seconds", "Mean JCT"), ("p99_jct_seconds", "p99 JCT")):
            ratios = {(row["name"], row["against"]): number(row[key]) for row in view.ratios}
            heads = ("policy", *(f"#vs {name}" for name in names))
            rows = [
                TableRow((_name_cell(name, drawn), *(_ratio_cell(ratios.get((name, other), math.nan)) for other in names)))
                for name in names
            ]
            tables[f"{label}: the row against the column"] = table(heads, rows)
    note = Markup(
        '<p class="faint">Times better: above 1 the row is the better one. Completion times are compared over the jobs that are done '
        "under both, throughput and utilisation as each has them.</p>"
    )
    return note + _titled(tables) if tables else Markup()


def _reference_table(against: Sequence[JsonObject], drawn: Mapping[str, LineStyle]) -> Markup:
    labels = {metric.key: metric.label for metrics in GROUPS.values() for metric in metrics}
    keys = (*_RATIOS, *_RATIOS_OF_USE)
    rows: list[TableRow] = []
    for row in against:
        compared = number(row["jobs_compared"])
        ratios = (_ratio_cell(number(row[key])) for key in keys)
        rows.append(TableRow((_name_cell(str(row["name"]), drawn), *ratios, Cell(metric_text("count", compared), compared))))
    return table(("policy", *(f"#{labels[key]}" for key in keys), "#jobs compared"), rows)


def _ratio_cell(ratio: float) -> Cell:
    kind = "" if not math.isfinite(ratio) or abs(ratio - 1) < _EVEN else "good" if ratio > 1 else "bad"
    text = DASH if not math.isfinite(ratio) else f"{ratio:.2f}{TIMES}"
    return Cell(Markup('<span class="{}">{}</span>').format(kind, text) if kind else text, ratio)


def settings_html(view: SimulationView) -> Markup:
    """What was simulated, as tables side by side."""
    rows = [TableRow((Cell(str(key)), Cell(_setting(value)))) for key, value in view.settings.items()]
    tables = [table(("setting", "value"), rows[at : at + _SETTINGS_PER_TABLE]) for at in range(0, len(rows), _SETTINGS_PER_TABLE)]
    return Markup('<div class="side-by-side">{}</div>').format(Markup().join(tables))


def _setting(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000 else str(value)


def result_html(view: SimulationView, drawn: Mapping[str, LineStyle]) -> Markup:
    """A row per policy with the main metrics, and warnings."""
    gains = gains_of(view)
    metrics = {metric.key: metric for group in GROUPS.values() for metric in group}
    shown = [metrics[key] for key in _RESULT]
    best = {metric.key: _best(metric, [policy.metrics for policy in view.policies]) for metric in shown}
    rows: list[TableRow] = []
    for policy in view.policies:
        mean_jct, *others = (_metric_cell(metric, number(policy.metrics.get(metric.key)), best[metric.key]) for metric in shown)
        cells = (_name_cell(policy.name, drawn), mean_jct, _ratio_cell(gains.get(policy.name, math.nan)), *others)
        rows.append(TableRow(cells, "winner" if policy.name == leader_of(view) else ""))
    heads = ("policy", f"#{shown[0].label}", "#gain", *(f"#{metric.label}" for metric in shown[1:]))
    note = f"Gain: mean JCT of {view.reference} over that of the policy, over the jobs that are done under both." if gains else ""
    end = Markup('<p class="faint">{}</p>').format(note)
    for warning in _warnings(view):
        end += Markup('<p><span class="status stopped">{}</span> {}</p>').format(*warning)
    return table(heads, rows) + end


def verdict_html(view: SimulationView) -> Markup:
    """The leader, its gain over the reference, the runner-up, and what the gain consists of."""
    gains = gains_of(view)
    leader = leader_of(view)
    if not leader:
        return Markup('<p class="verdict">No job was done.</p>')
    means = {policy.name: number(policy.metrics.get("mean_jct_seconds")) for policy in view.policies}
    text = Markup("Lowest mean JCT: <b>{}</b>, <b>{}</b>").format(leader, duration_text(means.pop(leader)))
    if leader != view.reference and math.isfinite(gains.get(leader, math.nan)):
        text += f", {gains[leader]:.2f}{TIMES} better than {view.reference}"
    means.pop(view.reference, None)
    if second := min((name for name, mean in means.items() if math.isfinite(mean)), key=means.__getitem__, default=""):
        text += f"; the runner-up: {second}, {duration_text(means[second])}"
    return Markup('<p class="verdict">{}.</p>').format(text) + _decomposition(view)


def _decomposition(view: SimulationView) -> Markup:
    """Our policy's gain as a product of factors; empty unless the policies in between were simulated."""
    text = decomposition_text(gains_of(view))
    return Markup("<p>Where the gain of residual_capacity comes from: <b>{}</b>.</p>").format(text) if text else Markup()


def _warnings(view: SimulationView) -> list[tuple[str, str]]:
    warnings = [("trace", text) for text in view.warnings]
    guessed = [row for row in view.constants if is_extrapolated(row)]
    if guessed:
        names = ", ".join(dict.fromkeys(str(row["field"]) for row in guessed))
        warnings.append(("extrapolated", f"{len(guessed)} of {len(view.constants)} constants were not measured: {names}. See Constants."))
    for policy in view.policies:
        if left := number(policy.metrics.get("jobs_unfinished")):
            unended = f"{quantity(round(left), 'job')} had not ended; its completion times are without them"
            warnings.append(("unfinished", f"{policy.name}: {unended}."))
    return warnings


def is_extrapolated(constant: JsonObject) -> bool:
    """Whether a constant's source says that it was not measured."""
    return str(constant["source"]).lower().startswith("extrapolated")


def constants_html(constants: Sequence[JsonObject]) -> Markup:
    """Each constant with the place where it was measured, or marked as extrapolated."""
    rows: list[TableRow] = []
    for row in constants:
        label, kind = ("extrapolated", "stopped") if is_extrapolated(row) else ("measured", "done")
        texts = (Cell(str(row[key])) for key in ("base", "kernels", "field"))
        value = number(row["value"])
        source = str(row["source"]).removeprefix("extrapolated:").strip()
        origin = Cell(Markup('<span class="status {}">{}</span>').format(kind, label))
        rows.append(TableRow((*texts, Cell(f"{value:.5g}", value), origin, Cell(Markup('<div class="text">{}</div>').format(source)))))
    return table(("base", "kernels", "constant", "#value", "origin", "source"), rows)


_SPANS_PER_POLICY = 20_000  # drawn in about 10 ms; 14 policies of them are some 3 MB of page


def gantt_html(view: SimulationView) -> Markup:
    """Canvas, data and script as HTML; empty if no group ever ran. At most one per page, as its ids are fixed."""
    policies = [policy for policy in view.policies if policy.spans]
    if not policies:
        return Markup()
    first = min(float(span["start_seconds"]) for policy in policies for span in policy.spans)
    end = max(float(span["end_seconds"]) for policy in policies for span in policy.spans) - first
    jobs = _numbered(job_id for policy in policies for span in policy.spans for job_id in span["job_ids"])
    bases = _numbered(span["base_model"] for policy in policies for span in policy.spans)
    listed = [{"name": policy.name, "spans": _columns(policy.spans, first, jobs, bases)} for policy in policies]
    gpus = max(view.num_gpus, 1 + max(max(span["gpus"]) for policy in policies for span in policy.spans if span["gpus"]))
    opened = shown_first(view)
    payload = {
        "first": next((at for at, policy in enumerate(policies) if policy.name == opened), 0),
        "gpus": gpus,
        "end": end or 1.0,
        "jobs": list(jobs),
        "bases": list(bases),
        "colours": job_colours(len(bases)),
        "policies": listed,
    }
    data = packed(json.dumps(payload, allow_nan=False, separators=(",", ":")))
    counts = [(policy.name, len(policy.spans) - _SPANS_PER_POLICY) for policy in policies]
    return render("gantt.html", data=data, left_out=[f"{count:,} of {name}" for name, count in counts if count > 0])


def _numbered(names: Any) -> dict[str, int]:
    return {name: index for index, name in enumerate(dict.fromkeys(names))}


def _columns(spans: Sequence[JsonObject], first: float, jobs: dict[str, int], bases: dict[str, int]) -> dict[str, Any]:
    """The spans as columns; above `_SPANS_PER_POLICY`, only those that cover most. GPUs as ranges: [first, last, first, last, ...]."""
    if len(spans) > _SPANS_PER_POLICY:
        spans = sorted(spans, key=lambda span: (span["end_seconds"] - span["start_seconds"]) * len(span["gpus"]))[-_SPANS_PER_POLICY:]
        spans.sort(key=lambda span: span["start_seconds"])
    groups = _numbered(span["group_id"] for span in spans)
    return {
        "start": [round(span["start_seconds"] - first, 3) for span in spans],
        "end": [round(span["end_seconds"] - first, 3) for span in spans],
        "group": [groups[span["group_id"]] for span in spans],
        "base": [bases[span["base_model"]] for span in spans],
        "rows": [_runs(span["gpus"]) for span in spans],
        "jobs": [[jobs[job_id] for job_id in span["job_ids"]] for span in spans],
        "names": list(groups),
    }


def _runs(gpus: Sequence[int]) -> list[int]:
    """Consecutive numbers as ranges: [first, last, first, last, ...]."""
    runs: list[int] = []
    for gpu in sorted(gpus):
        if runs and gpu == runs[-1] + 1:
            runs[-1] = gpu
        else:
            runs += [gpu, gpu]
    return runs


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
