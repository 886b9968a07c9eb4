"""How fast jobs run together on so many GPUs, if their bounds and memory allow it at all; worked out once for the same jobs and GPUs.

Not here: who shall run with whom, and where.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tlora.planner.cost import CostModel
from tlora.planner.sharing import Member, group_step_seconds
from tlora.protocol import JobProfile, ParallelPlan
from tlora.scheduler.plans import ROUNDING, exclusive_plan, shared_plan
from tlora.scheduler.state import ClusterState, Job

_MOST_KNOWN = 100_000  # entries; a lone job on 8 sizes has 8 of them, each some 300 bytes
_MEAN_OF_BUCKET = 1 / math.log(2)  # times 2^k: the mean of lengths between 2^k and 2^(k+1) whose logarithms are spread evenly


class Pace(NamedTuple):
    """`slowdowns` are the members' times between optimizer steps over those alone, in the members' order."""

    plan: ParallelPlan
    slowdowns: tuple[float, ...]


class Paces:
    """Remembers. What it knows is forgotten where the cost model is corrected."""

    def __init__(self) -> None:
        self._state: ClusterState | None = None
        self._basis: tuple[float, ...] = ()
        self._known: dict[tuple[object, int, int], Pace | None] = {}
        self._most: dict[int, int] = {}  # by a job's number

    def follow(self, state: ClusterState) -> None:
        """To be called before a decision asks."""
        basis = _basis(state.cost)
        if state is not self._state or basis != self._basis or len(self._known) > _MOST_KNOWN:
            self._state, self._basis = state, basis
            self._known.clear()
            self._most.clear()

    def of(self, jobs: Sequence[Job], gpus: int, nodes: int) -> Pace | None:
        """The pace of `jobs` in one group on `gpus` GPUs of `nodes` nodes; None where somebody's bound, or memory, does not allow it."""
        key = (jobs[0].number if len(jobs) == 1 else tuple([job.number for job in jobs]), gpus, nodes)
        try:
            return self._known[key]
        except KeyError:
            assert self._state is not None, "paces follow no state yet"
            found = self._known[key] = _pace(self._state.cost, jobs, gpus, nodes)
            return found

    def most_useful_gpus(self, job: Job) -> int:
        """GPUs that have samples to work on in each micro-batch: an optimizer step has so many, and a sample is not divided.

        Not fewer than it asks for. Samples per step are tokens per step over the mean length, which is read off the histogram.
        """
        found = self._most.get(job.number)
        if found is None:
            profile = job.spec.profile
            found = self._most[job.number] = max(job.spec.gpus, int(profile.tokens_per_step / _mean_sample_tokens(profile)))
        return found


def _mean_sample_tokens(profile: JobProfile) -> float:
    """Of a profile without a histogram, the longest: then fewer samples are counted than there are."""
    samples = sum(profile.length_histogram)
    if not samples:
        return max(1.0, float(profile.longest_sample_tokens))
    return sum(count * 2**k for k, count in enumerate(profile.length_histogram)) * _MEAN_OF_BUCKET / samples


def _pace(cost: CostModel, jobs: Sequence[Job], gpus: int, nodes: int) -> Pace | None:
    base = jobs[0].spec.base_model
    if len(jobs) == 1:
        return _pace_alone(cost, jobs[0], gpus, nodes)
    plan = shared_plan(cost, base, gpus, nodes, jobs)
    if plan is None:
        return None
    members = [Member(job.spec.profile.tokens_per_step, job.weight) for job in jobs]
    seconds = group_step_seconds(cost, base, plan.token_budget, gpus, nodes, members)
    return Pace(plan, tuple([own / job.alone_step_seconds for own, job in zip(seconds, jobs, strict=True)]))


def _pace_alone(cost: CostModel, job: Job, gpus: int, nodes: int) -> Pace | None:
    """On as many GPUs as it asks for it may run whatever the model, once corrected, says of its bound."""
    plan = exclusive_plan(cost, job, gpus)
    member = Member(job.spec.profile.tokens_per_step, job.weight)
    (seconds,) = group_step_seconds(cost, job.spec.base_model, plan.token_budget, gpus, nodes, [member])
    slowdown = seconds / job.alone_step_seconds
    if gpus != job.spec.gpus and slowdown > job.spec.max_slowdown * (1 + ROUNDING):
        return None
    return Pace(plan, (slowdown,))


def _basis(cost: CostModel) -> tuple[float, ...]:
    """What changes where the cost model is corrected: seconds of a micro-batch on one GPU, on one node, on several, of each base."""
    return tuple([cost.micro_batch_seconds(base, 1.0, *reach, 1) for base in cost.constants for reach in ((1, 1), (2, 1), (2, 2))])
