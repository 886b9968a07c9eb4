"""A device's memory where others choose the token budget: a worker's Shares are lowered to what fits, and a job that cannot is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import torch

from tlora.adapters.state import AdapterLayout
from tlora.batching.recompute_plan import RecomputePlan
from tlora.kernels.lora_tables import rank_width
from tlora.planning.job_plan import PlannedJob
from tlora.planning.memory import ACTIVATION_RANK, measure
from tlora.planning.micro_batches import fastest_budget, token_cost
from tlora.planning.plan import RunPlan, check_base_fits, check_capacity, counting_jobs
from tlora.shape.memory import MemoryModel
from tlora.supermodel.supermodel import SuperModel


class MemoryBound:
    """`memory_limit` on one device, for jobs that come and go."""

    def __init__(self, outlined: SuperModel, base_bytes: int, device: torch.device, limit_bytes: int) -> None:
        """`outlined` lies on the meta device; `base_bytes` are what the base takes on `device`. Raises CapacityError for one that does not
        fit below the limit.
        """
        self._measure = cache(partial(measure, outlined, base_bytes, device))
        self._rank, self._device = ACTIVATION_RANK, device
        self._plan = RunPlan((), 1, RecomputePlan(), self._measure(self._rank), limit_bytes, 1, {})
        self.limit_bytes = limit_bytes
        check_base_fits(self._plan)

    @property
    def most_recomputed(self) -> int:
        """Layers that can be recomputed with profit."""
        return self._plan.memory.most_recomputed

    def least_recomputed(self, jobs: Sequence[PlannedJob]) -> RecomputePlan:
        """The fewest layers with which all `jobs` fit at once, by the tokens of a micro-batch; all, where they never do."""
        memory = self._memory(jobs)
        return memory.least_recomputed(memory.room(_layouts(jobs), self._plan.limit_bytes))

    def check(self, job: PlannedJob, recompute: RecomputePlan) -> None:
        """A job that does not fit by itself, in micro-batches of its longest sample, gets a problem that says so."""
        check_capacity(job, replace(self._at(job.longest, recompute, [job]), longest=job.longest))

    def holds(self, most_tokens: int, recompute: RecomputePlan, jobs: Sequence[PlannedJob]) -> bool:
        """Whether all `jobs` fit at once, in micro-batches of up to `most_tokens`."""
        return self._at(most_tokens, recompute, jobs).fits(_layouts(jobs))

    def lower(self, token_budget: int, longest: int, recompute: RecomputePlan, jobs: Sequence[PlannedJob]) -> int:
        """Of `token_budget`, its half, its quarter, … with which all `jobs` fit at once: where all micro-batches recompute the same layers
        the largest, but not less than the `longest` sample; else the fastest, however long that sample is.
        """
        self._rank = self._largest_rank(jobs)  # the kernels stay ready for it when its job has left
        if recompute.varies:
            return fastest_budget(token_budget, recompute, token_cost(self._memory(jobs), self._device))
        budget = max(token_budget, longest)
        while budget > longest and not self.holds(budget, recompute, jobs):
            budget = max(budget // 2, longest)
        return budget

    def _largest_rank(self, jobs: Sequence[PlannedJob]) -> int:
        """Of `jobs` and of all that were here, as wide as the kernels make it."""
        return max(self._rank, *(rank_width(job.layout.largest_rank) for job in jobs if job.layout is not None), ACTIVATION_RANK)

    def _memory(self, jobs: Sequence[PlannedJob]) -> MemoryModel:
        return counting_jobs(self._measure(self._largest_rank(jobs)), jobs, deterministic=True)  # each has a mailbox of its own

    def _at(self, token_budget: int, recompute: RecomputePlan, jobs: Sequence[PlannedJob]) -> RunPlan:
        return replace(self._plan, memory=self._memory(jobs), token_budget=token_budget, recompute=recompute)


def _layouts(jobs: Sequence[PlannedJob]) -> list[AdapterLayout]:
    return [job.layout for job in jobs if job.layout is not None]
