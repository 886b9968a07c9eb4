"""How fast jobs run together on so many GPUs, if their bounds and memory allow it at all; worked out once for the same jobs and GPUs.

Not here: which jobs run together, and where.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tlora.protocol import JobProfile, JobSubmitted, ParallelPlan
from tlora.scheduler.job import Job
from tlora.scheduler.plans import plan_alone, shared_plan
from tlora.scheduler.state import ClusterState
from tlora.shape.cost import CostModel
from tlora.shape.sharing import ROUNDING, group_step_seconds

_MOST_KNOWN = 100_000  # entries; a lone job on 8 sizes has 8 of them, each some 300 bytes
_WIDER_TRIED = 3  # sizes beyond the best so far: the first GPU beyond one, or beyond a node, costs more than it brings
_NEAR = 1e-9  # relative
_MEAN_OF_BUCKET = 1 / math.log(2)  # times 2^k: the mean of lengths between 2^k and 2^(k+1) whose logarithms are spread evenly


class Prediction(NamedTuple):
    """`slowdowns` are the members' times between optimizer steps over those alone, in the members' order."""

    plan: ParallelPlan
    slowdowns: tuple[float, ...]


class Choice:
    """Numbers of GPUs on which jobs may run together, rising; `usual` are those that are considered for every job, each with the
    sum of the slowdowns on it."""

    __slots__ = ("_best", "_from", "_to", "sizes", "usual")

    def __init__(self, sizes: tuple[int, ...], usual: tuple[tuple[int, float], ...]) -> None:
        self.sizes, self.usual = sizes, usual
        self._best: int | None = None
        self._from, self._to = math.inf, -math.inf  # prices for which that is the cheapest

    def cheapest(self, price: float) -> int | None:
        """Where the sum of the slowdowns * (1 + price * GPUs) is least; sizes far beyond one that is dearer than a smaller are not tried.

        Costs are linear in the price: each comparison comes out the same for prices nearer than where its two sides are equal.
        """
        if not self._from <= price <= self._to:
            self._work_out(price)
        return self._best

    def _work_out(self, price: float) -> None:
        best, least, slope, wider, reach = None, math.inf, 0.0, 0, math.inf
        for gpus, slowdowns in self.usual:
            cost = slowdowns * (1 + price * gpus)
            if best is not None:
                apart, parting = abs(cost - least), abs(slowdowns * gpus - slope)
                near = apart < _NEAR * least  # rounding may decide
                reach = 0.0 if near else min(reach, apart / parting) if parting else reach
            if cost < least:
                best, least, slope, wider = gpus, cost, slowdowns * gpus, 0
            else:
                wider += 1
                if wider == _WIDER_TRIED:
                    break
        self._best, self._from, self._to = best, price - 0.9 * reach, price + 0.9 * reach


class Predictions:
    """Remembers. What it knows is forgotten where the cost model is corrected, or the cluster is another; `version` then is another."""

    def __init__(self, least_replica_tokens: int = 1) -> None:
        """A GPU has samples to work on where its part of a step has so many tokens."""
        self.version = 0
        self._least_replica_tokens = least_replica_tokens
        self._state: ClusterState | None = None
        self._cost: tuple[CostModel, int] | None = None  # and how often it had been corrected
        self._shape = (0, 0)
        self._sizes: list[int] = []
        self._known: dict[tuple[object, int, int, float | None, str], Prediction | None] = {}
        self._choices: dict[object, Choice] = {}
        self._most: dict[tuple[int, int], int] = {}  # by a job's number and the GPUs that it asks for; costs do not matter to it

    def follow(self, state: ClusterState) -> None:
        """To be called before a decision asks."""
        cost, shape = (state.cost, state.cost.times_corrected), (max(1, state.pool.node_size), state.pool.num_gpus)
        if state is not self._state or len(self._most) > _MOST_KNOWN:
            self._most.clear()
        if state is not self._state or cost != self._cost or len(self._known) > _MOST_KNOWN:
            self._known.clear()
        elif shape == self._shape:
            return
        if state is not self._state or cost != self._cost or shape != self._shape:
            self.version += 1
        self._choices.clear()
        self._state, self._cost, self._shape, self._sizes = state, cost, shape, usual_sizes(*shape)

    def choice(self, jobs: Sequence[Job]) -> Choice:
        """On how many GPUs they may run: their bounds are kept, and each GPU has samples to work on."""
        key = jobs[0].number if len(jobs) == 1 else tuple([job.number for job in jobs])
        known = self._choices.get(key)
        if known is None:
            known = self._choices[key] = self._choose(jobs)
        return known

    def _choose(self, jobs: Sequence[Job]) -> Choice:
        (node_size, num_gpus), most = self._shape, self.most_useful_gpus(jobs)
        asked = sum([job.spec.gpus for job in jobs])
        tried = self._sizes if asked in self._sizes or asked > num_gpus else sorted((*self._sizes, asked))
        predicted = [
            (gpus, prediction) for gpus in tried if gpus <= most and (prediction := self.of(jobs, gpus, -(-gpus // node_size))) is not None
        ]
        usual = tuple([(gpus, sum(prediction.slowdowns)) for gpus, prediction in predicted if gpus != asked or tried is self._sizes])
        return Choice(tuple([gpus for gpus, _ in predicted]), usual)

    def of(self, jobs: Sequence[Job], gpus: int, nodes: int, room_bytes: float | None = None, kind: str = "") -> Prediction | None:
        """Of `jobs` in one group on `gpus` GPUs of `nodes` nodes; None if a member's bound, or memory, does not allow it. `room_bytes`: of
        each of these GPUs, where they are chosen; else that of the smallest on which each of the jobs can run. `kind`: likewise the slowest
        of theirs; else the reference.
        """
        assert self._state is not None, "predictions follow no state yet"
        if room_bytes is None:
            room_bytes = self._state.rooms.of_any(jobs, gpus)
        key = (jobs[0].number if len(jobs) == 1 else tuple([job.number for job in jobs]), gpus, nodes, room_bytes, kind)
        try:
            return self._known[key]
        except KeyError:
            prediction = self._known[key] = _predict(self._cost_of(kind), jobs, gpus, nodes, room_bytes)
            return prediction

    def _cost_of(self, kind: str) -> CostModel:
        assert self._state is not None, "predictions follow no state yet"
        kinds = self._state.kinds
        return kinds.cost(kind or kinds.reference(), self._state.cost)

    def most_useful_gpus(self, jobs: Sequence[Job]) -> int:
        """The sum over `jobs`."""
        return self._most_useful(jobs[0]) if len(jobs) == 1 else sum([self._most_useful(job) for job in jobs])

    def _most_useful(self, job: Job) -> int:
        key = job.number, job.spec.gpus
        most = self._most.get(key)
        if most is None:
            most = self._most[key] = most_useful_gpus(job.spec, self._least_replica_tokens)
        return most


def most_useful_gpus(spec: JobSubmitted, least_replica_tokens: int = 1) -> int:
    """GPUs that have samples to work on in each micro-batch: an optimizer step has so many, and a sample is not divided. With
    `least_replica_tokens` only those for which a step has so many tokens each.

    Not fewer than it asks for. Samples per step are tokens per step over the mean length, which is read off the histogram.
    """
    tokens = spec.profile.tokens_per_step
    return max(spec.gpus, min(int(tokens / _mean_sample_tokens(spec.profile)), int(tokens // least_replica_tokens)))


def usual_sizes(node_size: int, num_gpus: int) -> list[int]:
    """Numbers of GPUs that are considered: any within a node; whole nodes beyond, 2, 3, 4, 6, 8, 12, 16, ... of them."""
    sizes = list(range(1, min(node_size, num_gpus) + 1))
    nodes = 2
    while nodes * node_size <= num_gpus:
        sizes.append(nodes * node_size)
        if 3 * nodes // 2 * node_size <= num_gpus:
            sizes.append(3 * nodes // 2 * node_size)
        nodes *= 2
    return sizes


def _mean_sample_tokens(profile: JobProfile) -> float:
    """Of a profile without a histogram, the longest: then fewer samples are counted than there are."""
    samples = sum(profile.length_histogram)
    if not samples:
        return max(1.0, float(profile.longest_sample_tokens))
    return sum(count * 2**k for k, count in enumerate(profile.length_histogram)) * _MEAN_OF_BUCKET / samples


def _predict(cost: CostModel, jobs: Sequence[Job], gpus: int, nodes: int, room_bytes: float | None) -> Prediction | None:
    base = jobs[0].spec.base_model
    if any(gpus < job.spec.least_gpus or (nodes > 1 and job.spec.on_one_host) for job in jobs):
        return None
    if len(jobs) == 1:
        return _predict_alone(cost, jobs[0], gpus, nodes, room_bytes)
    plan = shared_plan(cost, gpus, nodes, jobs, room_bytes=room_bytes)
    if plan is None:
        return None
    members = [job.as_member(job.weight) for job in jobs]
    seconds = group_step_seconds(cost, base, plan.token_budget, gpus, nodes, members)
    return Prediction(plan, tuple([own / job.alone_step_seconds for own, job in zip(seconds, jobs, strict=True)]))


def _predict_alone(cost: CostModel, job: Job, gpus: int, nodes: int, room_bytes: float | None) -> Prediction | None:
    """Its prediction alone. On as many GPUs as it asks for it may run even if the corrected model says that its bound is broken."""
    plan, base = plan_alone(cost, job, gpus, room_bytes), job.spec.base_model
    if plan is None:
        return None
    seconds = cost.lone_step_seconds(base, plan.token_budget, gpus, nodes, job.spec.profile.tokens_per_step)
    slowdown = seconds * cost.recompute_factor(base, plan.recomputed_layers) / job.alone_step_seconds
    if gpus != job.spec.gpus and slowdown > job.spec.max_slowdown * (1 + ROUNDING):
        return None
    return Prediction(plan, (slowdown,))
