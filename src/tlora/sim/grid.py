"""The grid of a sweep as one writes it, `load=0.5..1.1/7,delta=1.2:2:inf`, and the scenarios that it stands for. Runs none of them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tlora.errors import ConfigError
from tlora.jobs_file.spelling import suggest
from tlora.sim.conditions import MOST_HALF_LIFE_SECONDS
from tlora.sim.scenario import CONSTANTS, MOST_GPUS, Scenario, contender, num_nodes
from tlora.sim.workload import LOADS

Value = float | int | str
Axes = Mapping[str, tuple[Value, ...]]

SCALE = "scale."
_NAMED = ("load", "delta", "gpus", "seed", "policy", "kappa", "warm_start_seconds", "usage_half_life_seconds")
KEYS = (*_NAMED, *(SCALE + name for name in CONSTANTS))
RANGE_POINTS = 5  # of `a..b` without a number
MOST_POINTS = 100_000  # of a sweep: all of them are held at once
_FACTORS = (0.001, 1000.0)
_BOUNDS = {
    "load": LOADS,
    "delta": (1, math.inf),
    "gpus": (1, MOST_GPUS),
    "seed": (0, 10**15 - 1),
    "warm_start_seconds": (0, 3600),
    "usage_half_life_seconds": (1, MOST_HALF_LIFE_SECONDS),
}  # the others are factors
_RANGE = re.compile(r"(?P<first>.+?)\.\.(?P<last>[^/]+)(?:/(?P<count>\d+))?")
_WHOLE = ("gpus", "seed")


def read_grid(text: str) -> dict[str, tuple[Value, ...]]:
    """The values of each axis. `key=a:b:c` are these three, `key=a..b/n` are n from a to b in equal steps (5 without /n; every whole number
    for seed). Raises ConfigError for a key or value that there is not.
    """
    axes: dict[str, tuple[Value, ...]] = {}
    for part in text.split(","):
        key, equals, values = (piece.strip() for piece in part.partition("="))
        if not equals or not values:
            raise ConfigError(
                f"sweep {part.strip()!r}: an axis is written key=value:value:... or key=first..last/points, such as load=0.5..1.1/7"
            )
        if key not in KEYS:
            raise ConfigError(f"sweep {key!r}: there is no such axis; {suggest(key, KEYS)}")
        if key in axes:
            raise ConfigError(f"sweep {key!r}: the axis is there twice; write all of its values behind one {key}=")
        axes[key] = tuple(dict.fromkeys(value for piece in values.split(":") for value in _values(key, piece.strip())))
    return axes


def scenarios_of(axes: Axes, plain: Scenario, seeds: Sequence[int], policies: Sequence[str]) -> list[Scenario]:
    """One scenario for each combination of the axes, in the order of the axes, then seeds, then policies, where these are no axes.

    `policies` are as one writes them, "fifo/peft". What no axis names is as in `plain`. Raises ConfigError for too many.
    """
    grid: dict[str, Sequence[Value]] = {**axes}
    grid.setdefault("seed", seeds)
    grid["policy"] = grid.pop("policy", policies)  # last: those of one scene stand together
    if (count := math.prod(map(len, grid.values()))) > MOST_POINTS:
        raise ConfigError(f"these are {count:,} simulations, and at most {MOST_POINTS:,} go into one command. Give fewer values")
    points = (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))
    return list(dict.fromkeys(_scenario(plain, point) for point in points))


def _scenario(plain: Scenario, point: Mapping[str, Value]) -> Scenario:
    scenario = plain
    for key, value in point.items():
        if key == "policy":
            name, kernels = contender(str(value), plain.kernels)
            scenario = replace(scenario, policy=name, kernels=kernels)
        elif key == "gpus":
            scenario = replace(scenario, nodes=num_nodes(int(value), plain.gpus_per_node))
        elif key == "warm_start_seconds":
            moves = replace(scenario.conditions.moves, warm_start_seconds=float(value))
            scenario = replace(scenario, conditions=replace(scenario.conditions, moves=moves))
        elif key == "usage_half_life_seconds":
            scenario = replace(scenario, conditions=replace(scenario.conditions, usage_half_life_seconds=float(value)))
        elif key.startswith(SCALE):
            others = tuple(pair for pair in scenario.scale if pair[0] != key.removeprefix(SCALE))
            scenario = replace(scenario, scale=(*others, (key.removeprefix(SCALE), float(value))))
        else:
            scenario = replace(scenario, **{key: value})
    return scenario


def _values(key: str, text: str) -> list[Value]:
    if key == "policy":
        name, kernels = contender(text, "")
        return [f"{name}/{kernels}" if kernels else name]
    matched = _RANGE.fullmatch(text)
    if matched is None:
        return [_checked(key, _number(key, text), text)]
    first, last = _number(key, matched["first"]), _number(key, matched["last"])
    asked = float(matched["count"] or (last - first + 1 if key == "seed" else RANGE_POINTS))
    if not (first < last < math.inf and 2 <= asked <= MOST_POINTS):
        raise ConfigError(
            f"sweep {key}={text}: a range goes from a number up to a larger one in 2 points or more, such as 0.5..1.1/7, "
            f"and has at most {MOST_POINTS:,}"
        )
    count = int(asked)
    points = (round(first + (last - first) * at / (count - 1), 10) for at in range(count))
    return [_checked(key, point, text) for point in points]


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"sweep {key}={text}: {text!r} is no number") from None


def _checked(key: str, value: float, text: str) -> Value:
    least, most = _BOUNDS.get(key, _FACTORS)
    if not least <= value <= most:
        raise ConfigError(f"sweep {key}={text}: {value:g} must be from {least:,.15g} to {most:,.15g}; choose other points")
    if key in _WHOLE and value != int(value):
        raise ConfigError(f"sweep {key}={text}: {value:g} must be a whole number; choose other points")
    return int(value) if key in _WHOLE else value
