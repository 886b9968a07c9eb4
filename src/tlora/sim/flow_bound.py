"""A lower bound on mean JCT from a flow of work: jobs whose rates have limits, on GPUs whose time has a price. A proof for any prices.

Let a job of w GPU-seconds need at least d seconds, so that its rate is at most w / d. If it is done at C, the mean time at which its work
is done is at most C - d / 2. So the sum of all C is at least that of these means, plus half of all d, under any schedule. The means
are a linear program: rates within their limits, together at most the number of GPUs. Its Lagrangian dual has a price p(t) >= 0 for a
GPU-second at t:

    sum over jobs of  min over its rates x of  integral x(t) * (t / w + p(t)) dt  -  GPUs * integral p(t) dt

By weak duality that is below the program's value for every p, hence a bound. For one job the minimum is at least
u * w - (w / d) * integral max(0, u - t / w - p(t)) dt for every u. Good prices are those of the greedy flow, in which the job of least w
goes first (`_prices`); bad ones would give a lower bound that is weaker, never a wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_BUCKETS = 1000  # of time, within which a price is constant; 4 times as many bring 0.2 % on ee9e8c
_ROUNDING = 1e-9  # relative: GPUs that are full up to this are full
_HALVINGS = 18  # of the interval in which u lies


class Flows(NamedTuple):
    """Jobs by submission, the first at 0: seconds of submission, GPU-seconds of work, least seconds."""

    submitted: Array
    work: Array
    least: Array


def mean_flow_seconds(jobs: Sequence[tuple[float, float, float]], num_gpus: int) -> float:
    """The bound on mean JCT for jobs of (submission, GPU-seconds, least seconds), in order of submission."""
    columns = np.array(jobs, dtype=float)
    flows = Flows(columns[:, 0] - columns[0, 0], columns[:, 1], columns[:, 2])
    horizon = float(flows.submitted[-1] + flows.work.sum() / num_gpus + flows.least.max())
    edges = np.linspace(0.0, horizon, _BUCKETS + 1)
    prices = _prices(flows, edges, num_gpus)
    rent = num_gpus * float(prices @ np.diff(edges))
    edges, prices = np.append(edges, np.inf), np.append(prices, 0.0)  # after the last bucket GPUs cost nothing
    first = jobs[0][0]
    paid = math.fsum(_least_cost(submitted - first, work, least, edges, prices) for submitted, work, least in jobs)
    return (paid - rent) / len(jobs) + float(flows.least.mean()) / 2


def _prices(flows: Flows, edges: Array, num_gpus: int) -> Array:
    """The price in each bucket: while the greedy flow fills all GPUs it falls by 1 / w a second, w the work of the last job served."""
    order = np.argsort(flows.work, kind="stable")
    submitted, work, least = (column[order] for column in flows)
    left, limit = work.copy(), work / least
    slopes = np.zeros(len(edges) - 1)
    for at, (start, end) in enumerate(pairwise([float(edge) for edge in edges])):
        most = np.minimum(limit * np.clip(end - np.maximum(submitted, start), 0.0, None), left)
        served = np.cumsum(most)
        capacity = num_gpus * (end - start) * (1 - _ROUNDING)
        if served[-1] >= capacity:
            last = int(np.searchsorted(served, capacity))
            slopes[at] = 1 / work[last]
            most[last] -= max(0.0, served[last] - capacity)
            most[last + 1 :] = 0.0
        left -= most
    prices, price = np.zeros(len(slopes)), 0.0
    for at in range(len(slopes) - 1, -1, -1):
        rise = slopes[at] * (edges[at + 1] - edges[at])
        price = price + rise if rise else 0.0
        prices[at] = price - rise / 2
    return prices


def _least_cost(submitted: float, work: float, least: float, edges: Array, prices: Array) -> float:
    """A lower bound, near the minimum, on what a job's work costs: the mean time at which it is done, after submission, and the prices."""
    first = int(np.searchsorted(edges, submitted, side="right")) - 1
    soonest = int(np.searchsorted(edges, submitted + least))  # done at full rate from its submission on
    highest = least / work + float(prices[first:soonest].max())
    after = int(np.searchsorted(edges, submitted + highest * work))  # from there on no time is worth it
    begin, price = np.maximum(edges[first:after], submitted) - submitted, prices[first:after]
    length = edges[first + 1 : after + 1] - submitted - begin
    low, high = 0.0, highest
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        taken = float(np.clip(work * (middle - price) - begin, 0.0, length).sum())
        low, high = (middle, high) if taken < least else (low, middle)
    seconds = np.clip(work * (high - price) - begin, 0.0, length)
    saved = float(((high - price - begin / work) * seconds - seconds**2 / (2 * work)).sum())
    return high * work - work / least * saved
