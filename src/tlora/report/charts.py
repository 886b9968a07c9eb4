"""The figures of a run as plain plotly dictionaries: which series, against what, in which colour. How a page shows them: `page.py`.

A trace's `legendgroup` is its job: the page's one legend switches it in all charts. `meta.x` holds the alternatives of its x axis,
`meta.role` says whether it is `raw` (every logged value) or `mean` (their trailing average).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from markupsafe import Markup

from tlora.report.line_styles import LineStyle
from tlora.report.page import FAINT_UP_TO, Chart
from tlora.report.rows import JsonObject, buckets, column, number, smooth, smoothing_window, thin
from tlora.report.run_view import JobView, RunView
from tlora.wording.numbers import settings_text, shorten, time_unit

_POINTS_PER_SERIES = 2000
_POINTS_PER_CHART = 48_000  # over all jobs: what a browser still draws without a pause
_SHARE_COLUMNS = 120  # rows of a second are noise in a stacked area; a column is at least a few micro-batches
_TAIL_COLOUR = "#8a929c"
_MARKERS_UP_TO = 40  # points: short series get markers, and a single point is invisible without one
_REWARDS = {
    "rewards/margins": ("Reward margin", "Of wanted answers over unwanted ones, mean of each logged step."),
    "rewards/accuracies": ("Reward accuracy", "Share of each logged step's pairs whose chosen answer has the larger reward."),
    "kl": ("KL of the global batch", "How far the adapter is from the base, on prompts with other rows' answers; at least 0."),
}
"""Metrics of jobs that learn which answers are wanted, and the titles and notes of their charts."""

Trace = dict[str, Any]
Figure = dict[str, Any]


@dataclass(frozen=True)
class JobCurve:
    """One job's thinned training rows: the x axes, each logged value, and how the job is drawn."""

    job: JobView
    look: LineStyle
    width: float
    window: int
    marked: bool
    x: dict[str, list[float]]
    values: dict[str, list[float]]

    @property
    def title(self) -> str:
        """The first lines of a hover text, as HTML."""
        settings = f"<br>{escape(settings_text(self.job.settings))}" if self.job.settings else ""
        return f"<b>{escape(self.job.name)}</b>{settings}"


