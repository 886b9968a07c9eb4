"""Frozen generator of cluster traces: a seed gives a cluster and jobs for it. Nothing in it may change, as results name seeds only.

One tenant, no deadlines, equal priorities. Widths go up to the whole cluster. What a trace does not say (base, batch, bound) is drawn
as for recorded traces (`tlora.sim.mapping`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tlora.sim.arrivals import at_load
from tlora.sim.trace import Trace, TraceJob

TUNING, REPORTED = range(100), range(100, 300)  # seeds
LOADS = (0.3, 3.0)
MOST_JOBS = (1000, 1500, 2000)
_DURATIONS = (60.0, 30 * 86400.0)
_CLUSTERS = ((2, 8), (4, 8), (8, 4), (8, 8), (16, 8), (32, 8), (64, 8), (128, 8))  # nodes, GPUs of each


@dataclass(frozen=True, slots=True)
class SyntheticTrace:
    """`kind` says how it was drawn, for tables."""

    seed: int
    nodes: int
    gpus_per_node: int
    load: float
    kind: Mapping[str, str]
    trace: Trace

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node


def synthetic_trace(seed: int, jobs: int | None = None) -> SyntheticTrace:
    """The trace of a seed; `jobs` are fewer jobs than it has by itself, of the same distributions."""
    draw = random.Random(f"shape|{seed}")
    nodes, gpus_per_node = draw.choice(_CLUSTERS)
    load = _log_uniform(draw, *LOADS)
    widths, lengths, arrivals = draw.choice(list(_WIDTHS)), draw.choice(list(_LENGTHS)), draw.choice(list(_ARRIVALS))
    median, burst, own_jobs = _log_uniform(draw, 300.0, 14400.0), draw.randint(4, 60), draw.choice(MOST_JOBS)
    count = own_jobs if jobs is None else jobs
    whole = nodes * gpus_per_node
    gpus = [_WIDTHS[widths](draw, whole) for _ in range(count)]
    seconds = [min(max(_LENGTHS[lengths](draw, own, whole, median), _DURATIONS[0]), _DURATIONS[1]) for own in gpus]
    submitted = _ARRIVALS[arrivals](draw, count, burst)
    rows = [
        TraceJob(f"j{index}", at - submitted[0], own, float(round(length)), "", "", "", "")
        for index, (at, own, length) in enumerate(zip(submitted, gpus, seconds, strict=True))
    ]
    kind = {"widths": widths, "lengths": lengths, "arrivals": arrivals}
    trace = at_load(Trace(f"synthetic-{seed}", tuple(rows)), whole, load)
    return SyntheticTrace(seed, nodes, gpus_per_node, load, kind, trace)


def _log_uniform(draw: random.Random, least: float, most: float) -> float:
    return math.exp(draw.uniform(math.log(least), math.log(most)))


# -- GPUs of a job, of a cluster's -----------------------------------------------------------------------------------------


def _power_of_two(draw: random.Random, most: int, decay: float) -> int:
    """1, 2, 4, ... up to `most`, each `decay` times as often as the one before."""
    powers = [2**k for k in range(most.bit_length())]
    return draw.choices(powers, [decay**k for k in range(len(powers))])[0]


def _tiny_and_huge(draw: random.Random, whole: int) -> int:
    return whole // draw.choice((1, 2, 4)) if draw.random() < 0.03 else draw.choice((1, 1, 1, 2))


def _any_number(draw: random.Random, whole: int) -> int:
    """Not only powers of two, up to three quarters of the cluster."""
    return round(_log_uniform(draw, 1.0, max(1.0, 0.75 * whole)))


_WIDTHS: dict[str, Callable[[random.Random, int], int]] = {
    "one GPU": lambda draw, whole: 1,
    "up to a node": lambda draw, whole: _power_of_two(draw, 4, 0.5),
    "up to a quarter": lambda draw, whole: _power_of_two(draw, max(1, whole // 4), 0.6),
    "up to all": lambda draw, whole: _power_of_two(draw, whole, 0.8),
    "tiny and huge": _tiny_and_huge,
    "any number": _any_number,
}


# -- seconds of a job ------------------------------------------------------------------------------------------------------


def _lognormal(sigma: float) -> Callable[[random.Random, int, int, float], float]:
    return lambda draw, gpus, whole, median: median * math.exp(sigma * draw.gauss(0.0, 1.0))


def _wider_is_longer(draw: random.Random, gpus: int, whole: int, median: float) -> float:
    return median * (gpus / math.sqrt(whole)) ** 0.7 * math.exp(draw.gauss(0.0, 1.0))


def _wider_is_shorter(draw: random.Random, gpus: int, whole: int, median: float) -> float:
    return median * (math.sqrt(whole) / gpus) ** 0.7 * math.exp(draw.gauss(0.0, 1.0))


_LENGTHS: dict[str, Callable[[random.Random, int, int, float], float]] = {
    "all equal": lambda draw, gpus, whole, median: median,
    "similar": _lognormal(0.5),
    "usual": _lognormal(1.3),
    "heavy tail": _lognormal(2.2),
    "wider is longer": _wider_is_longer,
    "wider is shorter": _wider_is_shorter,
}


# -- times of submission, up to a factor -------------------------------------------------------------------------------------


def _poisson(draw: random.Random, count: int, burst: int) -> list[float]:
    now, found = 0.0, list[float]()
    for _ in range(count):
        now += draw.expovariate(1.0)
        found.append(now)
    return found


def _bursts(draw: random.Random, count: int, burst: int) -> list[float]:
    """Of `burst` jobs each, at one moment."""
    now, found = 0.0, list[float]()
    while len(found) < count:
        now += draw.expovariate(1.0)
        found += [now] * burst
    found = found[:count]
    if found[0] == found[-1]:  # of so few jobs that they are one burst
        found[-1] += 1.0
    return found


def _waves(draw: random.Random, count: int, burst: int) -> list[float]:
    """A day's rhythm: the rate goes from a tenth to ten tenths and back, eight times."""
    now, found = 0.0, list[float]()
    while len(found) < count:
        now += draw.expovariate(1.0)
        if draw.random() < 0.55 - 0.45 * math.cos(2 * math.pi * 8 * now * 0.55 / count):
            found.append(now)
    return found


_ARRIVALS: dict[str, Callable[[random.Random, int, int], list[float]]] = {"steady": _poisson, "bursts": _bursts, "waves": _waves}
