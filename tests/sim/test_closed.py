"""All jobs at once: throughput where arrivals do not set it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sim.small_traces import write_trace
from tlora.errors import ConfigError
from tlora.sim.metrics import metrics
from tlora.sim.records import Sample, SimulationResult
from tlora.sim.run import run_scenario
from tlora.sim.scenario import Scenario, scene_of


def test_all_jobs_are_there_from_the_first_second(tmp_path: Path) -> None:
    plain = Scenario(trace=str(write_trace(tmp_path)), policy="backfill", nodes=1)
    scene, closed = scene_of(plain), scene_of(replace(plain, closed=True))
    assert {job.submit_seconds for job in closed.jobs} == {0.0} and closed.load == math.inf
    assert [job.job for job in closed.jobs] == [job.job for job in scene.jobs] and closed.notes["arrivals"] == "all at once"
    with pytest.raises(ConfigError, match="load 0.5: .*--closed"):
        scene_of(replace(plain, closed=True, load=0.5))
    result = run_scenario(replace(plain, closed=True)).result
    assert {job.submitted_seconds for job in result.jobs} == {0.0} and {job.state for job in result.jobs} == {"done"}


def test_steady_throughput_is_that_between_5_and_60_percent_of_the_work() -> None:
    rates = [(0.0, 0.0), (10.0, 100.0), (11.0, 50.0), (29.0, 10.0), (129.0, 0.0)]  # 100 tokens, 900 and 1,000
    samples = [Sample(seconds, 0, 1, 1, 0.5, rate, 1) for seconds, rate in rates]
    found = metrics(SimulationResult("p", "tlora", "t", 0, 1, 0.9, samples=samples))
    first, last = 11.0, 29.0 + 20.0  # 100 tokens are 5 %, 1,200 are 60 %
    assert found["steady_tokens_per_second"] == pytest.approx(1100 / (last - first))
    assert math.isnan(metrics(SimulationResult("p", "tlora", "t", 0, 1, 0.9, samples=samples[:1]))["steady_tokens_per_second"])


def test_the_clusters_work_is_what_the_jobs_did(tmp_path: Path) -> None:
    result = run_scenario(Scenario(trace=str(write_trace(tmp_path)), policy="fifo", nodes=1, closed=True)).result
    found = metrics(result)
    work = sum(job.steps * job.tokens_per_step for job in result.jobs)
    assert found["tokens_per_second"] * found["makespan_seconds"] == pytest.approx(work, rel=1e-6)
    assert found["steady_tokens_per_second"] > found["tokens_per_second"]