def job_curves(run: RunView, looks: Mapping[str, LineStyle]) -> list[JobCurve]:
    """Thin each job's training rows once; all charts of a job then share their x axes. All jobs are averaged over the same window."""
    limit = max(300, min(_POINTS_PER_SERIES, _POINTS_PER_CHART // max(1, len(run.jobs))))
    per_unit, _ = time_unit(run.seconds)
    width = 2.0 if len(run.jobs) <= 20 else 1.2
    longest = max((len(job.train_rows) for job in run.jobs), default=0)
    window, marked = smoothing_window(longest), longest <= _MARKERS_UP_TO
    curves: list[JobCurve] = []
    for job in run.jobs:
        loss, norm = column(job.train_rows, "loss"), column(job.train_rows, "grad_norm")
        kept = thin([loss, norm], limit) if loss else []
        values = {
            "loss": loss,
            "loss smoothed": smooth(loss, window),
            "grad_norm": norm,
            "grad_norm smoothed": smooth(norm, window),
            "learning_rate": column(job.train_rows, "learning_rate"),
        }
        for key in _REWARDS:
            rewards = column(job.train_rows, key)
            values |= {key: rewards, f"{key} smoothed": smooth(rewards, window)} if any(map(math.isfinite, rewards)) else {}
        picked = {key: [series[at] for at in kept] for key, series in values.items()}
        axes = _x_axes([job.train_rows[at] for at in kept], job, per_unit)
        curves.append(JobCurve(job, looks[job.name], width, window, marked, axes, picked))
    return curves


def _x_axes(rows: Sequence[JsonObject], job: JobView, per_unit: float) -> dict[str, list[float]]:
    steps = column(rows, "step")
    tokens = [number(row["num_tokens"]) if "num_tokens" in row else job.tokens_at(step) for row, step in zip(rows, steps, strict=True)]
    return {"step": steps, "tokens": tokens, "time": [second / per_unit for second in column(rows, "seconds")]}


def learning_charts(run: RunView, curves: Sequence[JobCurve]) -> list[Chart]:
    """Train loss, eval loss, rewards of pairs, learning rate and gradient norm; a chart without any point is left out."""
    titles = _x_titles(run)
    losses = [trace for curve in curves for trace in _smoothed_pair(curve, "loss", ".4f")]
    evals = [_eval_trace(curve, run) for curve in curves if curve.job.eval_rows]
    rates = [_line(curve, "learning_rate", ".3g") for curve in curves if curve.values["loss"]]
    norms = [trace for curve in curves for trace in _smoothed_pair(curve, "grad_norm", ".4g")]
    pairs = any(key in curve.values for curve in curves for key in _REWARDS)
    unit = "loss per trained token, pair or answer" if pairs else "loss per trained token"
    note = _average_note(run, curves)
    broken = [f"{job.name} from step {step:,.0f}" for job in run.jobs if (step := job.broken_step) is not None]
    if broken:
        note += Markup(' <b class="bad">Loss not finite: {}.</b>').format(", ".join(broken))
    charts = (
        Chart("Train loss", _figure(losses, unit, titles), note, wide=True, log=True),
        Chart("Eval loss", _figure(evals, unit, titles), "★ marks each job's best evaluation.", log=True),
        *(_reward_chart(key, curves, titles) for key in _REWARDS),
        Chart("Gradient norm", _figure(norms, "norm before clipping", titles), _average_note(run, curves), log=True),
        Chart("Learning rate", _rate_figure(rates, titles), "As each job's schedule set it.", log=True),
    )
    return [chart for chart in charts if chart.figure["data"]]


def _reward_chart(key: str, curves: Sequence[JobCurve], x_titles: dict[str, str]) -> Chart:
    """One reward metric of the preference jobs (DPO, ORPO, KTO), on a linear scale, as margins may be negative."""
    title, note = _REWARDS[key]
    traces = [trace for curve in curves if key in curve.values for trace in _smoothed_pair(curve, key, ".4g")]
    figure = _figure(traces, title.lower(), x_titles)
    figure["layout"]["yaxis"]["type"] = "linear"
    return Chart(title, figure, note)


def _average_note(run: RunView, curves: Sequence[JobCurve]) -> str:
    when = "" if len(run.jobs) <= FAINT_UP_TO else f" (shown while {FAINT_UP_TO} jobs or fewer are switched on)"
    return f"Bold: average of about {curves[0].window if curves else 0} rows back; faint: every logged step{when}."


def _x_titles(run: RunView) -> dict[str, str]:
    """The clock of a run with rows of its own stands still from a stop to its resume; that of a cluster, which has none, does not."""
    time = "time that the run has run, without stops" if run.rows else "time since the run's start"
    return {"step": "optimizer step", "tokens": "trained tokens", "time": f"{time} ({time_unit(run.seconds)[1]})"}


def _figure(traces: list[Trace], y_title: str, x_titles: dict[str, str]) -> Figure:
    """One curve per trace over the optimizer steps. The y axis is logarithmic if any value is above zero."""
    values = [value for trace in traces for value in trace["y"] if math.isfinite(value)]
    layout = {
        "xaxis": {"title": {"text": x_titles["step"]}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": y_title}, "type": "log" if any(value > 0 for value in values) else "linear", "tickformat": "~g"},
        "meta": {"x": x_titles},
    }
    return {"data": traces, "layout": layout}


def _rate_figure(traces: list[Trace], x_titles: dict[str, str]) -> Figure:
    """Learning rates, on a linear scale unless the job with the smallest peak would look flat."""
    figure = _figure(traces, "learning rate", x_titles)
    peaks = [peak for trace in traces if (peak := max((rate for rate in trace["y"] if math.isfinite(rate)), default=0.0)) > 0]
    scale = "log" if peaks and max(peaks) > 10 * min(peaks) else "linear"
    figure["layout"]["yaxis"] |= {"type": scale, "tickformat": ".1e", "rangemode": "tozero"}
    return figure


def _line(curve: JobCurve, key: str, number_format: str) -> Trace:
    """One logged value of one job over its steps."""
    label = escape(curve.job.name)
    return {
        "type": "scatter",
        "mode": "lines+markers" if curve.marked or len(curve.x["step"]) == 1 else "lines",
        "name": label,
        "legendgroup": curve.job.name,
        "x": curve.x["step"],
        "y": curve.values[key],
        "meta": {"x": curve.x},
        "line": {"color": curve.look.colour, "width": curve.width, "dash": curve.look.dash},
        "marker": {"size": 4, "color": curve.look.colour},
        "hovertemplate": f"{curve.title}<br>%{{y:{number_format}}} at %{{x:,.6~g}}<extra></extra>",
    }


def _smoothed_pair(curve: JobCurve, key: str, number_format: str) -> list[Trace]:
    """The logged values as a faint line and their trailing average as a bold one; each hover text gives both."""
    if not curve.values["loss"]:
        return []
    raw, mean = _line(curve, key, number_format), _line(curve, f"{key} smoothed", number_format)
    raw["meta"], mean["meta"] = raw["meta"] | {"role": "raw"}, mean["meta"] | {"role": "mean"}
    for trace, other, logged, average in ((raw, mean, "y", "customdata"), (mean, raw, "customdata", "y")):
        text = f"%{{{logged}:{number_format}}} at %{{x:,.6~g}}<br>average %{{{average}:{number_format}}}"
        trace |= {"customdata": other["y"], "hovertemplate": f"{curve.title}<br>{text}<extra></extra>"}
    return [raw, mean]


def _eval_trace(curve: JobCurve, run: RunView) -> Trace:
    job = curve.job
    losses = column(job.eval_rows, "eval_loss")
    kept = thin([losses], _POINTS_PER_SERIES)
    axes = _x_axes([job.eval_rows[at] for at in kept], job, time_unit(run.seconds)[0])
    losses = [losses[at] for at in kept]
    finite = [loss for loss in losses if math.isfinite(loss)]
    best = losses.index(min(finite)) if finite else -1
    shown = curve.values | {"eval_loss": losses}
    trace = _line(replace(curve, x=axes, values=shown), "eval_loss", ".4f")
    marks = ["star" if index == best else "circle" for index in range(len(losses))]
    sizes = [(12 if curve.width > 1.5 else 8) if index == best else 4 for index in range(len(losses))]
    return trace | {"mode": "lines+markers", "marker": {"color": curve.look.colour, "symbol": marks, "size": sizes}}


def run_charts(run: RunView, curves: Sequence[JobCurve]) -> list[Chart]:
    """Throughput, share per job, fill and padding over time, and when each job ran."""
    charts: list[Chart] = []
    if run.rows:
        charts = [_throughput(run), *([_shares(run, curves)] if len(run.jobs) > 1 else []), _packing(run)]
    timeline = _timeline(run, curves)
    return [chart for chart in (*charts, timeline) if chart.figure["data"]]


def _time_axis(run: RunView) -> dict[str, Any]:
    return {"title": {"text": _x_titles(run)["time"]}, "rangemode": "tozero"}


def _over_time(run: RunView, key: str, scale: float, style: dict[str, Any]) -> list[Trace]:
    """One field of the run's rows over time: measured values faint, their average bold."""
    values = [scale * value for value in column(run.rows, key)]
    if not any(math.isfinite(value) for value in values):
        return []
    kept = thin([values], _POINTS_PER_SERIES)
    seconds, smoothed = column(run.rows, "seconds"), smooth(values, smoothing_window(len(values)))
    x = [seconds[at] / time_unit(run.seconds)[0] for at in kept]
    shared: Trace = {
        "type": "scatter",
        "x": x,
        "mode": "lines+markers" if len(kept) <= _MARKERS_UP_TO else "lines",
        "marker": {"size": 4},
    } | style
    line, hover = {"color": style["line"]["color"]}, "%{y:,.4~g} at %{x:,.4~g}<extra></extra>"
    return [
        shared | {"y": [values[at] for at in kept], "opacity": 0.3, "hoverinfo": "skip", "line": line | {"width": 1}},
        shared | {"y": [smoothed[at] for at in kept], "line": line | {"width": 2}, "hovertemplate": hover},
    ]


def _throughput(run: RunView) -> Chart:
    traces = _over_time(run, "tokens_per_second", 1.0, {"line": {"color": "#3b82f6"}})
    layout = {"xaxis": _time_axis(run), "yaxis": {"title": {"text": "tokens per second"}, "rangemode": "tozero"}}
    return Chart("Throughput of the run", {"data": traces, "layout": layout}, "All jobs together.")


def _shares(run: RunView, curves: Sequence[JobCurve]) -> Chart:
    seconds = column(run.rows, "seconds")
    spans = buckets(len(run.rows), min(_SHARE_COLUMNS, max(2, _POINTS_PER_CHART // len(run.jobs))))
    x = [seconds[span[-1]] / time_unit(run.seconds)[0] for span in spans]
    tokens = {job.name: [_tokens_in(run.rows, span, job.name) for span in spans] for job in run.jobs}
    totals = [sum(column_) or math.nan for column_ in zip(*tokens.values(), strict=True)]
    traces: list[Trace] = []
    for curve in curves:
        share = [100 * count / total for count, total in zip(tokens[curve.job.name], totals, strict=True)]
        if not any(value > 0 for value in share):
            continue
        label = escape(curve.job.name)
        trace = {
            "type": "scatter",
            "mode": "lines",
            "name": label,
            "legendgroup": curve.job.name,
            "stackgroup": "jobs",
            "x": x,
            "y": share,
            "line": {"color": curve.look.colour, "width": 0.5},
            "fillcolor": f"{curve.look.colour}cc",
            "hovertemplate": f"<b>{label}</b><br>%{{y:.1f}} % at %{{x:,.4~g}}<extra></extra>",
        }
        traces.append(trace)
    layout = {"xaxis": _time_axis(run), "yaxis": {"title": {"text": "share of the tokens (%)"}, "range": [0, 100]}}
    return Chart("Share per job", {"data": traces, "layout": layout}, "Each job's share of the computed tokens.")


def _tokens_in(rows: Sequence[JsonObject], span: range, name: str) -> float:
    total = 0.0
    for index in span:
        counts = rows[index].get("jobs")
        count = number(counts.get(name)) if isinstance(counts, dict) else math.nan
        total += count if math.isfinite(count) else 0.0
    return total


def _packing(run: RunView) -> Chart:
    fill = _over_time(run, "fill", 100.0, {"line": {"color": "#10a37f"}, "yaxis": "y"})
    padding = _over_time(run, "padding", 100.0, {"line": {"color": "#ef6c3e"}, "yaxis": "y2"})
    tails = [("tail_fill", "y"), ("tail_padding", "y2")]
    tail = [trace for key, axis in tails for trace in _over_time(run, key, 100.0, {"line": {"color": _TAIL_COLOUR}, "yaxis": axis})]
    layout = {
        "xaxis": _time_axis(run) | {"anchor": "y2"},
        "yaxis": {"title": {"text": "fill (%)"}, "domain": [0.56, 1]},
        "yaxis2": {"title": {"text": "padding (%)"}, "domain": [0, 0.44], "rangemode": "tozero"},
    }
    note = Markup(
        "Fill: tokens over the micro-batch budget. Padding: padded over computed tokens. "
        f'<span style="color:{_TAIL_COLOUR}">Grey: the tail</span>, when less than one budget of tokens was on offer.'
    )
    return Chart("Fill and padding", {"data": [*fill, *padding, *tail], "layout": layout}, note, wide=len(run.jobs) == 1)


def _timeline(run: RunView, curves: Sequence[JobCurve]) -> Chart:
    """A bar per job from its first to its last row; ✕ where it failed."""
    per_unit, unit = time_unit(run.seconds)
    traces: list[Trace] = []
    for index, curve in enumerate(curves):
        rows = [*curve.job.train_rows, *curve.job.eval_rows]
        times = [second for second in column(rows, "seconds") if math.isfinite(second)]
        if not times:
            continue
        start, end = min(times) / per_unit, max(times) / per_unit
        label, failed = escape(curve.job.name), curve.job.status == "failed"
        trace = {
            "type": "bar",
            "orientation": "h",
            "name": label,
            "legendgroup": curve.job.name,
            "base": [start],
            "x": [max(end - start, run.seconds / per_unit / 500)],  # one row alone is still a visible sliver
            "y": [index],
            "width": 0.72,
            "marker": {"color": curve.look.colour},
            "text": "✕ failed" if failed else "",
            "textposition": "inside",
            "insidetextanchor": "end",
            "textangle": 0,
            "constraintext": "none",
            "textfont": {"size": 11, "color": "#fff"},
            "hovertemplate": f"<b>{label}</b> ({escape(curve.job.status)})<br>{start:.4g} to {end:.4g} {unit}<extra></extra>",
        }
        traces.append(trace)
    count = len(curves)
    layout = {
        "height": max(150, 80 + round(count * (26 if count <= 30 else 15))),
        "barmode": "overlay",
        "xaxis": _time_axis(run),
        "yaxis": {
            "tickvals": list(range(count)),
            "ticktext": [escape(shorten(curve.job.name)) for curve in curves],
            "range": [count - 0.4, -0.6],
            "tickfont": {"size": 12 if count <= 30 else 9},
            "showgrid": False,
            "zeroline": False,
        },
    }
    return Chart("When each job ran", {"data": traces, "layout": layout}, "From its first to its last logged row.", wide=True)
