"""Filters, loads and compression of traces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tlora.errors import ConfigError
from tlora.sim.arrivals import at_load, compressed, demand_gpus, first, natural_load, span_seconds
from tlora.sim.trace import Trace, TraceJob, read_trace


def job(job_id: str, submit_seconds: float, gpus: int = 1, duration_seconds: float = 10.0, vc: str = "v", kind: str = "SFT") -> TraceJob:
    return TraceJob(job_id, submit_seconds, gpus, duration_seconds, "u", vc, kind, "COMPLETED")


TRACE = Trace("t", (job("a", 0, 2, 50), job("b", 40, 1, 20, "w"), job("c", 40, 4, 10, "v", "Debug"), job("d", 100, 1, 40, "w")))


def ids(trace: Trace) -> str:
    return "".join(job.job_id for job in trace.jobs)


def test_the_first_jobs_are_kept_from_second_0_and_said() -> None:
    assert ids(first(TRACE, 2)) == "ab" and ids(first(TRACE, 99)) == "abcd"
    late = replace(TRACE, jobs=TRACE.jobs[1:])
    assert [job.submit_seconds for job in first(late, 3).jobs] == [0, 0, 60]
    assert first(first(TRACE, 3), 2).filters == ("first 3 jobs", "first 2 jobs") and first(TRACE, 2).name == "t"


def test_the_load_is_the_gpu_time_asked_for_over_the_span() -> None:
    assert span_seconds(TRACE) == 100
    assert demand_gpus(TRACE) == (100 + 20 + 40 + 40) / 100
    assert natural_load(TRACE, 4) == 0.5


def test_compression_moves_arrivals_and_leaves_run_times() -> None:
    twice = compressed(TRACE, 2)
    assert [job.submit_seconds for job in twice.jobs] == [0, 20, 20, 50]
    assert [job.duration_seconds for job in twice.jobs] == [job.duration_seconds for job in TRACE.jobs]
    assert natural_load(twice, 4) == 1
    assert compressed(twice, 3).compression == 6
    loaded = at_load(TRACE, 8, 0.75)
    assert natural_load(loaded, 8) == pytest.approx(0.75, rel=1e-12) and loaded.compression == 3


@pytest.mark.parametrize(
    ("name", "days", "demand", "gpus", "load"),
    [
        ("ee9e8c", 91.8, 116, 128, 0.91),
        ("6c71a0+b436b2", 93.8, 92, 128, 0.72),
        ("window_15k", 7.4, 627, 128, 4.9),
        ("synth_sft", 15.6, 29, 128, 0.23),
    ],
)
def test_natural_loads_of_the_shipped_traces(name: str, days: float, demand: float, gpus: int, load: float) -> None:
    trace = read_trace(name)
    assert span_seconds(trace) / 86_400 == pytest.approx(days, abs=0.05)
    assert demand_gpus(trace) == pytest.approx(demand, abs=0.5)
    assert natural_load(trace, gpus) == pytest.approx(load, abs=0.05 if load > 1 else 0.005)
    assert natural_load(at_load(trace, gpus, 0.7), gpus) == pytest.approx(0.7, rel=1e-9)


def test_what_leaves_nothing_or_means_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="first 0 jobs .*1 or more"):
        first(TRACE, 0)
    with pytest.raises(ConfigError, match="a cluster of 0 GPUs runs nothing"):
        natural_load(TRACE, 0)
    for factor in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="compressed by .*above 0"):
            compressed(TRACE, factor)
        with pytest.raises(ConfigError, match="share of the GPUs .* from 0.001 to 10. Give 0.9"):
            at_load(TRACE, 8, factor)
    for load in (1e-300, 0.0009, 10.5, 90.0):
        with pytest.raises(ConfigError, match="share of the GPUs .* from 0.001 to 10. Give 0.9"):
            at_load(TRACE, 8, load)
    with pytest.raises(ConfigError, match="at one moment"):
        at_load(first(TRACE, 1), 8, 0.5)
