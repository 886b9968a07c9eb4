"""What the benchmark of scheduler and simulator tells, and what it refuses, of a window that is small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import scheduler_speed
from tlora.sim.scenario import Scenario

JOBS = 60


@pytest.fixture(autouse=True)
def _small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_speed, "WINDOW", Scenario("window_15k", nodes=2, jobs=JOBS))
    monkeypatch.setattr(scheduler_speed, "GROUPS", (6, 12))
    monkeypatch.setattr(scheduler_speed, "WIDE_SEEDS", (233,))  # of a cluster of 32 GPUs


@pytest.mark.slow
def test_it_tells_speeds_and_times_of_each_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "speed.json"
    scheduler_speed.main(["--jobs", "50", "--load", "0.9", "--repeats", "2", "--commit", "abc", "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["benchmark"] == "scheduler_speed" and found["commit"] == "abc" and list(found["policies"]) == ["fifo", "residual_capacity"]
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 8
    for place, (policy, row) in enumerate(found["policies"].items()):
        assert row["jobs"] == 50 and row["gpus"] == 16 and row["load"] == pytest.approx(0.9)
        assert 0 < row["jobs_per_second_median"] <= row["jobs_per_second"] and row["jobs_per_processor_second"] > 0
        assert row["decisions"] >= 50 and row["decision_milliseconds_mean"] > 0
        head, *lines, wide = told[4 * place : 4 * place + 4]
        assert head.startswith(f"{policy}: 50 jobs on 16 GPUs, load 0.90: {row['jobs_per_second']:,.0f} jobs/s")
        wide_times = row["wide_decisions"]["233"]
        assert wide_times["count"] >= 50 and 0 < wide_times["median"] <= wide_times["p99"] <= wide_times["worst"]
        assert f"{wide_times['count']:,} decisions on wide trace 233: mean {wide_times['mean']:.3f} ms" in wide
        for kind, line in zip(("decision", "report"), lines, strict=True):
            times = row["events_at_1000_groups"][kind]
            assert times["count"] > 0 and 0 < times["median"] <= times["p99"] <= times["p99.9"] <= times["worst"]
            assert f"{times['count']:,} {kind}s" in line and f"p99.9 {times['p99.9']:.3f} ms" in line
