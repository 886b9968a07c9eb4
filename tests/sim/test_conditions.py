from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from tlora.errors import ConfigError
from tlora.shape.moves import MoveCosts
from tlora.sim.conditions import Conditions
from tlora.sim.machines import ClusterShape


def test_by_default_it_is_what_was_predicted():
    conditions = Conditions()
    assert conditions.exact
    assert (conditions.speed_of("a"), conditions.length_of("a"), conditions.drift_at(5e4, "b"), conditions.delay_of("c")) == (1, 1, 1, 1)


def test_errors_are_spread_evenly_around_one_and_depend_on_seed_and_job_alone():
    conditions = Conditions(seed=3, speed_error=0.15, length_error=0.1, delay=0.5)
    speeds = [conditions.speed_of(str(job)) for job in range(4000)]
    assert min(speeds) >= 0.85 and max(speeds) <= 1.15
    assert fmean(speeds) == pytest.approx(1, abs=0.005)
    assert fmean(speed > 1.075 for speed in speeds) == pytest.approx(0.25, abs=0.03)
    assert fmean(conditions.delay_of(str(job)) for job in range(4000)) == pytest.approx(1.5, abs=0.03)
    assert conditions.speed_of("7") == speeds[7] != replace(conditions, seed=4).speed_of("7")
    assert 0.9 <= conditions.length_of("7") <= 1.1 and conditions.length_of("7") != conditions.speed_of("7")


def test_drift_swings_around_one_within_a_day():
    conditions = Conditions(drift=0.2)
    day = [conditions.drift_at(600.0 * k, "base") for k in range(144)]
    assert max(day) == pytest.approx(1.2, abs=1e-3) and min(day) == pytest.approx(0.8, abs=1e-3)
    assert fmean(day) == pytest.approx(1)
    assert conditions.drift_at(0.0, "base") == pytest.approx(conditions.drift_at(86400.0, "base"))
    assert conditions.drift_at(0.0, "base") != conditions.drift_at(0.0, "another")


def test_failures_come_as_often_as_the_mean_time_between_them_says():
    conditions = Conditions(mtbf_hours=10.0)
    drawn = [conditions.failure("0", count) for count in range(4000)]
    assert fmean(seconds for seconds, _ in drawn) == pytest.approx(36000, rel=0.05)
    assert fmean(what < 0.5 for _, what in drawn) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speed_error": 1.0}, "truth_error is 1: "),
        ({"length_error": -0.1}, "length_error"),
        ({"drift": float("nan")}, "drift"),
        ({"delay": -1.0}, "delay is -1: "),
        ({"delay": 1e300}, r"delay is 1e\+300: .* from 0 to 10"),
        ({"mtbf_hours": 0.0}, "mtbf_hours is 0: "),
        ({"mtbf_hours": 1e-300}, "mtbf_hours is 1e-300: .* from 0.1 to 1,000,000,000"),
        ({"repair_hours": float("inf")}, "repair_hours"),
        ({"usage_half_life_seconds": 0.0}, "usage_half_life_seconds is 0: .* Give 86400 for a day"),
        ({"usage_half_life_seconds": 2e9}, r"usage_half_life_seconds is 2e\+09: .* at most 1,000,000,000"),
    ],
)
def test_what_cannot_be_true_is_refused(changes: dict[str, float], named: str):
    with pytest.raises(ConfigError, match=named):
        Conditions(**changes)


def test_a_move_cannot_cost_less_than_nothing():
    with pytest.raises(ConfigError, match=r"join_seconds is -1\.0"):
        MoveCosts(join_seconds=-1.0)


@pytest.mark.parametrize("name", ["nodes", "gpus_per_node", "nodes_per_rack", "tick_seconds"])
def test_a_cluster_needs_more_than_nothing(name: str):
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        ClusterShape(**{"nodes": 1, name: 0})
