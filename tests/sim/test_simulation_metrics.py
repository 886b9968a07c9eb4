"""Metrics by hand on few jobs, by another way of counting on many, and nothing but nan where there is nothing to measure."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.sim.made_results import make_orders, make_result
from tlora.sim.metrics import compare, compare_all, metrics, shared_gpus
from tlora.sim.records import GroupSpan, JobRecord, Sample, SimulationResult

JOB = JobRecord("a", "ann", "base", 1, 0.0, 10.0, 30.0, "done", 100.0, 40.0, 10.0, 1.5, 4, 1, 2, 20.0, 2.0, 1.2)


def make_small() -> SimulationResult:
    """a waits 10 s, runs 20; b runs 10, waits 10, runs 20; c is cancelled; d never ran; e is refused. One of two GPUs is lost at 20 s."""
    jobs = [
        JOB,
        replace(JOB, job_id="b", tenant="bob", started_seconds=0.0, finished_seconds=40.0, alone_seconds=40.0, windows=6, windows_beyond=0),
        replace(JOB, job_id="c", state="cancelled", started_seconds=40.0, finished_seconds=50.0, windows=0, regroupings=1),
        replace(JOB, job_id="d", state="unfinished", started_seconds=math.nan, finished_seconds=math.nan, windows=0, regroupings=0),
        replace(JOB, job_id="e", state="rejected", submitted_seconds=-5.0, started_seconds=math.nan, windows=0, regroupings=0),
    ]
    spans = [
        GroupSpan("g", "base", (0,), 0.0, 10.0, ("b",)),
        GroupSpan("h", "base", (0, 1), 10.0, 20.0, ("a",)),
        GroupSpan("h", "base", (0,), 20.0, 30.0, ("a", "b")),
        GroupSpan("h", "base", (0,), 30.0, 40.0, ("b",)),
        GroupSpan("i", "base", (0,), 40.0, 50.0, ("c",)),
    ]
    samples = [
        Sample(-10.0, 0, 0, 0, 0.0, 0.0, 2),
        Sample(0.0, 1, 1, 1, 0.5, 100.0, 2),
        Sample(10.0, 1, 1, 2, 0.75, 150.0, 2),
        Sample(20.0, 1, 2, 1, 1.0, 100.0, 1),
        Sample(50.0, 1, 0, 0, 0.0, 0.0, 1),
        Sample(90.0, 1, 0, 0, 0.0, 0.0, 1),
    ]
    return SimulationResult("ours", "tlora", "t", 0, 2, 0.9, jobs, spans, samples, decisions=8, decision_seconds=0.02)


def test_by_hand() -> None:
    found = metrics(make_small())
    assert found["mean_jct_seconds"] == found["median_jct_seconds"] == 35.0
    assert found["p90_jct_seconds"] == pytest.approx(39.0) and found["p99_jct_seconds"] == pytest.approx(39.9)
    assert found["queueing_share"] == pytest.approx((10 + 10) / (30 + 40))
    assert found["makespan_seconds"] == 50.0
    assert found["windows_beyond_share"] == pytest.approx(1 / 10)
    assert (found["slowdown_p50"], found["slowdown_p99"], found["worst_slowdown_p99"]) == (1.2, 1.2, 2.0)
    assert found["fairness_mean"] == pytest.approx((3 + 1) / 2) and found["fairness_p99"] == pytest.approx(2.98)
    assert found["tenant_fairness"] == pytest.approx((1 / 3 + 1) ** 2 / (2 * (1 / 9 + 1)))
    gpu_seconds = 10 * 2 + 10 * 2 + 30 * 1
    assert found["allocated_utilisation"] == pytest.approx((10 * 1 + 10 * 2 + 30 * 1) / gpu_seconds)
    assert found["useful_utilisation"] == pytest.approx((0.5 * 20 + 0.75 * 20 + 1.0 * 30) / gpu_seconds)
    assert found["tokens_per_second"] == pytest.approx((1000 + 1500 + 3000) / 50)
    assert found["shared_gpu_share"] == pytest.approx(10 / (10 + 20 + 10 + 10 + 10))
    assert found["regroupings_per_job"] == pytest.approx((2 + 2 + 1) / 3)
    assert found["decision_milliseconds"] == pytest.approx(2.5)
    states = {key: found[f"jobs_{key}"] for key in ("done", "cancelled", "failed", "rejected", "unfinished")}
    assert states == {"done": 2, "cancelled": 1, "failed": 0, "rejected": 1, "unfinished": 1}


def test_promises_are_counted_by_window_by_job_and_from_start_to_end() -> None:
    kept = replace(JOB, windows=10, windows_beyond=0, max_slowdown=1.5, alone_seconds=100.0, group_seconds=150.0, paused_seconds=1.0)
    moved = replace(kept, job_id="b", windows_beyond=2, windows_with_moves=4, windows_with_moves_beyond=2, group_seconds=151.0)
    slow = replace(kept, job_id="c", windows_beyond=3, windows_with_moves=1, windows_with_moves_beyond=1, worst_slowdown=6.0)
    unseen = replace(kept, job_id="d", windows=0)
    found = metrics(SimulationResult("ours", "tlora", "t", 0, 2, 0.9, [kept, moved, slow, unseen]))
    assert found["windows_beyond_share"] == pytest.approx(5 / 30) and found["windows_with_moves_share"] == pytest.approx(5 / 30)
    assert found["windows_with_moves_beyond_share"] == pytest.approx(3 / 5)
    assert found["missing_jobs_share"] == pytest.approx(2 / 3) and found["missing_without_moves_share"] == pytest.approx(1 / 3)
    assert found["worst_window_over_bound"] == 4.0
    assert found["late_jobs_share"] == pytest.approx(1 / 4)  # exactly at its bound is within
    assert found["stretch_over_bound_p99"] == pytest.approx(1.0065, abs=1e-3) and found["pauses_p95"] == pytest.approx(0.01)


def test_shared_gpus_are_a_step_function_of_the_stretches() -> None:
    spans = [
        GroupSpan("g", "base", (0, 1), 0.0, 10.0, ("a", "b")),
        GroupSpan("h", "base", (2,), 5.0, 20.0, ("c", "d", "e")),
        GroupSpan("i", "base", (3, 4, 5), 0.0, 50.0, ("f",)),
    ]
    assert shared_gpus(spans, [0.0, 5.0, 20.0, 40.0]) == pytest.approx([2.0, (5 * 3 + 10 * 1) / 15, 0.0, 0.0])
    assert shared_gpus(spans[2:], [0.0, 5.0]) == [0.0, 0.0] and shared_gpus(spans, [3.0]) == [0.0]


def test_nothing_to_measure_is_nan() -> None:
    found = metrics(SimulationResult("ours", "tlora", "t", 0, 2, 0.9))
    assert {value for key, value in found.items() if key.startswith("jobs_")} == {0.0}
    assert all(math.isnan(value) for key, value in found.items() if not key.startswith("jobs_"))
    assert set(found) == set(metrics(make_small()))


@pytest.mark.parametrize("policy", ["fifo", "backfill", "residual_capacity"])
def test_many_jobs_counted_another_way(policy: str) -> None:
    result = make_result(make_orders(300), policy)
    found = metrics(result)
    done = [job for job in result.jobs if job.state == "done"]
    assert found["mean_jct_seconds"] == pytest.approx(sum(job.finished_seconds - job.submitted_seconds for job in done) / len(done))
    waited = sum(job.started_seconds - job.submitted_seconds for job in done)  # nothing is preempted there
    assert found["queueing_share"] == pytest.approx(waited / sum(job.finished_seconds - job.submitted_seconds for job in done), abs=1e-9)
    used = sum((span.end_seconds - span.start_seconds) * len(span.gpus) for span in result.spans)
    assert found["allocated_utilisation"] == pytest.approx(used / found["makespan_seconds"] / result.num_gpus)
    assert found["p99_jct_seconds"] >= found["p90_jct_seconds"] >= found["median_jct_seconds"] > 0
    assert sum(value for key, value in found.items() if key.startswith("jobs_")) == 300


def test_ratios_are_over_the_jobs_done_in_both() -> None:
    mine, other = make_small(), make_small()
    mine.policy = "fifo"
    other.jobs = [replace(JOB, finished_seconds=15.0), replace(JOB, job_id="b", state="failed"), *other.jobs[2:]]
    other.samples = [replace(sample, tokens_per_second=2 * sample.tokens_per_second) for sample in other.samples]
    (row, same) = compare([other, mine], mine)
    assert (row["policy"], row["against"], row["jobs_compared"]) == ("ours", "fifo", 1.0)
    assert row["mean_jct_seconds"] == row["p99_jct_seconds"] == pytest.approx(2.0)
    assert row["tokens_per_second"] == pytest.approx(2.0) and row["makespan_seconds"] == pytest.approx(1.0)
    assert {value for value in same.values() if isinstance(value, float)} == {1.0, 2.0}  # 2 jobs, everything else even
    assert compare_all([other, mine]) == [compare([other, mine], other), [row, same]]
