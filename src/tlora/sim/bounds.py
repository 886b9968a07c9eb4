"""What no schedule can beat: lower bounds on mean JCT and on makespan (docs/reference/simulator.md), for jobs that are done.

They hold for schedules whose speeds are those of the cost model; a simulated cluster that is faster may pass them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tlora.costs.cost import CostModel
from tlora.costs.sharing import fastest_step_seconds
from tlora.sim.flow_bound import mean_flow_seconds
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
    flow: jobs as flows with limited rates on that machine, whose time has a price (`flow_bound.py`).
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
