"""Files and views of simulations hold the results' numbers, the same bytes for the same results, and say why they cannot be written."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.sim.made_results import make_orders, make_result
from tlora.errors import ConfigError
from tlora.report.simulation_page import is_extrapolated
from tlora.shape.cost import BaseConstants
from tlora.shape.moves import MoveCosts
from tlora.sim.bounds import Bounds
from tlora.sim.metrics import metrics
from tlora.sim.outputs import constant_rows, metric_rows, move_rows, simulation_view, write_job_csv, write_metrics_csv, write_result
from tlora.sim.records import JobRecord, SimulationResult

BOUND = Bounds(100.0, 200.0, 150.0, 1000.0)


def make_results(count: int = 40) -> list[SimulationResult]:
    orders = make_orders(count)
    return [make_result(orders, "residual_capacity"), make_result(orders, "fifo"), make_result(orders, "fifo", "peft")]


def test_metric_rows_are_the_metrics_beside_their_bounds(tmp_path: Path) -> None:
    results = make_results()
    rows = metric_rows(results, [BOUND] * 3)
    for row, result in zip(rows, results, strict=True):
        found = metrics(result)
        assert found.items() <= row.items()
        assert row["mean_jct_bound_seconds"] == 200.0 and row["mean_jct_over_bound"] == found["mean_jct_seconds"] / 200.0
        assert row["makespan_over_bound"] == found["makespan_seconds"] / 1000.0
    write_metrics_csv(tmp_path / "new" / "metrics.csv", rows)
    with (tmp_path / "new" / "metrics.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [row["name"] for row in read] == ["residual_capacity/tlora", "fifo/tlora", "fifo/peft"]
    assert float(read[0]["mean_jct_seconds"]) == rows[0]["mean_jct_seconds"]


def test_job_csv_holds_every_record_to_the_last_digit(tmp_path: Path) -> None:
    results = make_results()
    results[0].jobs[0] = replace(results[0].jobs[0], state="rejected", started_seconds=math.nan, finished_seconds=math.nan, tenant='a,"b"')
    write_job_csv(tmp_path / "jobs.csv", results)
    with (tmp_path / "jobs.csv").open() as file:
        read = list(csv.DictReader(file))
    jobs = [job for result in results for job in result.jobs]
    for row, job in zip(read, jobs, strict=True):
        for name in JobRecord.__dataclass_fields__:
            value = getattr(job, name)
            assert row[name] == ("" if isinstance(value, float) and math.isnan(value) else str(value))
        assert row["jct_seconds"] == (str(job.finished_seconds - job.submitted_seconds) if job.state == "done" else "")
    assert read[0]["tenant"] == 'a,"b"' and read[-1]["kernels"] == "peft"
    before = (tmp_path / "jobs.csv").read_bytes()
    write_job_csv(tmp_path / "jobs.csv", [*results[:1], *make_results()[1:]])
    assert (tmp_path / "jobs.csv").read_bytes() == before


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_job_csv(path, []),
        lambda path: write_metrics_csv(path, []),
        lambda path: write_result(path, "<html>"),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path: Path, write: Callable[[Path], None]) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"file/out .*another path"):
        write(tmp_path / "file" / "out")


def test_a_link_to_a_result_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to("there/page.html")
    for page in ("<html>", "<html>new"):
        write_result(tmp_path / "link.html", page)
        assert (tmp_path / "link.html").is_symlink() and (tmp_path / "there" / "page.html").read_text() == page


def test_the_view_compares_with_fifo_without_the_kernels_gain_first() -> None:
    results = make_results()
    sweep = [{"policy": "fifo", "kernels": "peft", "load": 0.5, "seed": 0, "mean_jct_seconds": 10.0}]
    view = simulation_view(results, metric_rows(results, [BOUND] * 3), sweep=sweep)
    assert view.reference == "fifo/peft" and len(view.ratios) == 9
    assert [row["against"] for row in view.ratios[:3]] == ["fifo/peft"] * 3 and view.ratios[0]["name"] == "residual_capacity/tlora"
    assert view.sweep[0]["name"] == "fifo/peft"
    assert view.settings["trace"] == "made-up" and view.settings["nodes"] == "4x8" and view.num_gpus == 32
    (first, *_) = view.policies
    assert sorted(first.jct_seconds) == sorted(j.finished_seconds - j.submitted_seconds for j in results[0].jobs if j.state == "done")
    assert first.samples["allocated_share"] == [sample.allocated_gpus / 32 for sample in results[0].samples]
    assert simulation_view(results[:1], metric_rows(results[:1], [BOUND])).reference == "residual_capacity/tlora"


def test_constants_keep_their_source() -> None:
    source = {"tokens_per_second": "bench/a.json", "exchange_seconds": "extrapolated: one GPU at hand"}
    base = BaseConstants(16_000.0, 0.01, 0.001, 0.02, 0.05, 16e9, 1e6, 141e9, source)
    rows = constant_rows({"tlora": {"llama": base}, "peft": {"llama": base}})
    assert len(rows) == 4
    assert rows[1] == {
        "kernels": "tlora",
        "base": "llama",
        "field": "exchange_seconds",
        "value": 0.02,
        "source": source["exchange_seconds"],
    }


def test_what_moves_cost_is_told_with_its_source() -> None:
    rows = {str(row["field"]): row for row in move_rows(MoveCosts(warm_start_seconds=7.0))}
    assert rows["warm_start_seconds"]["value"] == 7.0 and not any(map(is_extrapolated, rows.values()))
    assert set(rows) <= {each.name for each in fields(MoveCosts)}
