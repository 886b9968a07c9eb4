"""The metrics of a simulation in words and tables, as HTML and as text for a terminal: names, units, which way is better, meanings.

Every text that came from outside is escaped here. The numbers are computed elsewhere and come by their keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from tlora.report.looks import Look, mark
from tlora.report.rows import JsonObject, number
from tlora.report.simulation_view import SimulationView
from tlora.report.tables import Cell, Line, table
from tlora.wording.metrics import GROUPS, TIMES, Metric, metric_text
from tlora.wording.numbers import DASH, duration_text

_RATIOS = ("mean_jct_seconds", "median_jct_seconds", "p90_jct_seconds", "p99_jct_seconds", "makespan_seconds", "tokens_per_second")
_RATIOS_OF_USE = ("useful_utilisation", "allocated_utilisation")
_RESULT = (  # the metrics that a page opens with
    *("mean_jct_seconds", "median_jct_seconds", "p99_jct_seconds", "mean_jct_over_bound", "queueing_share"),
    *("windows_beyond_share", "useful_utilisation"),
)
_SETTINGS_PER_TABLE = 8
_EVEN = 0.005  # a ratio this near to 1 is neither better nor worse: it reads as 1.00


def metrics_html(view: SimulationView, drawn: Mapping[str, Look]) -> str:
    """A table per kind of metric, a row per policy, the best of each column in green; then what each metric means."""
    parts: list[str] = []
    for title, metrics in GROUPS.items():
        best = {metric.key: _best(metric, [policy.metrics for policy in view.policies]) for metric in metrics}
        rows: list[Line] = []
        for policy in view.policies:
            cells = [_metric_cell(metric, number(policy.metrics.get(metric.key)), best[metric.key]) for metric in metrics]
            rows.append(Line((_name_cell(policy.name, drawn), *cells)))
        parts.append(f"{_heading(title)}{table(('policy', *(f'#{metric.label}' for metric in metrics)), rows)}")
    meanings = "".join(
        f"<dt>{escape(metric.label)}</dt><dd>{escape(metric.meaning)}</dd>" for metrics in GROUPS.values() for metric in metrics
    )
    return f"{''.join(parts)}<details><summary>What each column means</summary><dl>{meanings}</dl></details>"


def _heading(title: str) -> str:
    return f'<h3 style="margin:1.1rem 0 .5rem">{escape(title)}</h3>'


def _best(metric: Metric, policies: Sequence[Mapping[str, float]]) -> str:
    """The best value of several policies as it reads; nothing where none reads better than another."""
    values = [value for found in policies if math.isfinite(value := number(found.get(metric.key)))]
    if not metric.better or len({metric_text(metric.kind, value) for value in values}) < 2:
        return ""
    return metric_text(metric.kind, min(values) if metric.better == "less" else max(values))


def _metric_cell(metric: Metric, value: float, best: str) -> Cell:
    text = metric_text(metric.kind, value)
    return Cell(f'<b class="good">{text}</b>' if text == best else text, value)


def _name_cell(name: str, drawn: Mapping[str, Look]) -> Cell:
    return Cell(f"{mark(drawn[name])}{escape(name)}")


def ratios_html(view: SimulationView, drawn: Mapping[str, Look]) -> str:
    """How many times better each policy is: in everything than the reference, then in mean and p99 JCT than each other one."""
    parts: list[str] = []
    against = [row for row in view.ratios if row["against"] == view.reference]
    if against:
        parts.append(f"{_heading(f'Against {view.reference}')}{_reference_table(against, drawn)}")
    names = [policy.name for policy in view.policies]
    if len(names) > 1 and view.ratios:
        for key, label in (("mean_jct_seconds", "Mean JCT"), ("p99_jct_seconds", "p99 JCT")):
            found = {(row["name"], row["against"]): number(row[key]) for row in view.ratios}
            heads = ("policy", *(f"#vs {name}" for name in names))
            rows = [
                Line((_name_cell(name, drawn), *(_ratio_cell(found.get((name, other), math.nan)) for other in names))) for name in names
            ]
            parts.append(f"{_heading(f'{label}: the row against the column')}{table(heads, rows)}")
    note = (
        '<p class="faint">Times better: above 1 the row is the better one. Completion times are compared over the jobs that are done '
        "under both, throughput and utilisation as each has them.</p>"
    )
    return note + "".join(parts) if parts else ""


def _reference_table(against: Sequence[JsonObject], drawn: Mapping[str, Look]) -> str:
    labels = {metric.key: metric.label for metrics in GROUPS.values() for metric in metrics}
    keys = (*_RATIOS, *_RATIOS_OF_USE)
    rows: list[Line] = []
    for row in against:
        compared = number(row["jobs_compared"])
        ratios = (_ratio_cell(number(row[key])) for key in keys)
        rows.append(Line((_name_cell(str(row["name"]), drawn), *ratios, Cell(metric_text("count", compared), compared))))
    return table(("policy", *(f"#{labels[key]}" for key in keys), "#jobs compared"), rows)


def _ratio_cell(ratio: float) -> Cell:
    kind = "" if not math.isfinite(ratio) or abs(ratio - 1) < _EVEN else "good" if ratio > 1 else "bad"
    text = DASH if not math.isfinite(ratio) else f"{ratio:.2f}{TIMES}"
    return Cell(f'<span class="{kind}">{text}</span>' if kind else text, ratio)


def settings_html(view: SimulationView) -> str:
    """What was simulated, as tables side by side."""
    rows = [Line((Cell(escape(str(key))), Cell(escape(_setting(value))))) for key, value in view.settings.items()]
    tables = [table(("setting", "value"), rows[at : at + _SETTINGS_PER_TABLE]) for at in range(0, len(rows), _SETTINGS_PER_TABLE)]
    beside = "display:grid;grid-template-columns:repeat(auto-fit,minmax(20rem,1fr));gap:.75rem;align-items:start"
    return f'<div style="{beside}">{"".join(tables)}</div>'


def _setting(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000 else str(value)


def result_html(view: SimulationView, drawn: Mapping[str, Look]) -> str:
    """What came out: the best policy in a sentence, a row per policy with the most telling metrics, and what the numbers leave open."""
    gains = {str(row["name"]): number(row["mean_jct_seconds"]) for row in view.ratios if row["against"] == view.reference}
    metrics = {metric.key: metric for group in GROUPS.values() for metric in group}
    shown = [metrics[key] for key in _RESULT]
    best = {metric.key: _best(metric, [policy.metrics for policy in view.policies]) for metric in shown}
    rows: list[Line] = []
    for policy in view.policies:
        mean_jct, *others = (_metric_cell(metric, number(policy.metrics.get(metric.key)), best[metric.key]) for metric in shown)
        cells = (_name_cell(policy.name, drawn), mean_jct, _ratio_cell(gains.get(policy.name, math.nan)), *others)
        rows.append(Line(cells, "winner" if policy.name == _leader(view) else ""))
    heads = ("policy", f"#{shown[0].label}", "#gain", *(f"#{metric.label}" for metric in shown[1:]))
    note = f"Gain: mean JCT of {escape(view.reference)} over that of the policy, over the jobs that are done under both." if gains else ""
    warnings = [f'<p><span class="status stopped">{label}</span> {text}</p>' for label, text in _warnings(view)]
    return f'{_verdict(view, gains)}{table(heads, rows)}<p class="faint">{note}</p>{"".join(warnings)}'


def _leader(view: SimulationView) -> str:
    """The policy with the lowest mean JCT; empty where no job was done."""
    means = {policy.name: number(policy.metrics.get("mean_jct_seconds")) for policy in view.policies}
    return min((name for name, mean in means.items() if math.isfinite(mean)), key=means.__getitem__, default="")


def _verdict(view: SimulationView, gains: Mapping[str, float]) -> str:
    """The leader, how much better it is than the reference, and which of the others comes next."""
    leader = _leader(view)
    if not leader:
        return '<p class="verdict">No job was done.</p>'
    means = {policy.name: number(policy.metrics.get("mean_jct_seconds")) for policy in view.policies}
    text = f"Lowest mean JCT: <b>{escape(leader)}</b>, <b>{duration_text(means.pop(leader))}</b>"
    if leader != view.reference and math.isfinite(gains.get(leader, math.nan)):
        text += f", {gains[leader]:.2f}{TIMES} better than {escape(view.reference)}"
    means.pop(view.reference, None)
    if second := min((name for name, mean in means.items() if math.isfinite(mean)), key=means.__getitem__, default=""):
        text += f"; the next of the others: {escape(second)}, {duration_text(means[second])}"
    return f'<p class="verdict">{text}.</p>'


def _warnings(view: SimulationView) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    guessed = [row for row in view.constants if is_extrapolated(row)]
    if guessed:
        names = ", ".join(dict.fromkeys(escape(str(row["field"])) for row in guessed))
        found.append(("extrapolated", f"{len(guessed)} of {len(view.constants)} constants were not measured: {names}. See Constants."))
    for policy in view.policies:
        if left := number(policy.metrics.get("jobs_unfinished")):
            found.append(("unfinished", f"{escape(policy.name)}: {left:,.0f} jobs had not ended; its completion times are without them."))
    return found


def is_extrapolated(constant: JsonObject) -> bool:
    """Whether a constant's source says that it was not measured."""
    return str(constant["source"]).lower().startswith("extrapolated")


def constants_html(constants: Sequence[JsonObject]) -> str:
    """Each constant with where it was measured, or the label that it was not."""
    rows: list[Line] = []
    for row in constants:
        label, kind = ("extrapolated", "stopped") if is_extrapolated(row) else ("measured", "done")
        texts = (Cell(escape(str(row[key]))) for key in ("base", "kernels", "field"))
        value = number(row["value"])
        source = str(row["source"]).removeprefix("extrapolated:").strip()
        origin = Cell(f'<span class="status {kind}">{label}</span>')
        rows.append(Line((*texts, Cell(f"{value:.5g}", value), origin, Cell(f'<div class="text">{escape(source)}</div>'))))
    return table(("base", "kernels", "constant", "#value", "origin", "source"), rows)
