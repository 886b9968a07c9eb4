"""What a sweep's section says: who leads, what went wrong, when it ends; and one scale for all its trends."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import Row, train_rows, write_job, write_rows, write_run
from pages import PageReader, read_charts

from tlora.report.line_styles import LineStyle
from tlora.report.rows import smoothing_window
from tlora.report.run_page import report_page
from tlora.report.run_view import read_run
from tlora.report.tables import change, spark_scale, sparkline
from tlora.wording.numbers import MINUS

RATES = (1e-4, 1e-3, 1e-2)


def rows_of(losses: list[float], seconds: float = 1.0) -> list[Row]:
    return [{"step": at, "loss": loss, "seconds": seconds * at, "num_tokens": 10 * at} for at, loss in enumerate(losses, start=1)]


def evaluated(step: int, loss: float) -> Row:
    return {"step": step, "eval_loss": loss, "seconds": float(step)}


def going_on(run_dir: Path, losses: dict[float, list[float]], evals: bool = True, **spec: Any) -> None:
    """A sweep as it is while it trains: no results, each job's values in its job.json only."""
    names = [f"s-lr{rate:g}" for rate in losses]
    write_run(run_dir, names, 5, status="running")
    for name, (rate, values) in zip(names, losses.items(), strict=True):
        directory = run_dir / name
        directory.mkdir()
        written = {"name": name, "r": 8, "learning_rate": rate, "sweep_of": "s", "data": {"path": "a"}, "num_train_epochs": 1.0} | spec
        (directory / "job.json").write_text(json.dumps(written))
        write_rows(directory / "metrics.jsonl", [evaluated(0, 3.0)] * evals + rows_of(values))


def polyline(svg: str) -> list[tuple[float, float]]:
    (points,) = re.findall(r'points="([^"]*)"', svg)
    return [(float(x), float(y)) for x, y in (point.split(",") for point in points.split())]


def test_a_sweep_that_trains_knows_its_values_leader_and_end(tmp_path: Path, hold: Callable[[Path], None]) -> None:
    going_on(tmp_path, dict(zip(RATES, ([3.0, 2.9, 2.9, 2.8], [3.0, 2.0, 1.5, 1.0], [3.0, 3.5, 4.0, 5.0]), strict=True)), max_steps=10)
    hold(tmp_path)
    reader = PageReader(report_page(read_run(tmp_path)))
    rows = reader.table("place", "job", "learning_rate", "last train loss", "status")
    assert [row[:4] for row in rows] == [["1", "s-lr0.001", "0.001", "1.8750"], ["2", "s-lr0.0001", "0.0001", "2.9000"], *[rows[2][:4]]]
    assert "Best so far: s-lr0.001 (learning_rate 0.001), last train loss 1.8750; the next best, s-lr0.0001: 2.9000." in reader.text
    assert "Diverged or failed, 1 of 3: s-lr0.01 (loss rose from 3.0000 to 3.8750)." in reader.text
    assert all(row[4] == "trainingabout 6.0 s left" for row in rows)  # six steps to go, one a second
    assert "3 of 3 still running, about 6.0 s left." in reader.text and "about 6.0 s left, as of the last row" in reader.text


def test_losses_that_do_not_rank_a_sweep_are_called_that(tmp_path: Path) -> None:
    going_on(tmp_path, {1e-4: [3.0, 2.0], 1e-3: [3.0, 1.0]})
    assert "not comparable" not in PageReader(report_page(read_run(tmp_path))).text
    order = tmp_path / "s-lr0.001" / "job.json"
    order.write_text(json.dumps(json.loads(order.read_text()) | {"data": {"path": "a", "max_length": 8}}))
    text = PageReader(report_page(read_run(tmp_path))).text
    assert "These train losses are not comparable: the jobs differ in max_length, and so in what a loss is measured on." in text


def test_epochs_tell_the_end_where_no_steps_are_set(tmp_path: Path, hold: Callable[[Path], None]) -> None:
    going_on(tmp_path, {1e-3: [3.0] * 8}, num_train_epochs=2.0)
    hold(tmp_path)
    path = tmp_path / "s-lr0.001" / "metrics.jsonl"
    write_rows(path, [row | {"epoch": row["step"] / 8} for row in rows_of([3.0] * 8)])
    (job,) = read_run(tmp_path).jobs
    assert job.progress == 0.5 and job.left_seconds == pytest.approx(8.0)


def test_nothing_is_said_of_an_end_that_cannot_be_known(tmp_path: Path, hold: Callable[[Path], None]) -> None:
    going_on(tmp_path, {1e-3: [3.0, 2.0], 1e-2: []})
    hold(tmp_path)
    reader = PageReader(report_page(read_run(tmp_path)))
    assert "2 of 2 still running." in reader.text and "2 jobs cannot be estimated yet, as of the last row" in reader.text


def test_the_evaluation_before_training_ranks_nothing(tmp_path: Path) -> None:
    """It is the base's own loss, the same for all: it would rank a diverged job above one that learned a little less."""
    write_run(tmp_path, ["s-a", "s-b", "s-c"], 5)
    evals = {"s-a": [(0, 3.0), (4, 3.5)], "s-b": [(0, 3.0), (4, 2.0)], "s-c": [(0, 3.0)]}
    for at, (name, measured) in enumerate(evals.items()):
        rows = [*rows_of([3.0, 2.0, 2.0, 2.0]), *(evaluated(*pair) for pair in measured)]
        status = {"status": "failed", "reason": "no finite gradient"} if name == "s-c" else {}
        write_job(tmp_path, name, rows, sweep_of="s", settings={"r": at}, **status)
    reader = PageReader(report_page(read_run(tmp_path)))
    rows = reader.table("place", "job", "r", "best eval loss")
    assert [row[:2] + row[3:4] for row in rows[:2]] == [["1", "s-b", "2.0000"], ["2", "s-a", "3.5000"]]
    assert rows[2][0] == rows[2][3] == "\u2013" and "Diverged or failed, 1 of 3: s-c (failed)." in reader.text


