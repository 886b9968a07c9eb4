"""What `memory_limit` leaves jobs that come and go on one device: a worker's plan, where a run has a `RunPlan`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import torch

from tlora.batching.recompute_plan import RecomputePlan
from tlora.kernels.lora_tables import rank_width
from tlora.planning.base_parts import memory_of_fullest
from tlora.planning.job_plan import PlannedJob
from tlora.planning.job_work import counting_jobs
from tlora.planning.memory import ACTIVATION_RANK, measure
from tlora.planning.micro_batches import fastest_budget
from tlora.planning.plan import RunPlan, adapt_experts, check_base_fits, check_capacity, layouts_of
from tlora.planning.work import token_cost
from tlora.shape.memory import MemoryModel
from tlora.shape.stages import LayerRange
from tlora.supermodel.supermodel import SuperModel


def _measure_whole(base_bytes: int, outlined: SuperModel, device: torch.device, rank: int, adapts_experts: bool = False) -> MemoryModel:
    return measure(outlined, base_bytes, device, rank, adapts_experts)


class MemoryBound:
    """`memory_limit` on one device, for jobs that come and go. Threads that open jobs may ask at the same time."""

    def __init__(
        self, outlined: SuperModel, base_bytes: int, device: torch.device, limit_bytes: int, stages: Sequence[LayerRange] = ()
    ) -> None:
        """`outlined` lies on the meta device; `base_bytes` are what the base takes on `device`, if it is not in `stages` on devices like
        this. Raises CapacityError for one that does not fit below the limit.
        """
        count = partial(memory_of_fullest, stages) if stages else partial(_measure_whole, base_bytes)
        self._counted = cache(partial(count, outlined, device))
        self._lock = threading.Lock()  # counting joins an adapter to `outlined`
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
        return memory.least_recomputed(memory.room(layouts_of(jobs), self._plan.limit_bytes))

    def check(self, job: PlannedJob, recompute: RecomputePlan) -> None:
        """A job that does not fit by itself, in micro-batches of its longest sample, gets a problem that says so."""
        check_capacity(job, replace(self._at(job.longest, recompute, [job]), longest=job.longest))

    def holds(self, most_tokens: int, recompute: RecomputePlan, jobs: Sequence[PlannedJob]) -> bool:
        """Whether all `jobs` fit at once, in micro-batches of up to `most_tokens`."""
        return self._at(most_tokens, recompute, jobs).fits(layouts_of(jobs))

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

    def _measure(self, rank: int, adapts_experts: bool = False) -> MemoryModel:
        with self._lock:
            return self._counted(rank, adapts_experts)

    def _memory(self, jobs: Sequence[PlannedJob]) -> MemoryModel:
        return counting_jobs(
            self._measure(self._largest_rank(jobs), adapt_experts(jobs)), jobs, deterministic=True
        )  # each has a mailbox of its own

    def _at(self, token_budget: int, recompute: RecomputePlan, jobs: Sequence[PlannedJob]) -> RunPlan:
        return replace(self._plan, memory=self._memory(jobs), token_budget=token_budget, recompute=recompute)
