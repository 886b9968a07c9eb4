"""The grid of a sweep: what one writes, what it stands for, what is refused."""

from __future__ import annotations

import math

import pytest

from tlora.errors import ConfigError
from tlora.sim.scenario import CONSTANTS, Scenario
from tlora.sim.sweep import KEYS, RANGE_POINTS, read_grid, scenarios_of


def test_values_and_ranges() -> None:
    assert read_grid("load=0.5:1.1,delta=1.2:2:inf,gpus=64:1024") == {"load": (0.5, 1.1), "delta": (1.2, 2.0, math.inf), "gpus": (64, 1024)}
    assert read_grid("load=0.5..1.1/7")["load"] == (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)
    assert len(read_grid("load=0.5..1.1")["load"]) == RANGE_POINTS
    assert read_grid("seed=10..12")["seed"] == (10, 11, 12) and read_grid("gpus=64..192/3")["gpus"] == (64, 128, 192)
    assert read_grid(" load = 0.5..0.6/2 : 0.6 : 2 ")["load"] == (0.5, 0.6, 2.0)
    assert read_grid("policy=fifo/peft:backfill,scale.launch_seconds=0.7:1:1.3") == {
        "policy": ("fifo/peft", "backfill"),
        "scale.launch_seconds": (0.7, 1.0, 1.3),
    }
    assert {"load", "delta", "gpus", "seed", "policy", "kappa"} <= set(KEYS) and all(f"scale.{name}" in KEYS for name in CONSTANTS)


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "an axis is written"),
        ("load", "an axis is written"),
        ("load=", "an axis is written"),
        ("laod=1", "'laod': there is no such axis; did you mean 'load'"),
        ("scale.lunch_seconds=1", "did you mean 'scale.launch_seconds'"),
        ("load=1,load=2", "twice"),
        ("load=a", "'a' is no number"),
        ("load=1:", "'' is no number"),
        ("load=0", "0 must be from 0.001 to 10; choose other points"),
        ("load=90", "90 must be from 0.001 to 10"),
        ("load=nan", "nan must be from 0.001"),
        ("load=inf", "inf must be from 0.001"),
        ("load=1e-300", "1e-300 must be from 0.001"),
        ("kappa=1e-300", "1e-300 must be from 0.001"),
        ("scale.tokens_per_second=1001", "1001 must be from 0.001 to 1,000"),
        ("delta=0.9", "0.9 must be from 1 to inf"),
        ("gpus=0", "0 must be from 1 to 1,000,000"),
        ("gpus=1e300", r"1e\+300 must be from 1 to 1,000,000"),
        ("seed=1e400", "must be from 0 to 999,999,999,999,999"),
        ("seed=0..1e12", "has at most 100,000"),
        ("seed=-inf..3", "a range goes from a number up"),
        ("load=0.1..1/999999999999", "has at most 100,000"),
        ("gpus=2.5", "2.5 must be a whole number"),
        ("gpus=64..100/6", "must be a whole number; choose other points"),
        ("seed=-1", "-1 must be from 0 to"),
        ("load=1..0.5", "a range goes from a number up"),
        ("load=1..2/1", "in 2 points or more"),
        ("delta=1..inf", "a range goes"),
        ("load=1..x", "'x' is no number"),
        ("policy=fifo:bakfill", "'bakfill': there is no such policy; did you mean 'backfill'"),
        ("policy=fifo/pef", "did you mean 'peft'"),
    ],
)
def test_what_is_no_grid_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_grid(text)


def test_every_combination_is_a_scenario() -> None:
    plain = Scenario(trace="t", kernels="tlora", nodes=4, gpus_per_node=4)
    found = scenarios_of(read_grid("policy=fifo/peft:sjf,load=0.5:0.9,scale.launch_seconds=2"), plain, [3, 4], ["unused"])
    assert [(each.load, each.seed, each.policy, each.kernels) for each in found] == [
        (load, seed, *policy) for load in (0.5, 0.9) for seed in (3, 4) for policy in (("fifo", "peft"), ("sjf", "tlora"))
    ]
    assert all(each.scale == (("launch_seconds", 2.0),) and each.num_gpus == 16 for each in found)
    sizes = scenarios_of(read_grid("gpus=8:32,delta=inf,kappa=1.5,seed=7"), plain, [0], ["fifo"])
    assert [(each.nodes, each.gpus_per_node, each.delta, each.kappa, each.seed) for each in sizes] == [
        (2, 4, math.inf, 1.5, 7),
        (8, 4, math.inf, 1.5, 7),
    ]
    assert scenarios_of({}, plain, [0], ["fifo", "fifo/tlora"]) == scenarios_of({}, plain, [0], ["fifo"])  # one scenario, once
    with pytest.raises(ConfigError, match="1,000,000 .*100,000.*fewer values"):
        scenarios_of(read_grid("load=0.1..1/1000,delta=1..2/1000"), plain, [0], ["fifo"])
    with pytest.raises(ConfigError, match="10 GPUs are no whole number of nodes of 4"):
        scenarios_of(read_grid("gpus=10"), plain, [0], ["fifo"])


def test_what_a_start_takes_is_an_axis() -> None:
    plain = Scenario()
    found = scenarios_of(read_grid("warm_start_seconds=0:10:30"), plain, [0], ["fifo"])
    assert [scenario.conditions.moves.warm_start_seconds for scenario in found] == [0, 10, 30]
    assert found[1].conditions.moves == plain.conditions.moves
    with pytest.raises(ConfigError, match="must be from 0 to 3,600"):
        read_grid("warm_start_seconds=3601")


def test_the_half_life_of_usage_is_an_axis() -> None:
    found = scenarios_of(read_grid("usage_half_life_seconds=3600:86400"), Scenario(), [0], ["fifo"])
    assert [scenario.conditions.usage_half_life_seconds for scenario in found] == [3600.0, 86400.0]
    assert found[1] == Scenario(policy="fifo"), "a day is the default, as of a server"
    with pytest.raises(ConfigError, match="must be from 1 to 1,000,000,000"):
        read_grid("usage_half_life_seconds=0")