def test_a_sweep_in_which_all_went_well_says_so(tmp_path: Path) -> None:
    going_on(tmp_path, {1e-3: [3.0, 3.1], 1e-2: [3.0, 2.0]})
    assert "No job diverged or failed." in PageReader(report_page(read_run(tmp_path))).text


@pytest.mark.parametrize("count", [20, 100])
def test_nothing_of_a_long_sweep_is_cut(tmp_path: Path, count: int) -> None:
    losses = {1e-5 * at: [3.0, 3.0 - at / count] for at in range(1, count + 1)}
    going_on(tmp_path, losses)
    page = report_page(read_run(tmp_path))
    reader = PageReader(page)
    assert len(reader.table("place")) == count and len(reader.attributes("data-group")) == count
    assert f"{count} of {count} shown" in reader.text
    assert all(label for label in reader.attributes("data-label"))


def test_equal_jobs_have_equal_curves_however_long_they_go_on(tmp_path: Path) -> None:
    rng = random.Random(3)
    losses = [4.0 - at / 100 + rng.gauss(0, 0.1) for at in range(300)]
    write_run(tmp_path, ["long", "short"], 5)
    write_job(tmp_path, "long", rows_of(losses))
    write_job(tmp_path, "short", rows_of(losses[:50]))
    traces = read_charts(report_page(read_run(tmp_path)))["Train loss"]["data"]
    long, short = (trace for trace in traces if trace["meta"]["role"] == "mean")
    assert short["y"] == long["y"][:50] and short["y"][0] == pytest.approx(losses[0], rel=1e-4)
    jobs = read_run(tmp_path).jobs
    scale = spark_scale(jobs, smoothing_window(300))
    whole, part = (polyline(sparkline(job, scale, LineStyle("#123456"))) for job in jobs)
    assert part[0] == whole[0] and part[-1][0] < whole[-1][0] / 5


def test_a_flat_job_is_drawn_flat(tmp_path: Path) -> None:
    rng = random.Random(4)
    write_run(tmp_path, ["flat", "falls"], 5)
    write_job(tmp_path, "flat", rows_of([3.0 + rng.gauss(0, 0.03) for _ in range(200)]))
    write_job(tmp_path, "falls", rows_of([3.0 * 0.98**at for at in range(200)]))
    flat, falls = read_run(tmp_path).jobs
    for jobs in ([flat], [flat, falls]):
        heights = [y for _, y in polyline(sparkline(flat, spark_scale(jobs, 5), LineStyle("#123456")))]
        assert max(heights) - min(heights) < 3  # of 30 pixels
    heights = [y for _, y in polyline(sparkline(falls, spark_scale([flat, falls], 5), LineStyle("#123456")))]
    assert heights == sorted(heights) and heights[-1] - heights[0] > 20


@pytest.mark.parametrize(
    ("losses", "linear"), [([2.0, 1.0, 0.0], False), ([0.0, 0.0], True), ([-1.0, -2.0], True), ([1.0, math.nan, 0.5], False)]
)
def test_trends_take_zero_negative_and_missing_losses(tmp_path: Path, losses: list[float], linear: bool) -> None:
    write_run(tmp_path, ["odd"], 5)
    write_job(tmp_path, "odd", rows_of(losses))
    (job,) = read_run(tmp_path).jobs
    scale = spark_scale([job], 3)
    assert scale is not None and scale.linear == linear
    assert all(0 <= x <= 120 and 0 <= y <= 30 for x, y in polyline(sparkline(job, scale, LineStyle("#123456"))))
    figure = read_charts(report_page(read_run(tmp_path)))["Train loss"]
    assert figure["layout"]["yaxis"]["type"] == ("linear" if linear else "log")


def test_no_trend_without_two_losses(tmp_path: Path) -> None:
    write_run(tmp_path, ["one"], 5)
    write_job(tmp_path, "one", rows_of([2.0]))
    assert spark_scale(read_run(tmp_path).jobs, 3) is None


@pytest.mark.parametrize(("low", "scale"), [(1e-4, "linear"), (1e-6, "log")])
def test_learning_rates_far_apart_are_drawn_on_a_log_axis(tmp_path: Path, low: float, scale: str) -> None:
    write_run(tmp_path, ["a", "b"], 5)
    for name, peak in (("a", 2e-4), ("b", low)):
        write_job(tmp_path, name, [row | {"learning_rate": peak} for row in train_rows(random.Random(1), 5, 0, 1, 10)])
    assert read_charts(report_page(read_run(tmp_path)))["Learning rate"]["layout"]["yaxis"]["type"] == scale


@pytest.mark.parametrize(
    ("first", "last", "shown"),
    [
        (2.0, 1.0, f"{MINUS}50 %"),
        (2.0, 2.5, "+25 %"),
        (2.0, 2.004, ""),
        (2.0, 1.996, ""),
        (8.52, 0.025, f"{MINUS}99.7 %"),
        (8.52, 1e-6, f"{MINUS}99.9 %"),
        (8.52, 0.0, f"{MINUS}100.0 %"),
        (0.0, 1.0, ""),
        (math.nan, 1.0, ""),
    ],
)
def test_a_change_is_in_percent_where_that_tells_something(first: float, last: float, shown: str) -> None:
    assert re.sub(r"^.*→ [\d.e∞NaN+-]+", "", re.sub(r"<[^>]*>", "", change(first, last))).strip() == shown
