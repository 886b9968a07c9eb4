"""The page of a simulation: whole for no job, one and two thousand, its numbers those that it was given, nothing loaded or run."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from html import unescape
from typing import Any

import plotly.graph_objects as go
import pytest
from pages import PageReader, read_charts, unpack

from tlora.report.simulation_charts import column_means, simulation_charts
from tlora.report.simulation_page import simulation_page
from tlora.report.simulation_view import PolicyView, SimulationView, looks
from tlora.wording.metrics import GROUPS, TIMES, metric_text

NAMES = [("residual_capacity", "tlora"), ("fifo", "tlora"), ("fifo", "peft")]
CONSTANTS = [
    {"kernels": "tlora", "base": "llama", "field": "tokens_per_second", "value": 16_000.0, "source": "bench/results/h200.json"},
    {"kernels": "tlora", "base": "llama", "field": "exchange_seconds", "value": 0.02, "source": "extrapolated: one GPU was at hand"},
]


def make_policy(at: int, jobs: int, gpus: int) -> PolicyView:
    dice = random.Random(at)
    policy, kernels = NAMES[at]
    jct = [dice.lognormvariate(8, 1.5) * (at + 1) for _ in range(jobs)]
    metrics = {metric.key: 1000.0 * (at + 1) for metrics in GROUPS.values() for metric in metrics if jobs}
    metrics |= {"jobs_unfinished": 0.0, "jobs_done": float(jobs)}
    spans: list[dict[str, Any]] = []
    for index in range(jobs):
        first, start = dice.randrange(gpus), dice.uniform(0, 1e6)
        row = {"group_id": f"g{index // 3}", "base_model": ("llama", "qwen")[index % 2], "gpus": tuple({first, (first + 1) % gpus})}
        spans.append(row | {"start_seconds": start, "end_seconds": start + dice.uniform(1, 1e4), "job_ids": (f"job-{index}", "job-0")})
    seconds = [at * 500.0 for at in range(jobs)]
    keys = ("waiting_jobs", "allocated_share", "useful_share", "allocated_gpus", "shared_gpus")
    samples = {key: [dice.random() for _ in seconds] for key in keys} | {"seconds": seconds}
    return PolicyView(f"{policy}/{kernels}", policy, kernels, metrics, jct, samples, 500.0 * jobs, spans)


def make_view(jobs: int, gpus: int = 128, policies: int = 3) -> SimulationView:
    made = [make_policy(at, jobs, gpus) for at in range(policies)]
    ratios: list[dict[str, Any]] = []
    keys = [metric.key for metrics in GROUPS.values() for metric in metrics]
    for against in reversed(range(policies)):
        for at in range(policies):
            row = dict.fromkeys(keys, (against + 1) / (at + 1) if jobs else math.nan)
            ratios.append({"name": made[at].name, "against": made[against].name, "jobs_compared": jobs} | row)
    settings = {"trace": "made-up", "GPUs": gpus, "load": 0.9, "seed": 0, "filters": "none"}
    return SimulationView(f"{jobs} jobs", gpus, settings, made, ratios, made[-1].name, constants=CONSTANTS)


@pytest.mark.parametrize("jobs", [0, 1, 2000])
def test_page_of_none_one_and_two_thousand_jobs(jobs: int) -> None:
    page = simulation_page(make_view(jobs))
    reader = PageReader(page)
    opening, *metrics_tables, reference, mean, p99, settings, constants = reader.tables
    assert opening[0][:3] == ["policy", "mean JCT", "gain"]
    assert [row[2] for row in opening[1:]] == ([f"{ratio}{TIMES}" for ratio in ("3.00", "1.50", "1.00")] if jobs else ["\u2013"] * 3)
    said = f"Lowest mean JCT: {'/'.join(NAMES[0])}, {metric_text('duration', 1000.0)}, 3.00{TIMES} better than {'/'.join(NAMES[-1])}"
    assert (said in reader.text) == bool(jobs) and ("No job was done." in reader.text) != bool(jobs)
    assert dict(settings[1:]) == {"trace": "made-up", "GPUs": "128", "load": "0.9", "seed": "0", "filters": "none"}
    for table, metrics in zip(metrics_tables, GROUPS.values(), strict=True):
        assert table[0] == ["policy", *(metric.label for metric in metrics)]
        assert [row[0] for row in table[1:]] == [f"{policy}/{kernels}" for policy, kernels in NAMES]
    assert "extrapolated" in reader.text and "exchange_seconds. See Constants." in reader.text
    assert [row[4] for row in constants[1:]] == ["measured", "extrapolated"] and constants[2][5] == "one GPU was at hand"
    expected = {"Completion times", "Jobs that wait", "Useful utilisation", "Allocated GPUs", "Shared GPU time", "Gain"} if jobs else set()
    assert set(read_charts(page)) == expected
    assert ("gantt-canvas" in reader.attributes("id")) == bool(jobs)
    if jobs:
        assert [row[1] for row in reference[1:]] == [f"{ratio}{TIMES}" for ratio in ("3.00", "1.50", "1.00")]
        assert reference[1][-1] == f"{jobs:,}"
        expected_mean = (("1.00", "2.00", "3.00"), ("0.50", "1.00", "1.50"), ("0.33", "0.67", "1.00"))
        assert [row[1:] for row in mean[1:]] == [[f"{ratio}{TIMES}" for ratio in row] for row in expected_mean]
        assert p99[1:] == mean[1:] and metrics_tables[0][1][1] == metric_text("duration", 1000.0)
    assert len(page) < 3e6


@pytest.fixture(scope="module")
def many() -> tuple[SimulationView, str]:
    view = make_view(2000)
    return view, simulation_page(view)


def test_plotly_takes_every_figure(many: tuple[SimulationView, str]) -> None:
    for figure in read_charts(many[1]).values():
        go.Figure(data=figure["data"], layout=figure["layout"])
        assert {trace["legendgroup"] for trace in figure["data"]} == {policy.name for policy in many[0].policies}


def test_completion_times_are_the_jobs(many: tuple[SimulationView, str]) -> None:
    view, page = many
    for trace, policy in zip(read_charts(page)["Completion times"]["data"], view.policies, strict=True):
        jct = sorted(policy.jct_seconds)
        assert (
            len(trace["x"]) <= 400
            and trace["x"][0] == pytest.approx(jct[0], rel=1e-4)
            and trace["x"][-1] == pytest.approx(jct[-1], rel=1e-4)
        )
        assert trace["y"][-1] == 100 and trace["y"] == sorted(trace["y"])
        middle = min(range(len(trace["y"])), key=lambda at: abs(trace["y"][at] - 50))
        assert trace["x"][middle] == pytest.approx(jct[len(jct) // 2], rel=0.05)
    axis = read_charts(page)["Completion times"]["layout"]["xaxis"]
    assert axis["type"] == "log" and axis["range"][0] < math.log10(1e3) < axis["range"][1]


@pytest.mark.parametrize("jobs", [2, 150, 399, 401])
def test_few_jobs_are_all_on_the_curve_of_completion_times(jobs: int) -> None:
    view = make_view(jobs)
    for trace, policy in zip(read_charts(simulation_page(view))["Completion times"]["data"], view.policies, strict=True):
        assert len(trace["x"]) == min(jobs, 400) and trace["y"][-1] == 100
        if jobs < 400:
            assert trace["x"] == pytest.approx(sorted(policy.jct_seconds), rel=1e-4)


def test_kernels_differ_by_dashes_and_policies_by_colour(many: tuple[SimulationView, str]) -> None:
    lines = {trace["legendgroup"]: trace["line"] for trace in read_charts(many[1])["Completion times"]["data"]}
    ours, fifo, plain = (lines[f"{policy}/{kernels}"] for policy, kernels in NAMES)
    assert len({ours["color"], fifo["color"], plain["color"]}) == 3
    assert (ours["dash"], fifo["dash"], plain["dash"]) == ("solid", "solid", "dash")
    assert "Dashed: with other kernels than tlora." in PageReader(many[1]).text


def test_means_over_time_are_those_of_the_steps() -> None:
    edges = [0.0, 10.0, 20.0, 30.0, 40.0]
    means = column_means([5.0, 12.0, 14.0], [1.0, 3.0, 5.0], 25.0, edges)
    assert means[:3] == [pytest.approx(1.0), pytest.approx((2 * 1 + 2 * 3 + 6 * 5) / 10), pytest.approx(5.0)]
    assert math.isnan(means[3])
    assert all(math.isnan(mean) for mean in column_means([], [], 25.0, edges))
    assert math.isnan(column_means([0.0], [1.0], 10.0 * (1 + 1e-12), edges)[1])


def test_gain_against_load_is_the_ratio_at_the_same_load_and_seed() -> None:
    seconds = {
        ("ours", 0.5): (10.0, 20.0),
        ("ours", 1.0): (50.0, 40.0),
        ("fifo/peft", 0.5): (20.0, 60.0),
        ("fifo/peft", 1.0): (200.0, 240.0),
    }
    rows = [
        {"name": name, "load": load, "seed": seed, "mean_jct_seconds": value}
        for (name, load), values in seconds.items()
        for seed, value in enumerate(values)
    ]
    page = simulation_page(replace(make_view(1), sweep=rows))
    (trace,) = read_charts(page)["Gain against load"]["data"]
    assert trace["legendgroup"] == "ours" and trace["x"] == [0.5, 1] and trace["y"] == [2.5, 5]
    assert trace["error_y"]["array"] == [0.5, 1] and trace["error_y"]["arrayminus"] == [0.5, 1]
    assert "ours" in PageReader(page).attributes("data-group")
    assert "Mean JCT of fifo/peft over that of each policy" in PageReader(page).text
    assert "Gain against load" not in read_charts(simulation_page(replace(make_view(1), sweep=[row for row in rows if row["load"] == 1.0])))
    others = [row | {"name": f"{row['name']}, gpus 64", "reference": "ours, gpus 64"} for row in rows]
    charts = read_charts(simulation_page(replace(make_view(1), sweep=[*rows, *others])))
    curves = {trace["legendgroup"]: trace["y"] for trace in charts["Gain against load"]["data"]}
    assert set(curves) == {"ours", "fifo/peft, gpus 64"} and curves["fifo/peft, gpus 64"] == pytest.approx([5 / 12, 5 / 24], rel=1e-4)
    with pytest.raises(AssertionError, match="two rows of the sweep"):
        simulation_page(replace(make_view(1), sweep=[*rows, rows[0]]))


def test_groups_hold_every_stretch(many: tuple[SimulationView, str]) -> None:
    view, page = many
    data = json.loads(unpack(page, "gantt-data"))
    first = min(span["start_seconds"] for policy in view.policies for span in policy.spans)
    assert data["gpus"] == 128 and len(data["colours"]) == len(data["bases"]) == 2
    for packed, policy in zip(data["policies"], view.policies, strict=True):
        spans = packed["spans"]
        assert packed["name"] == policy.name and len(spans["start"]) == len(policy.spans)
        for at, span in enumerate(policy.spans):
            assert spans["start"][at] == pytest.approx(span["start_seconds"] - first, abs=1e-3)
            assert spans["end"][at] == pytest.approx(span["end_seconds"] - first, abs=1e-3)
            runs = spans["rows"][at]
            assert [gpu for low, high in zip(runs[::2], runs[1::2], strict=True) for gpu in range(low, high + 1)] == sorted(span["gpus"])
            assert tuple(data["jobs"][job] for job in spans["jobs"][at]) == span["job_ids"]
            assert spans["names"][spans["group"][at]] == span["group_id"] and data["bases"][spans["base"][at]] == span["base_model"]


def test_the_shortest_stretches_go_first_and_the_page_says_so() -> None:
    view = make_view(1, policies=1)
    row = view.policies[0].spans[0]
    spans = [row | {"start_seconds": float(at), "end_seconds": at + (1.0 if at % 5 else 0.5)} for at in range(25_000)]
    page = simulation_page(replace(view, policies=[replace(view.policies[0], spans=spans)]))
    (packed,) = json.loads(unpack(page, "gantt-data"))["policies"]
    assert len(packed["spans"]["start"]) == 20_000 and packed["spans"]["start"] == sorted(packed["spans"]["start"])
    assert min(end - start for start, end in zip(packed["spans"]["start"], packed["spans"]["end"], strict=True)) == 1.0
    assert "Left out, the shortest stretches: 5,000 of residual_capacity/tlora." in PageReader(page).text


def test_names_from_outside_are_text_and_nothing_is_loaded() -> None:
    evil = '</script><img src=x onerror="alert(1)">'
    view = make_view(3)
    policies = [replace(policy, name=policy.name + evil, policy=evil, kernels=evil) for policy in view.policies]
    spans = [row | {"group_id": evil, "base_model": evil, "job_ids": (evil,)} for row in policies[0].spans]
    ratios = [row | {"name": row["name"] + evil, "against": row["against"] + evil} for row in view.ratios]
    constants = [{key: evil if isinstance(value, str) else value for key, value in row.items()} for row in view.constants]
    settings = {evil: evil}
    view = SimulationView(
        evil, 128, settings, [replace(policies[0], spans=spans), *policies[1:]], ratios, view.reference + evil, (), constants
    )
    page = simulation_page(view)
    reader = PageReader(page)
    assert not [tag for tag, _ in reader.elements if tag in ("img", "a", "iframe")] and evil in reader.text
    assert [value for key in ("src", "srcset", "action", "data", "poster", "onerror") for value in reader.attributes(key)] == []
    assert reader.attributes("href") == ["data:,"] and not re.search(r"https?://|@import|url\(", page)
    labels = [trace["name"] for figure in read_charts(page).values() for trace in figure["data"]]
    assert labels and all("<" not in label and evil in unescape(label) for label in labels)


def test_shared_time_is_of_the_time_in_groups_and_of_policies_that_share() -> None:
    view = make_view(20)
    columns = {"seconds": [0.0, 100.0], "waiting_jobs": [0.0, 0.0], "allocated_share": [0.5, 0.5], "useful_share": [0.1, 0.1]}
    shares, alone = ({"allocated_gpus": [4.0, 4.0], "shared_gpus": gpus} for gpus in ([1.0, 3.0], [0.0, 0.0]))
    made = [
        replace(policy, samples=columns | own, end_seconds=200.0) for policy, own in zip(view.policies, (shares, alone, alone), strict=True)
    ]
    (chart,) = (chart for chart in simulation_charts(replace(view, policies=made), looks(view)) if chart.title == "Shared GPU time")
    (trace,) = chart.figure["data"]
    assert trace["legendgroup"] == view.policies[0].name
    assert trace["y"][0] == pytest.approx(25.0) and trace["y"][-1] == pytest.approx(75.0)
    none = replace(view, policies=[replace(policy, samples=columns | alone) for policy in view.policies])
    assert "Shared GPU time" not in [chart.title for chart in simulation_charts(none, looks(none))]


def test_the_page_opens_with_its_result_and_the_gains(many: tuple[SimulationView, str]) -> None:
    view, page = many
    text = PageReader(page).text
    places = [
        text.index(words)
        for words in ("Lowest mean JCT: ", "Mean JCT of fifo/peft over that of each policy.", "Policies", "Curves", "Settings")
    ]
    assert places == sorted(places)
    figure = read_charts(page)["Gain"]
    assert [(trace["y"], trace["x"]) for trace in figure["data"]] == [
        ([f"{a}/{b}"], [gain]) for (a, b), gain in zip(NAMES, (3, 1.5, 1), strict=True)
    ]
    colours = [trace["marker"]["color"] for trace in figure["data"]]
    assert colours == [looks(view)[f"{a}/{b}"].colour for a, b in NAMES]
