"""What no schedule can beat: lower bounds on mean JCT and on makespan (docs/reference/simulator.md), for jobs that are done.

They hold for schedules whose speeds are those of the cost model; a simulated cluster that is faster may pass them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlora.shape.cost import CostModel
from tlora.shape.sharing import ROUNDING, fastest_step_seconds
from tlora.sim.records import JobRecord


class ThroughputBound(NamedTuple):
    """Tokens/s: `all_work` if all jobs progress in step, or over their whole work; `cheapest` if the window holds the work that takes
    least GPU time for a token, which bounds every choice of what to do in it."""

    all_work: float
    cheapest: float


def throughput_bound(jobs: Iterable[JobRecord], cost: CostModel, num_gpus: int, gpus_per_node: int, window_share: float) -> ThroughputBound:
    """The bounds for the jobs that were not rejected; a window does `window_share` of all tokens. nan without jobs."""
    work: list[tuple[float, float]] = []  # GPU-seconds for a token, tokens
    for job in jobs:
        tokens = job.steps * job.tokens_per_step
        if job.state != "rejected" and tokens > 0:
            work.append((least_gpu_seconds(job, cost, num_gpus, gpus_per_node), tokens))
    if not work:
        return ThroughputBound(math.nan, math.nan)
    total = math.fsum(tokens for _, tokens in work)
    whole = math.fsum(each * tokens for each, tokens in work)
    return ThroughputBound(num_gpus * total / whole, num_gpus * window_share * total / _cheapest(sorted(work), window_share * total))


def least_gpu_seconds(job: JobRecord, cost: CostModel, num_gpus: int, gpus_per_node: int) -> float:
    """The least GPU-seconds for a token of the job with which its step takes no more than max_slowdown * T0, alone or in company.

    Alone on G GPUs, no more than its step has samples: G * t(n, G) / n. In company every token of a micro-batch of F tokens takes
    G * t(F, G) / F, which falls with F; a step is in no fewer than one micro-batch, so t(F, G) <= max_slowdown * T0, and F is at most what
    a budget holds. Over several nodes that is the same for any G, so only the largest is tried: if its capacity is below what the job
    needs, none has it. Within a node an exchange takes longer the more GPUs there are, and all are tried.
    """
    base, tokens = job.base_model, job.tokens_per_step
    longest = job.max_slowdown * (1 + ROUNDING) * cost.alone_step_seconds(base, tokens, job.gpus, -(-job.gpus // gpus_per_node))
    choices = [math.inf]
    for gpus in range(1, min(job.most_gpus, num_gpus) + 1):
        seconds = cost.alone_step_seconds(base, tokens, gpus, -(-gpus // gpus_per_node))
        if seconds <= longest or gpus == job.gpus:
            choices.append(gpus * seconds / tokens)
    for gpus in {*range(1, min(gpus_per_node, num_gpus) + 1), num_gpus}:
        nodes = -(-gpus // gpus_per_node)
        most = min(cost.fill_share * cost.budgets[-1] * gpus, cost.largest_micro_batch(base, longest, gpus, nodes, 2))
        if most > 0:
            seconds = cost.micro_batch_seconds(base, most, gpus, nodes, 2)
            if most / seconds * (1 + ROUNDING) >= tokens / longest:
                choices.append(gpus * seconds / most)
    return min(choices)


def _cheapest(work: Sequence[tuple[float, float]], tokens: float) -> float:
    """GPU-seconds of the first `tokens` of the work."""
    left, seconds = tokens, 0.0
    for each, own in work:
        seconds += each * min(own, left)
        left -= own
        if left <= 0:
            break
    return seconds


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


@dataclass(frozen=True, slots=True)
class Work:
    """A job as the bounds see it: `gpu_seconds` of one saturated GPU, and the least time that any number of GPUs needs for it."""

    submitted_seconds: float
    gpu_seconds: float
    fastest_seconds: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """The lower bounds on mean JCT, each by its reason, and on makespan; nan without jobs."""

    alone_mean_seconds: float
    queue_mean_seconds: float
    flow_mean_seconds: float
    makespan_seconds: float

    @property
    def mean_jct_seconds(self) -> float:
        """The largest of the three."""
        return max(self.alone_mean_seconds, self.queue_mean_seconds, self.flow_mean_seconds)


def lower_bounds(work: Sequence[Work], num_gpus: int) -> Bounds:
    """Bounds for a cluster of `num_gpus` GPUs, seen as one machine that does `num_gpus` GPU-seconds of useful work in a second.

    alone: each job at its fastest with the whole cluster to itself.
    queue: preemptive SRPT on that machine, which no policy beats in mean JCT.
    flow: jobs as flows with limited rates on that machine, whose time has a price (see `mean_flow_seconds`).
    makespan: from the first submission, max over t of t + (work that arrives from t on) / num_gpus, and each job's submission + fastest.
    """
    assert num_gpus > 0, num_gpus
    if not work:
        return Bounds(math.nan, math.nan, math.nan, math.nan)
    jobs = sorted(work, key=lambda job: job.submitted_seconds)
    assert all(job.gpu_seconds > 0 and job.fastest_seconds > 0 for job in jobs), "a job without work"
    fastest = math.fsum(job.fastest_seconds for job in jobs) / len(jobs)
    makespan, arriving = 0.0, 0.0
    for job in reversed(jobs):
        arriving += job.gpu_seconds / num_gpus
        makespan = max(makespan, job.submitted_seconds + arriving, job.submitted_seconds + job.fastest_seconds)
    return Bounds(
        alone_mean_seconds=fastest,
        queue_mean_seconds=_mean_srpt_seconds(jobs, num_gpus),
        flow_mean_seconds=mean_flow_seconds([(job.submitted_seconds, job.gpu_seconds, job.fastest_seconds) for job in jobs], num_gpus),
        makespan_seconds=makespan - jobs[0].submitted_seconds,
    )


def work_of(jobs: Iterable[JobRecord], cost: CostModel, num_gpus: int, gpus_per_node: int) -> list[Work]:
    """The work of the jobs that are done, from the cost model's constants.

    gpu_seconds = steps * n * (1 / P + launch / largest budget): a micro-batch is launched on each of its GPUs, and none holds more tokens
    than the largest budget, alone or in a group. The fastest step uses no more GPUs than a step has samples.
    """
    works: list[Work] = []
    for job in jobs:
        if job.state != "done":
            continue
        tokens, base, constants = job.tokens_per_step, job.base_model, cost.constants[job.base_model]
        fastest = fastest_step_seconds(cost, base, tokens, min(job.most_gpus, num_gpus), gpus_per_node)
        work = job.steps * tokens * (1 / constants.tokens_per_second + constants.launch_seconds / cost.budgets[-1])
        works.append(Work(job.submitted_seconds, work, job.steps * fastest))
    return works


def _mean_srpt_seconds(jobs: Sequence[Work], num_gpus: int) -> float:
    """Mean JCT of shortest remaining processing time on one machine; `jobs` by submission. The heap holds what remains: O(n log n)."""
    waiting: list[tuple[float, float]] = []  # remaining GPU-seconds, submission
    now, total = -math.inf, 0.0
    for index in range(len(jobs) + 1):
        until = jobs[index].submitted_seconds if index < len(jobs) else math.inf
        while waiting:
            remaining, submitted = waiting[0]
            end = now + remaining / num_gpus
            if end > until:
                heapq.heapreplace(waiting, (remaining - (until - now) * num_gpus, submitted))
                break
            heapq.heappop(waiting)
            now = end
            total += end - submitted
        now = until
        if index < len(jobs):
            heapq.heappush(waiting, (jobs[index].gpu_seconds, until))
    return total / len(jobs)
