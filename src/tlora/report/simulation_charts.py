"""The figures of a simulation as plain plotly dictionaries: completion times, queue and utilisation over time, gain against load.

A trace's `legendgroup` is its policy's name. How a page shows them: `page.py`; the view of the groups: `simulation_page.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise
from typing import Any

from tlora.report.line_styles import LineStyle
from tlora.report.page import Chart
from tlora.report.rows import number
from tlora.report.simulation_view import PolicyView, SimulationView, gains_of, usual_kernels
from tlora.wording.metrics import TIMES
from tlora.wording.numbers import duration_text, time_unit

_POINTS_OF_CDF = 400
_SLIVER = 1e-6  # of a column: what rounding leaves where a series ends at the column's edge
_COLUMNS = 400  # of a chart over time: what a wide chart can show
_TIMES = {1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 21_600: "6 h", 86_400: "1 d", 864_000: "10 d", 8_640_000: "100 d"}
_DAYS_FROM = 5 * 86_400  # an axis longer than this counts days

Trace = dict[str, Any]


def simulation_charts(view: SimulationView, drawn: Mapping[str, LineStyle]) -> list[Chart]:
    """All charts that have data."""
    dashed = any(look.dash != "solid" for look in drawn.values())
    note = f"Dashed: with other kernels than {usual_kernels(view)}." if dashed else ""
    edges = _edges(view.policies)
    charts = [
        _completion(view, drawn, note),
        _over_time(view, drawn, edges, ("Jobs that wait", "waiting_jobs", "jobs in the queue")),
        _over_time(view, drawn, edges, ("Useful utilisation", "useful_share", "% of what all GPUs could do")),
        _over_time(view, drawn, edges, ("Allocated GPUs", "allocated_share", "% of the GPUs")),
        _shared(view, drawn, edges),
        _gain_over_load(view, drawn),
        _throughput_over_bound(view, drawn),
    ]
    return [chart for chart in charts if chart.figure["data"]]


def gain_charts(view: SimulationView, drawn: Mapping[str, LineStyle]) -> list[Chart]:
    """The page's first chart: a bar for each policy with its gain over the reference. None without gains."""
    gains = {name: gain for name, gain in gains_of(view).items() if math.isfinite(gain)}
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": escape(name),
            "legendgroup": name,
            "x": [gain],
            "y": [escape(name)],
            "marker": {"color": drawn[name].colour},
            "text": [f"{gain:.2f}{TIMES}"],
            "textposition": "outside",
            "cliponaxis": False,
            "hovertemplate": f"<b>{escape(name)}</b><br>{gain:.2f} times better<extra></extra>",
        }
        for name, gain in gains.items()
    ]
    if len(traces) < 2:
        return []
    layout = {
        "height": 70 + 30 * len(traces),
        "showlegend": False,
        "xaxis": {"title": {"text": "gain in mean JCT"}, "range": [0, 1.25 * max(gains.values())]},
        "yaxis": {"autorange": "reversed", "automargin": True, "ticksuffix": " "},
    }
    return [Chart("Gain", {"data": traces, "layout": layout}, f"Mean JCT of {view.reference} over that of each policy.", wide=True)]


def _line(name: str, look: LineStyle, x: Sequence[float], y: Sequence[float]) -> Trace:
    label = escape(name)
    line = {"color": look.colour, "width": 2, "dash": look.dash}
    return {"type": "scatter", "mode": "lines", "name": label, "legendgroup": name, "x": x, "y": y, "line": line}


def _completion(view: SimulationView, drawn: Mapping[str, LineStyle], note: str) -> Chart:
    """Cumulative distribution of completion times: the share of the jobs done within t, over t."""
    traces: list[Trace] = []
    for policy in view.policies:
        jct = sorted(policy.jct_seconds)
        count = len(jct)
        shown = min(count, _POINTS_OF_CDF)
        points = [round(at * (count - 1) / max(1, shown - 1)) for at in range(shown)]
        x = [jct[at] for at in points]
        trace = _line(policy.name, drawn[policy.name], x, [100 * (at + 1) / count for at in points])
        trace["text"] = [duration_text(seconds) for seconds in x]
        trace["hovertemplate"] = f"<b>{escape(policy.name)}</b><br>%{{y:.1f}} % of the jobs within %{{text}}<extra></extra>"
        trace |= {"mode": "lines+markers", "marker": {"size": 4}} if count <= 40 else {"line": trace["line"] | {"shape": "hv"}}
        traces += [trace] if points else []
    every = [seconds for trace in traces for seconds in (trace["x"][0], trace["x"][-1])] or [1.0]
    low = max((seconds for seconds in _TIMES if seconds <= min(every)), default=min(every) / 2)
    high = min((seconds for seconds in _TIMES if seconds > max(every)), default=2 * max(every))
    axis = {"type": "log", "title": {"text": "JCT"}, "tickvals": list(_TIMES), "ticktext": list(_TIMES.values())}
    axis["range"] = [math.log10(low), math.log10(high)]
    layout = {"xaxis": axis, "yaxis": {"title": {"text": "% of the jobs that are done"}, "range": [0, 101]}}
    return Chart("Completion times", {"data": traces, "layout": layout}, f"How many jobs are done within a time. {note}")


