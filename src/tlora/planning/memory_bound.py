"""A device's memory where others choose the token budget: a worker's Shares are lowered to what fits, and a job that cannot is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import torch

from tlora.kernels.lora_tables import rank_width
from tlora.planning.job_plan import PlannedJob
from tlora.planning.memory import ACTIVATION_RANK, measure
from tlora.planning.plan import RunPlan, check_base_fits, check_capacity, counting_jobs
from tlora.supermodel.supermodel import SuperModel


class MemoryBound:
    """`memory_limit` on one device, for jobs that come and go."""

    def __init__(self, outlined: SuperModel, base_bytes: int, device: torch.device, limit_bytes: int) -> None:
        """`outlined` lies on the meta device; `base_bytes` are what the base takes on `device`. Raises CapacityError for one that does not
        fit below the limit.
        """
        self._measure = cache(partial(measure, outlined, base_bytes, device))
        self._rank = ACTIVATION_RANK
        self._plan = RunPlan((), 1, 0, self._measure(self._rank), limit_bytes, 1, {})
        self.limit_bytes = limit_bytes
        check_base_fits(self._plan)

    @property
    def most_recomputed(self) -> int:
        """Layers that can be recomputed with profit."""
        return self._plan.memory.most_recomputed

    def least_recomputed(self, longest: int, jobs: Sequence[PlannedJob]) -> int:
        """The fewest layers with which all `jobs` fit at once, in micro-batches of the `longest` sample; all, if they never do."""
        return next((layers for layers in range(self.most_recomputed) if self.holds(longest, layers, jobs)), self.most_recomputed)

    def check(self, job: PlannedJob, recomputed_layers: int) -> None:
        """A job that does not fit by itself, in micro-batches of its longest sample, gets a problem that says so."""
        check_capacity(job, replace(self._at(job.longest, recomputed_layers, [job]), longest=job.longest))

    def holds(self, longest: int, recomputed_layers: int, jobs: Sequence[PlannedJob]) -> bool:
        """Whether all `jobs` fit at once, in micro-batches of the `longest` sample of any."""
        return self._at(longest, recomputed_layers, jobs).fits([job.layout for job in jobs if job.layout is not None])

    def lower(self, token_budget: int, longest: int, recomputed_layers: int, jobs: Sequence[PlannedJob]) -> int:
        """The largest of `token_budget`, its half, its quarter, … with which all `jobs` fit at once; `longest` if none does."""
        self._rank = self._largest_rank(jobs)  # the kernels stay ready for it when its job has left
        budget, layouts = max(token_budget, longest), [job.layout for job in jobs if job.layout is not None]
        while budget > longest and not self._at(budget, recomputed_layers, jobs).fits(layouts):
            budget = max(budget // 2, longest)
        return budget

    def _largest_rank(self, jobs: Sequence[PlannedJob]) -> int:
        """Of `jobs` and of all that were here, as wide as the kernels make it."""
        return max(self._rank, *(rank_width(job.layout.largest_rank) for job in jobs if job.layout is not None), ACTIVATION_RANK)

    def _at(self, token_budget: int, recomputed_layers: int, jobs: Sequence[PlannedJob]) -> RunPlan:
        memory = counting_jobs(self._measure(self._largest_rank(jobs)), jobs, deterministic=True)  # each has a mailbox of its own
        return replace(self._plan, memory=memory, token_budget=token_budget, recomputed_layers=recomputed_layers)
