"""The report of a run: its numbers are the rows' numbers, for one job and for a hundred, finished, going on, broken or hostile."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from made_runs import eval_rows, make_run, train_rows, write_job, write_rows, write_run
from pages import PageReader, read_charts, read_figures

from tlora.errors import ConfigError
from tlora.report.page import FAINT_UP_TO
from tlora.report.rows import read_json, read_rows
from tlora.report.run_page import write_report

CHARTS = {"Train loss", "Eval loss", "Gradient norm", "Learning rate", "Throughput of the run", "Share per job", "Fill and padding"}


def report(run_dir: Path) -> str:
    path = write_report(run_dir)
    assert path == run_dir / "report.html" and not list(run_dir.glob("tmp-*"))
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    run_dir = tmp_path_factory.mktemp("eight")
    names = make_run(run_dir, 8)
    return run_dir, names, report(run_dir)


def traces_of(figure: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [trace for trace in figure["data"] if trace.get("legendgroup") == name]


@pytest.mark.parametrize(("count", "steps"), [(1, 40), (100, 60)])
def test_page_of_one_and_of_a_hundred_jobs(tmp_path: Path, count: int, steps: int) -> None:
    names = make_run(tmp_path, count, steps, seconds=60)
    page = report(tmp_path)
    reader = PageReader(page)
    swept, single = (names[:4], names[4:]) if count >= 4 else ([], names)
    results = [row[0] for row in reader.table("job")]
    assert len(results) == len(single) and all(row.startswith(name) for row, name in zip(results, single, strict=True))
    assert not swept or {row[1] for row in reader.table("place")} == set(swept)
    assert reader.attributes("data-group") == names
    charts = read_charts(page)
    assert set(charts) >= CHARTS - ({"Share per job"} if count == 1 else set())
    assert {trace["legendgroup"] for trace in charts["Train loss"]["data"]} == set(names)
    assert ("find a job" in reader.attributes("placeholder")) == (count > FAINT_UP_TO)


def test_axes_of_time_say_whether_stops_are_part_of_it(tmp_path: Path) -> None:
    """A run that was stopped and resumed hours later goes on at its last second; its page must not look as if it had never stopped."""
    make_run(tmp_path, 2, 40, seconds=60)
    shares = read_charts(report(tmp_path))["Share per job"]
    assert shares["layout"]["xaxis"]["title"]["text"].startswith("time that the run has run, without stops (")
    (tmp_path / "run.jsonl").unlink()  # as in the directory of a cluster, whose clock goes on
    losses = read_charts(report(tmp_path))["Train loss"]
    assert losses["layout"]["meta"]["x"]["time"].startswith("time since the run's start (")


def test_results_table_holds_the_results(eight: tuple[Path, list[str], str]) -> None:
    run_dir, names, page = eight
    reader = PageReader(page)
    for name, row in zip(names[4:], reader.table("job"), strict=True):
        result = read_json(run_dir / name / "result.json")
        name_, status, train, trend, evals, best, steps, rank, tokens, _ = row
        assert name_.startswith(name) and status.startswith(result["status"]) and rank == str(result["rank"]) and trend == ""
        assert steps.startswith(str(result["steps"])) and tokens == f"{result['num_tokens']:,}"
        assert train.startswith(f"{result['train_loss_first']:.4f} → ")
        assert ("NaN" in train) if math.isnan(result["train_loss"]) else (f"→ {result['train_loss']:.4f}" in train)
        if result["eval_loss_best"] is None:
            assert evals == best == "\u2013"
        else:
            assert evals.startswith(f"{result['eval_loss_first']:.4f} → {result['eval_loss']:.4f}")
            assert best == f"{result['eval_loss_best']:.4f} @{result['best_step']}"


def test_tails_are_told_apart(eight: tuple[Path, list[str], str]) -> None:
    """The tile of the packing knows nothing of the tail's gaps, and the tail has its own; the chart keeps them apart as well."""
    run_dir, _, page = eight
    rows, text = read_rows(run_dir / "run.jsonl"), PageReader(page).text
    for prefix, when in (("", "with a whole token budget on offer"), ("tail_", "less than a token budget on offer")):
        tokens, computed, offered, count = (
            sum(row[prefix + key] for row in rows) for key in ("tokens", "computed", "offered", "micro_batches")
        )
        assert f"{100 * tokens / offered:.1f} % full" in text and count
        assert f"padding {100 * (1 - tokens / computed):.1f} %; {count:,} micro-batches {when}" in text
    figure = read_charts(page)["Fill and padding"]
    fill, padding, tail_fill, tail_padding = figure["data"][::2]
    for trace, key in ((fill, "fill"), (padding, "padding"), (tail_fill, "tail_fill"), (tail_padding, "tail_padding")):
        expected = [None if row[key] is None else pytest.approx(100 * row[key], rel=1e-3, abs=1e-3) for row in rows]
        assert trace["y"] == expected and trace["y"].count(None) not in (0, len(rows)), key