def _edges(policies: Sequence[PolicyView]) -> list[float]:
    """Edges of the time bins of the charts over time, in seconds; empty without samples."""
    sampled = [policy for policy in policies if len(policy.samples["seconds"])]
    if not sampled:
        return []
    first, last = min(policy.samples["seconds"][0] for policy in sampled), max(policy.end_seconds for policy in sampled)
    return [first + (last - first) * at / _COLUMNS for at in range(_COLUMNS + 1)] if last > first else []


def _over_time(view: SimulationView, drawn: Mapping[str, LineStyle], edges: Sequence[float], words: tuple[str, str, str]) -> Chart:
    """The mean of one sampled quantity in each time bin; `words` are the title, the quantity's key in the samples, the axis title."""
    title, key, y_title = words
    scale, unit = (1.0, "jobs") if key == "waiting_jobs" else (100.0, "%")
    length = edges[-1] - edges[0] if edges else 0.0
    per_unit, time_name = (86_400.0, "days") if length > _DAYS_FROM else time_unit(length)
    middles = [((left + right) / 2 - edges[0]) / per_unit for left, right in pairwise(edges)]
    traces: list[Trace] = []
    for policy in view.policies if edges else ():
        means = column_means(policy.samples["seconds"], policy.samples[key], policy.end_seconds, edges)
        trace = _line(policy.name, drawn[policy.name], middles, [scale * mean for mean in means])
        trace["hovertemplate"] = f"<b>{escape(policy.name)}</b><br>%{{y:,.4~g}} {unit} at %{{x:,.4~g}} {time_name}<extra></extra>"
        trace["line"] = trace["line"] | {"width": 1.5}
        traces.append(trace)
    layout = {
        "xaxis": {"title": {"text": f"time ({time_name})"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": y_title}, "rangemode": "tozero"},
    }
    note = f"Means over {duration_text(length / _COLUMNS)}." if edges else ""
    return Chart(title, {"data": traces, "layout": layout}, note, log=key == "waiting_jobs")


def _shared(view: SimulationView, drawn: Mapping[str, LineStyle], edges: Sequence[float]) -> Chart:
    """Share of the GPU time that is spent in groups of two jobs or more, for the policies that share GPUs."""
    sharing = [policy for policy in view.policies if any(policy.samples["shared_gpus"])]
    words = ("Shared GPU time", "shared_gpus", "% of the GPU time in groups")
    chart = _over_time(replace(view, policies=sharing), drawn, edges, words)
    for policy, trace in zip(sharing, chart.figure["data"], strict=False):
        taken = column_means(policy.samples["seconds"], policy.samples["allocated_gpus"], policy.end_seconds, edges)
        trace["y"] = [share / gpus if gpus > 0 else math.nan for share, gpus in zip(trace["y"], taken, strict=True)]
    return replace(chart, note=f"GPU time in groups of two jobs or more. {chart.note}")


def column_means(seconds: Sequence[float], values: Sequence[float], end_seconds: float, edges: Sequence[float]) -> list[float]:
    """Mean of a step function in each bin between `edges`: values[i] holds from seconds[i] to the next, the last to `end_seconds`.

    NaN for a bin outside the function's range; a bin partly inside has the mean of that part.
    """
    if not len(seconds):
        return [math.nan] * (len(edges) - 1)
    ends = [*seconds[1:], max(end_seconds, seconds[-1])]
    sums = [0.0]  # of value * time, up to each of the samples
    for start, end, value in zip(seconds, ends, values, strict=True):
        sums.append(sums[-1] + value * (end - start))

    def until(time: float) -> float:
        at = min(max(bisect_right(seconds, time) - 1, 0), len(seconds) - 1)
        return sums[at] + values[at] * (min(max(time, seconds[0]), ends[-1]) - seconds[at])

    means: list[float] = []
    for left, right in pairwise(edges):
        covered = min(right, ends[-1]) - max(left, seconds[0])
        means.append((until(right) - until(left)) / covered if covered > _SLIVER * (right - left) else math.nan)
    return means


def _gains(view: SimulationView) -> dict[str, dict[float, list[float]]]:
    """Gains by policy and load, one per seed: the reference's mean JCT divided by the policy's, at the same load and seed."""
    mean_jcts: dict[tuple[str, float, float], tuple[str, float]] = {}
    for row in view.sweep:
        key = str(row["name"]), number(row["load"]), number(row["seed"])
        assert key not in mean_jcts, f"two rows of the sweep for {key}"
        mean_jcts[key] = str(row.get("reference", view.reference)), number(row["mean_jct_seconds"])
    gains: defaultdict[str, defaultdict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (name, load, seed), (reference, seconds) in mean_jcts.items():
        _, before = mean_jcts.get((reference, load, seed), ("", math.nan))
        if name != reference and math.isfinite(before) and seconds > 0:
            gains[name][load].append(before / seconds)
    return {name: dict(by_load) for name, by_load in gains.items()}


def _throughput_over_bound(view: SimulationView, drawn: Mapping[str, LineStyle]) -> Chart:
    """Steady tokens/s against the slowdown bound, averaged over seeds; without traces unless the sweep varies the bound."""
    rates: defaultdict[str, defaultdict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    most: dict[float, float] = {}
    looks: dict[str, LineStyle] = {}
    for row in view.sweep:
        if isinstance(row.get("delta"), int | float):
            if isinstance(rate := row.get("tokens_bound_per_second"), int | float):
                most[float(row["delta"])] = max(most.get(float(row["delta"]), 0.0), float(rate))
            name = str(row["policy"])
            looks.setdefault(name, drawn.get(name, drawn[str(row["name"])]))
            rates[name][float(row["delta"])].append(number(row["steady_tokens_per_second"]))
    bounds = sorted({bound for by_bound in rates.values() for bound in by_bound})
    traces: list[Trace] = []
    for name, by_bound in rates.items() if len(bounds) > 1 else ():
        means = [sum(by_bound[bound]) / len(by_bound[bound]) if bound in by_bound else math.nan for bound in bounds]
        trace = _line(name, looks[name], means, means) | {"x": [f"{bound:g}" for bound in bounds], "mode": "lines+markers"}
        trace["hovertemplate"] = f"<b>{escape(name)}</b><br>%{{y:,.4~s}} tokens/s at %{{x}}<extra></extra>"
        traces.append(trace)
    if traces and most:
        line = {"name": "upper bound", "mode": "lines", "line": {"color": "#8a929c", "width": 1, "dash": "dot"}}
        traces.append({"x": [f"{bound:g}" for bound in bounds], "y": [most.get(bound) for bound in bounds], **line})
    layout = {
        "xaxis": {"title": {"text": "bound on the slowdown"}, "type": "category"},
        "yaxis": {"title": {"text": "steady tokens/s"}, "rangemode": "tozero"},
    }
    return Chart(
        "Throughput against the bound",
        {"data": traces, "layout": layout},
        "Tokens/s from 5 to 60 % of the total work. No schedule within the bounds does all the work faster than the dotted line.",
    )


def _gain_over_load(view: SimulationView, drawn: Mapping[str, LineStyle]) -> Chart:
    """Mean gain over the seeds, with minimum and maximum, against load; without traces unless the sweep varies the load."""
    traces: list[Trace] = []
    gains = _gains(view)
    several = len({load for by_load in gains.values() for load in by_load}) > 1
    for name, by_load in gains.items() if several else ():
        loads = sorted(by_load)
        means = [sum(by_load[load]) / len(by_load[load]) for load in loads]
        trace = _line(name, drawn[name], loads, means) | {"mode": "lines+markers", "marker": {"size": 6, "color": drawn[name].colour}}
        if any(len(by_load[load]) > 1 for load in loads):
            above = [max(by_load[load]) - mean for load, mean in zip(loads, means, strict=True)]
            below = [mean - min(by_load[load]) for load, mean in zip(loads, means, strict=True)]
            trace["error_y"] = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1, "width": 3}
        trace["hovertemplate"] = f"<b>{escape(name)}</b><br>%{{y:.3g}} times better at load %{{x:.3g}}<extra></extra>"
        traces.append(trace)
    layout = {
        "xaxis": {"title": {"text": "load"}},
        "yaxis": {"title": {"text": "gain in mean JCT"}, "rangemode": "tozero"},
        "shapes": [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": {"color": "#8a929c", "width": 1, "dash": "dot"}}
        ],
    }
    references = list(dict.fromkeys(str(row.get("reference", view.reference)) for row in view.sweep))
    against = references[0] if len(references) == 1 else "the reference at the same point"
    note = f"Mean JCT of {against} over that of each policy. Mean of the seeds; the bars are the lowest and the highest."
    return Chart("Gain against load", {"data": traces, "layout": layout}, note, log=True)
