"""From scenarios to outcomes: bounds, means over seeds, gains, and numbers without wall time."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sim.small_traces import write_trace
from tlora.report.simulation_page import simulation_page
from tlora.sim.outputs import policy_name
from tlora.sim.run import (
    WALL_TIMES,
    Outcome,
    constants_in,
    gain_rows,
    page_view,
    reference_of,
    run_scenario,
    summary,
    sweep_numbers,
)
from tlora.sim.scenario import Scenario
from tlora.sim.sweep import SweepRow


@pytest.fixture
def plain(tmp_path: Path) -> Scenario:
    return Scenario(trace=str(write_trace(tmp_path)), policy="fifo", nodes=1)


def outcomes_of(plain: Scenario) -> list[Outcome]:
    """Two policies with two seeds."""
    pairs = [("fifo", "peft"), ("backfill", "tlora")]
    return [run_scenario(replace(plain, policy=policy, kernels=kernels, seed=seed)) for seed in (0, 1) for policy, kernels in pairs]


def test_an_outcome_says_what_it_is_of(plain: Scenario) -> None:
    found = run_scenario(replace(plain, policy="backfill", delta=1.5, kappa=2.0, scale=(("launch_seconds", 1.3),), seed=3))
    result = found.result
    assert (result.policy, result.kernels, result.trace, result.seed, result.num_gpus) == ("backfill", "tlora", "small", 3, 8)
    assert len(result.jobs) == 4 and all(job.state == "done" for job in result.jobs)
    assert result.settings["delta"] == 1.5 and result.settings["kappa"] == 2.0 and result.settings["scale.launch_seconds"] == 1.3
    assert result.settings["arrivals"] == "as recorded" and result.settings["GPU"] == "h200"
    jct = [job.finished_seconds - job.submitted_seconds for job in result.jobs]
    assert 0 < found.bounds.mean_jct_seconds <= sum(jct) / len(jct)


def test_a_sweeps_numbers_hold_no_wall_time(plain: Scenario) -> None:
    numbers = sweep_numbers(plain)
    assert numbers == sweep_numbers(plain) and not set(WALL_TIMES) & set(numbers)
    assert numbers["offered_load"] == run_scenario(plain).result.load and numbers["jobs_done"] == 4
    assert {"mean_jct_seconds", "p99_jct_seconds", "windows_beyond_share", "useful_utilisation", "mean_jct_bound_seconds"} <= set(numbers)


def test_the_summary_is_the_mean_over_the_seeds(plain: Scenario) -> None:
    outcomes = outcomes_of(plain)
    rows = summary(outcomes)
    assert [(row["policy"], row["kernels"]) for row in rows] == [("fifo", "peft"), ("backfill", "tlora")]
    means = [[sum(job.finished_seconds - job.submitted_seconds for job in each.result.jobs) / 4 for each in outcomes[k::2]] for k in (0, 1)]
    assert [row["mean_jct_seconds"] for row in rows] == pytest.approx([sum(mean) / 2 for mean in means])
    gains = [before / after for before, after in zip(*means, strict=True)]
    assert rows[0]["gain"] == rows[0]["least_gain"] == rows[0]["most_gain"] == 1
    assert rows[1]["gain"] == pytest.approx(sum(gains) / 2) and (rows[1]["least_gain"], rows[1]["most_gain"]) == (min(gains), max(gains))


def test_constants_are_those_of_the_bases_that_jobs_have(plain: Scenario) -> None:
    outcomes = outcomes_of(plain)
    found = constants_in(outcomes)
    assert list(found) == ["tlora", "peft"]
    assert all(set(bases) == {job.base_model for each in outcomes for job in each.result.jobs} for bases in found.values())
    assert list(constants_in(outcomes[:1])) == ["peft"]


def test_the_page_is_of_the_first_seed_with_the_gains_of_all(plain: Scenario) -> None:
    view = page_view(outcomes_of(plain), [])
    assert len(view.policies) == 2 and view.reference == view.policies[0].name and view.settings["seed"] == 0
    assert [row["seed"] for row in view.sweep] == [0, 0, 1, 1]
    assert all(math.isfinite(float(row["mean_jct_seconds"])) for row in view.sweep)
    swept = [{"name": "x", "reference": "x", "load": 0.5, "seed": 0, "mean_jct_seconds": 1.0}]
    assert page_view(outcomes_of(plain), swept).sweep == swept
    assert "extrapolated" in simulation_page(view)


def test_gains_are_held_against_exclusive_fifo_without_our_kernels_or_the_first(plain: Scenario) -> None:
    assert reference_of([("sjf", "tlora"), ("fifo", "peft")]) == ("fifo", "peft")
    assert reference_of([("sjf", "tlora"), ("fifo", "tlora")]) == ("sjf", "tlora")
    outcomes = outcomes_of(plain)[1::-1]
    assert [row["gain"] for row in summary(outcomes)] == [row["gain"] for row in summary(outcomes[::-1])][::-1]


def test_curves_of_gain_are_held_against_the_reference_at_their_point() -> None:
    rows: list[SweepRow] = [
        {"policy": policy, "kernels": kernels, "delta": delta, "offered_load": 0.5, "seed": 0.0, "mean_jct_seconds": seconds}
        for delta in (1.2, math.inf)
        for policy, kernels, seconds in (("sjf", "tlora", 2.0), ("fifo", "peft", 8.0))
    ]
    found = gain_rows(rows, ["delta"])
    fifo, sjf = policy_name("fifo", "peft"), policy_name("sjf", "tlora")
    assert [(row["name"], row["reference"]) for row in found] == [
        (name + point, fifo + point) for point in (", delta 1.2", ", delta inf") for name in (sjf, fifo)
    ]
    assert [row["mean_jct_seconds"] for row in found] == [2.0, 8.0, 2.0, 8.0] and {row["load"] for row in found} == {0.5}
    assert {row["name"] for row in gain_rows(rows[:2], [])} == {fifo, sjf}