def test_train_loss_is_the_rows(eight: tuple[Path, list[str], str]) -> None:
    run_dir, names, page = eight
    for name in names:
        rows = [row for row in read_rows(run_dir / name / "metrics.jsonl") if "loss" in row]
        raw, smoothed = traces_of(read_charts(page)["Train loss"], name)
        assert raw["x"] == [row["step"] for row in rows] and raw["meta"]["role"] == "raw" and smoothed["meta"]["role"] == "mean"
        assert smoothed["y"][0] == raw["y"][0] and smoothed["customdata"] == raw["y"] and raw["customdata"] == smoothed["y"]
        expected = [row["loss"] if math.isfinite(row["loss"]) else None for row in rows]
        assert raw["y"] == [value if value is None else pytest.approx(value, rel=1e-4) for value in expected]
        assert raw["meta"]["x"]["tokens"] == [row["num_tokens"] for row in rows]
        assert raw["meta"]["x"]["time"] == [pytest.approx(row["seconds"], rel=1e-4) for row in rows]


def test_a_job_has_one_colour_everywhere(eight: tuple[Path, list[str], str]) -> None:
    _, names, page = eight
    for name in names:
        colours = {trace["line" if "line" in trace else "marker"]["color"] for trace in _all_traces(page, name)}
        assert len(colours) == 1
        assert page.count(f'data-group="{name}"') == 1 and f'stroke="{colours.pop()}"' in page


def _all_traces(page: str, name: str) -> list[dict[str, Any]]:
    return [trace for figure in read_figures(page) for trace in traces_of(figure, name)]


def test_every_figure_is_one_that_plotly_knows(eight: tuple[Path, list[str], str]) -> None:
    for figure in read_figures(eight[2]):
        go.Figure(figure)  # raises on a property or value that plotly does not have


def test_sweep_is_sorted_and_has_a_heat_map(eight: tuple[Path, list[str], str]) -> None:
    run_dir, names, page = eight
    results = {name: read_json(run_dir / name / "result.json") for name in names[:4]}
    rows = PageReader(page).table("place", "job", "r", "learning_rate", "best eval loss")
    assert [row[1] for row in rows] == sorted(results, key=lambda name: results[name]["eval_loss_best"])
    (trace,) = read_charts(page)["Best eval loss over r and learning_rate"]["data"]
    assert trace["y"] == ["8", "32"] and trace["x"] == ["0.0001", "0.0003"]
    for name, result in results.items():
        row, at = trace["y"].index(str(result["settings"]["r"])), trace["x"].index(f"{result['settings']['learning_rate']:g}")
        assert trace["z"][row][at] == pytest.approx(result["eval_loss_best"], rel=1e-4) and trace["customdata"][row][at] == name


