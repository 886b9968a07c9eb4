"""Where the cluster behaves as believed, jobs keep their bounds: counted by job, from start to end, and by pauses."""

from __future__ import annotations

import math

import pytest

from tlora.sim.metrics import metrics
from tlora.sim.records import SimulationResult
from tlora.sim.run import run_scenario
from tlora.sim.scenario import Scenario

pytestmark = pytest.mark.slow  # the same bounds in every run: tests/scheduler/test_residual_promises.py


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    return run_scenario(Scenario(load=0.9, policy="residual_capacity", jobs=500, nodes=8)).result


def test_the_time_in_groups_is_that_of_the_stretches(result: SimulationResult) -> None:
    inside = dict.fromkeys((job.job_id for job in result.jobs), 0.0)
    started = {job.job_id: job.started_seconds for job in result.jobs}
    for span in result.spans:
        for name in span.job_ids:
            inside[name] += max(0.0, span.end_seconds - max(span.start_seconds, started[name]))
    for job in result.jobs:
        if job.state == "done":
            assert job.group_seconds == pytest.approx(inside[job.job_id], rel=1e-6, abs=1e-3)
            assert 0 <= job.paused_seconds <= job.group_seconds <= job.finished_seconds - job.started_seconds + 1e-3


def test_bounds_are_kept(result: SimulationResult) -> None:
    found = metrics(result)
    assert found["jobs_done"] > 400 and math.isfinite(found["worst_window_over_bound"])
    assert found["late_jobs_share"] <= 0.01
    assert found["missing_without_moves_share"] <= 0.05
    assert found["pauses_p95"] <= 0.02
    assert found["missing_jobs_share"] > found["windows_beyond_share"]  # a share of windows hides jobs: both are reported
