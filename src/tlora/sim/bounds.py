"""What no schedule can beat: lower bounds on mean JCT and on makespan (scheduling.md, "Bounds"), for jobs that are done.

They hold for schedules whose speeds are those of the cost model; a simulated cluster that is faster may pass them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tlora.costs.cost import CostModel
from tlora.sim.records import JobRecord


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
    rate_mean_seconds: float
    makespan_seconds: float

    @property
    def mean_jct_seconds(self) -> float:
        """The largest of the three."""
        return max(self.alone_mean_seconds, self.queue_mean_seconds, self.rate_mean_seconds)


def lower_bounds(work: Sequence[Work], num_gpus: int) -> Bounds:
    """Bounds for a cluster of `num_gpus` GPUs, seen as one machine that does `num_gpus` GPU-seconds of useful work in a second.

    alone: each job at its fastest with the whole cluster to itself.
    queue: preemptive SRPT on that machine, which no policy beats in mean JCT.
    rate: a job that is done at C with a rate of at most w/d (w its work, d its fastest time) has done it on average at C - d/2 or
    before, and the mean of these times on that machine is least when the smallest job always goes first. So mean JCT >= that mean + the
    mean of d/2 (mean busy times: Goemans, Queyranne, Schulz, Skutella, Wang, Single machine scheduling with release dates, 2002).
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
        rate_mean_seconds=_mean_busy_seconds(jobs, num_gpus) + fastest / 2,
        makespan_seconds=makespan - jobs[0].submitted_seconds,
    )


def work_of(jobs: Iterable[JobRecord], cost: CostModel, num_gpus: int, gpus_per_node: int) -> list[Work]:
    """The work of the jobs that are done, from the cost model's constants.

    gpu_seconds = steps * n / P. The fastest step is n * t(b, G) / b with b = min(n, largest budget * G): within one GPU, one node, several
    nodes, more GPUs are never slower, so the most of each are tried. It counts a full budget's share where n is no multiple of it.
    """
    found: list[Work] = []
    for job in jobs:
        if job.state != "done":
            continue
        tokens, base = job.tokens_per_step, job.base_model
        steps_seconds: list[float] = []
        for gpus in sorted({1, min(gpus_per_node, num_gpus), num_gpus}):
            filled = min(tokens, cost.budgets[-1] * gpus)
            nodes = math.ceil(gpus / gpus_per_node)
            steps_seconds.append(tokens * cost.micro_batch_seconds(base, filled, gpus, nodes, 1) / filled)
        work = job.steps * tokens / cost.constants[base].tokens_per_second
        found.append(Work(job.submitted_seconds, work, job.steps * min(steps_seconds)))
    return found


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


def _mean_busy_seconds(jobs: Sequence[Work], num_gpus: int) -> float:
    """Least mean, over jobs, of the mean time after submission at which a job's work is done; `jobs` by submission.

    A linear program in who runs when: a second spent on job j costs its time, divided by w_j, so at every moment the job of the least
    w_j goes (by its whole work, not by what remains of it).
    """
    waiting: list[tuple[float, float, float]] = []  # whole GPU-seconds, submission, remaining GPU-seconds
    now, total = -math.inf, 0.0
    for index in range(len(jobs) + 1):
        until = jobs[index].submitted_seconds if index < len(jobs) else math.inf
        while waiting and now < until:
            whole, submitted, remaining = waiting[0]
            end = min(now + remaining / num_gpus, until)
            total += ((now + end) / 2 - submitted) * (end - now) * num_gpus / whole
            left = remaining - (end - now) * num_gpus
            if end == until:
                heapq.heapreplace(waiting, (whole, submitted, left))
            else:
                heapq.heappop(waiting)
            now = end
        now = until
        if index < len(jobs):
            heapq.heappush(waiting, (jobs[index].gpu_seconds, until, jobs[index].gpu_seconds))
    return total / len(jobs)