def test_reasons_and_names_are_shown_not_run(eight: tuple[Path, list[str], str], tmp_path: Path) -> None:
    _, _, page = eight
    reader = PageReader(page)
    assert "<script>alert('x')</script> & is refused" in reader.table("job")[3][0]
    assert "alert('x')" not in page and [tag for tag, _ in reader.elements].count("script") == 3
    name = "<img src=x onerror=alert(1)>"
    (tmp_path / name).mkdir()
    write_rows(tmp_path / name / "metrics.jsonl", train_rows(random.Random(1), 5, 0, 1, 100))
    hostile = report(tmp_path)
    assert "img" not in [tag for tag, _ in PageReader(hostile).elements] and PageReader(hostile).table("job")[0][0] == name
    assert {trace["name"] for trace in read_charts(hostile)["Train loss"]["data"]} == {"&lt;img src=x onerror=alert(1)&gt;"}


def test_nan_losses_are_gaps_and_are_named(tmp_path: Path) -> None:
    rows = train_rows(random.Random(2), 30, 0, 1, 100)
    rows[11]["loss"] = math.nan
    rows[12]["loss"] = math.inf
    write_run(tmp_path, ["wild"], 30)
    write_job(tmp_path, "wild", rows)
    page = report(tmp_path)
    raw, smoothed = traces_of(read_charts(page)["Train loss"], "wild")
    assert raw["y"][11:13] == smoothed["y"][11:13] == [None, None] and None not in smoothed["y"][13:]
    assert "Loss not finite: wild from step 12." in PageReader(page).text


def test_long_series_are_thinned_and_keep_their_spike(tmp_path: Path) -> None:
    rows = train_rows(random.Random(2), 9000, 0, 0.1, 100)
    rows[5000]["loss"] = 77.0
    write_run(tmp_path, ["long"], 4000)
    write_job(tmp_path, "long", rows)
    charts = read_charts(report(tmp_path))
    for figure in charts.values():
        assert all(len(trace["x"]) <= 2000 for trace in figure["data"])
    raw, _ = traces_of(charts["Train loss"], "long")
    assert raw["y"][raw["x"].index(5001)] == 77.0 and raw["x"][-1] == 9000


def test_a_run_that_is_going_on(tmp_path: Path, hold: Callable[[Path], None]) -> None:
    rng = random.Random(4)
    write_run(tmp_path, ["going", "waiting"], 10, status="running")
    hold(tmp_path)
    train = train_rows(rng, 12, 0, 1, 100)
    write_job(tmp_path, "going", [*train, *eval_rows(train, 3)])
    (tmp_path / "going" / "result.json").unlink()
    for torn in (tmp_path / "going" / "metrics.jsonl", tmp_path / "run.jsonl"):
        with torn.open("a") as file:
            file.write('{"step": 13, "loss": 1.')
    recent = sum(row["loss"] for row in train[-10:]) / 10
    page = report(tmp_path)
    assert "the mean over the last 10 steps" in page
    going, waiting = PageReader(page).table("job", "status")
    assert going[:2] == ["going", "training"] and f"{train[0]['loss']:.4f} → {recent:.4f}" in going[2]
    assert going[5:8] == ["2.4000 @12", "12", "16"]  # best of the rows: there is no result yet
    assert waiting[:2] == ["waiting", "queued"] and waiting[6:8] == ["0", "16"]


@pytest.mark.parametrize("status", ["preparing", "running"])
def test_a_killed_run_is_no_running_one(tmp_path: Path, status: str) -> None:
    """Its `run.json` is the last that it wrote, and nothing holds the directory."""
    write_run(tmp_path, ["begun", "waiting"], 10, status=status)
    write_job(tmp_path, "begun", train_rows(random.Random(4), 12, 0, 1, 100))
    (tmp_path / "begun" / "result.json").unlink()
    page = PageReader(report(tmp_path))
    begun, waiting = page.table("job", "status")
    assert begun[1] == waiting[1] == "unfinished"
    assert "killed" in page.text and "--resume" in page.text and "running" not in page.text


