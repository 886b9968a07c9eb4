"""The arithmetic of the comparison: constants are found again from the times that they make, and the verdict says what the numbers say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import fidelity
from bench.fidelity import LOADS, Times, choose_load, compare, run_simulated, verdict
from bench.fidelity_calibration import Calibration, Point, _fitted
from bench.fidelity_work import BASE, SIZES, Work
from tlora.cluster.local import LocalMachine
from tlora.protocol import JobProfile, JobSubmitted
from tlora.shape.cost import BaseConstants, CostModel
from tlora.shape.sharing import Member, group_step_seconds

CONSTANTS = BaseConstants(5000.0, 0.02, 0.003, 0.0, 0.0, 1e6, 0.0, 1e9, {})
CALIBRATION = Calibration(CONSTANTS, 0.95, 3.0, 0.5, 0.0)


def points(cost: CostModel) -> list[Point]:
    groups = [(1, 64, 1024), (1, 256, 1024), (1, 1024, 1024), (2, 128, 1024), (4, 128, 1024), SIZES["cpu"].saturated]
    return [
        Point(m, float(n), budget, group_step_seconds(cost, BASE, budget, 1, 1, [Member(float(n), 1.0)] * m)[0]) for m, n, budget in groups
    ]


def test_calibration_finds_the_constants_again(tmp_path: Path) -> None:
    constants = replace(CONSTANTS, exchange_seconds=0.004, floor_seconds=0.015)
    wide = Point(1, 4000.0, 8192, math.hypot(0.02 + 0.004 + 4000 / 5000 / 2, 0.015), 2)
    found = _fitted(points(CostModel({BASE: constants}, 0.9)), tmp_path, 4.0, [0.1, 0.9, 0.2], [0.05], wide)
    for name in ("tokens_per_second", "launch_seconds", "floor_seconds", "member_seconds", "exchange_seconds"):
        assert getattr(found.constants, name) == pytest.approx(getattr(constants, name), rel=0.02)
        assert "calibration" in found.constants.source[name]
    assert found.fill_share == pytest.approx(0.9, rel=0.01) and found.worst_residual < 1e-3
    assert (found.start_seconds, found.job_seconds) == (3.8, 0.2)  # what the first job of a worker took, less what later ones take


def arrivals(count: int) -> list[tuple[float, JobSubmitted]]:
    return [(10.0 * k, JobSubmitted(f"j{k}", BASE, 1, JobProfile(500.0, 50, 100, 1000))) for k in range(count)]


def test_the_simulated_side_counts_starts_and_what_a_job_takes_beside_its_steps(tmp_path: Path) -> None:
    machine = LocalMachine((0, 1), "cpu", {BASE: "b"}, tmp_path)
    own = 50 * (0.02 + 500 / 5000)
    times = run_simulated(machine, arrivals(1), "fifo", CALIBRATION)
    assert times.makespan_seconds == pytest.approx(own + 3.5) and times.mean_jct_seconds == pytest.approx(own + 3.5)
    later = run_simulated(machine, arrivals(4), "fifo", CALIBRATION)  # the first on a GPU, and those that find one with a worker
    assert later.makespan_seconds == pytest.approx(30 + own + 0.5)


def judged(real: dict[str, list[float]], simulated: dict[str, float]) -> str:
    times = {policy: [Times(value, 2 * value) for value in values] for policy, values in real.items()}
    return "\n".join(verdict(compare(times, {policy: Times(value, 2 * value) for policy, value in simulated.items()})))


def test_the_verdict_says_what_the_numbers_say() -> None:
    calm = {"a": [10.0, 10.1, 10.2], "b": [20.0, 20.1, 20.2]}
    assert "the simulator holds" in judged(calm, {"a": 10.3, "b": 20.0}) and "ranking by mean JCT kept" in judged(
        calm, {"a": 10.3, "b": 20.0}
    )
    assert "does NOT hold" in judged(calm, {"a": 11.0, "b": 20.0}) and "error 8.9%" in judged(calm, {"a": 11.0, "b": 20.0})
    apart = {"a": [10.0, 10.1, 10.2], "b": [10.6, 10.7, 10.8]}
    assert "NOT kept: b against a: really +5.9%, simulated -1.0%" in judged(apart, {"a": 10.4, "b": 10.3})
    assert "does NOT hold" in judged(apart, {"a": 10.4, "b": 10.3})
    close = {"a": [10.0, 10.1, 10.2], "b": [10.2, 10.3, 10.4]}
    assert "ranking by mean JCT kept\nthe simulator holds" in judged(close, {"a": 10.4, "b": 10.1}), "a tie, both say"
    for times, told in (({"a": [10.0, 10.2, 11.0]}, "cannot decide"), ({"a": [10.0, 10.1]}, "decide nothing")):
        (line,) = (line for line in judged(times, {"a": 10.4}).splitlines() if "largest error" in line)
        assert told in line, "what the error is worth stands in its sentence"
    held = compare({"a": [Times(10.0, 20.0)] * 3}, {"a": Times(10.0, 20.0)})
    assert verdict(held)[-1] == "the simulator holds"
    assert "workers were up 1.5 s after the first job had come, so that this run cannot decide" in verdict(held, 1.5)[0]


@pytest.mark.parametrize(("tokens", "grown"), [(500.0, 0), (5000.0, 1)])
def test_a_job_of_large_steps_grows_on_the_simulated_side_too(tmp_path: Path, tokens: float, grown: int) -> None:
    """When it has rested: half of what is left for a start and a half."""
    machine = LocalMachine((0, 1), "cpu", {BASE: "b"}, tmp_path)
    (_, job), *_ = arrivals(1)
    job = replace(job, profile=JobProfile(tokens, 100, 500, 1000, (0,) * 8 + (100,)))
    times = run_simulated(machine, [(0.0, job)], "residual_capacity", CALIBRATION)
    alone = 100 * (0.02 + tokens / 5000) + 3.5
    assert times.times_grown == grown
    assert times.makespan_seconds == pytest.approx(alone) if not grown else 0.5 * alone < times.makespan_seconds < 0.75 * alone


@pytest.mark.parametrize(("grows_from", "load"), [(9.0, 3.0), (1.2, 1.0), (0.0, 3.0)])
def test_jobs_arrive_as_fast_as_leaves_a_group_room_to_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], grows_from: float, load: float
) -> None:
    """At the highest load at which one does in the simulator, unless a load is asked for or nothing could grow."""
    simulated: list[float] = []

    def run(_: LocalMachine, arrivals: Sequence[tuple[float, Any]], policy: str, __: Calibration) -> Times:
        simulated.append(arrivals[0][0])
        return Times(1.0, 1.0, times_grown=int(policy == "residual_capacity" and arrivals[0][0] <= grows_from))

    monkeypatch.setattr(fidelity, "draw_arrivals", lambda _, load, *__: [(load, None)])
    monkeypatch.setattr(fidelity, "run_simulated", run)
    two, one = (LocalMachine(gpus, "cpu", {BASE: "b"}, tmp_path) for gpus in ((0, 1), (0,)))

    def chosen(asked: float | None, machine: LocalMachine, *policies: str) -> float:
        found, arrivals = choose_load(asked, Work({}, {}), machine, CALIBRATION, policies, 0)
        assert arrivals[0][0] == found
        return found

    assert chosen(None, two, "fifo", "residual_capacity") == load and simulated[-1] <= LOADS[0]
    assert ("no group grows" in capsys.readouterr().out) == (grows_from == 0)
    tried = len(simulated)
    assert (chosen(2.0, two, "residual_capacity"), chosen(None, two, "fifo"), chosen(None, one, "residual_capacity")) == (2.0, 3.0, 3.0)
    assert len(simulated) == tried