def test_the_jobs_of_a_living_cluster_are_running(tmp_path: Path, hold: Callable[[Path], None]) -> None:
    """Its controller holds the directory above that of its jobs."""
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (tmp_path / "workers").mkdir()
    write_run(jobs, ["waiting"], 10, status="running")
    assert "killed" in PageReader(report(jobs)).text
    hold(tmp_path)
    page = PageReader(report(jobs))
    assert page.table("job", "status")[0][1] == "queued" and "running" in page.text and "killed" not in page.text


def test_a_job_that_waits_in_a_resumed_run_is_queued(tmp_path: Path, hold: Callable[[Path], None]) -> None:
    """Its result of the run that was stopped stays until it begins."""
    write_run(tmp_path, ["waits"], 10, status="running")
    write_job(tmp_path, "waits", train_rows(random.Random(4), 12, 0, 1, 100), status="stopped")
    assert PageReader(report(tmp_path)).table("job", "status")[0][1] == "stopped", "of a killed run"
    hold(tmp_path)
    assert PageReader(report(tmp_path)).table("job", "status")[0][1] == "queued"


def test_a_clusters_directory_has_its_run_below(tmp_path: Path) -> None:
    write_run(tmp_path / "jobs", ["waiting"], 10)
    assert write_report(tmp_path) == tmp_path / "jobs" / "report.html"


@pytest.mark.parametrize("content", ["", "{", '{"jobs": 3}', '{"jobs": ["a", {"name": 5}, {}], "versions": [], "started": [1]}'])
def test_a_broken_run_json_still_gives_a_page(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    write_job(tmp_path, "polite", train_rows(random.Random(1), 5, 0, 1, 100))
    assert PageReader(report(tmp_path)).table("job")[0][0] == "polite"


def test_rows_of_wrong_types_do_not_stop_the_page(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    write_rows(
        tmp_path / "odd" / "metrics.jsonl", [{"loss": "low", "step": None}, {"loss": 1.0, "step": 2, "seconds": "x"}, {"eval_loss": []}]
    )
    write_rows(tmp_path / "run.jsonl", [{"seconds": None, "jobs": 3}, {"jobs": {"odd": "many"}}])
    assert PageReader(report(tmp_path)).table("job")[0][0] == "odd"


@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_a_directory_without_a_run_is_refused(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    if kind == "empty":
        place.mkdir()
    elif kind == "file":
        place.write_text("x")
    with pytest.raises(ConfigError, match=r"place .*run.json.*give the output_dir"):
        write_report(place)


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, 1, 10, 10)
    before = report(tmp_path)

    def full(*_: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match=r"report.html .*No space left.*free space"):
        write_report(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == before and not list(tmp_path.glob("*tmp*"))


@pytest.mark.parametrize(("value", "shown"), [(2_012_345, True), (None, False), (True, False), ("many", False), (-1, False)])
def test_the_size_of_the_base_is_shown_where_it_is_known(tmp_path: Path, value: object, shown: bool) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"started": "2026-01-02T03:04:05+00:00", "base_parameters": value}))
    text = PageReader(report(tmp_path)).text
    assert ("2.01 M" in text and "2,012,345 frozen parameters" in text) == ("frozen parameters" in text) == shown
    assert "started 2026-01-02 03:04 UTC" in text


@pytest.mark.parametrize(
    ("value", "text"), [(1767322000, "2026-01-02 02:46 UTC"), ("2026-01-02T03:04:05", "2026-01-02 03:04"), ("soon", "soon")]
)
def test_start_is_shown_however_it_is_written(tmp_path: Path, value: object, text: str) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"started": value}))
    assert f"started {text}<" in report(tmp_path)


def test_the_kernels_of_a_gpu_are_said_beside_its_name(tmp_path: Path) -> None:
    names = make_run(tmp_path, 1, 20, seconds=20)
    assert "kernels:" not in report(tmp_path)
    write_run(tmp_path, names, 20, device="NVIDIA L40S", kernels="fused, sm_89, 99 KB")
    page = report(tmp_path)
    assert page.count("kernels: fused, sm_89, 99 KB") == 1 and "NVIDIA L40S" in page
