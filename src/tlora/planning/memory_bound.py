"""What `memory_limit` leaves jobs that come and go on one device: a worker's plan, where a run has a `RunPlan`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, repeat

import torch

from tlora.adapter_shape import ExpertJobs
from tlora.batching.recompute_plan import RecomputePlan
from tlora.kernels.lora_tables import rank_width
from tlora.planning.base_parts import memory_of_stages
from tlora.planning.job_work import counting_jobs
from tlora.planning.memory import ACTIVATION_RANK, measure, measure_in_parts
from tlora.planning.micro_batches import fastest_budget
from tlora.planning.plan import RunPlan, adapt_experts, check_base_fits, check_capacity, layouts_of
from tlora.planning.planned_job import PlannedJob
from tlora.planning.work import token_cost
from tlora.shape.memory import MemoryModel
from tlora.shape.stages import LayerRange
from tlora.supermodel.supermodel import SuperModel


def _measure_one(
    base_bytes: int, in_parts: bool, outlined: SuperModel, device: torch.device, rank: int, adapts_experts: ExpertJobs = False
) -> tuple[MemoryModel, ...]:
    return ((measure_in_parts if in_parts else measure)(outlined, base_bytes, device, rank, adapts_experts),)


class MemoryBound:
    """`memory_limit` on one device, for jobs that come and go. Threads that open jobs may ask at the same time."""

    def __init__(
        self,
        outlined: SuperModel,
        base_bytes: int,
        device: torch.device,
        limits: Sequence[int],
        stages: Sequence[LayerRange] = (),
        in_parts: bool = False,
    ) -> None:
        """`outlined` lies on the meta device; `base_bytes` are what the base takes on `device`, if it is not in `stages`. `limits`: bytes
        of `device`, or of each stage's, which need not be equal. `in_parts`: the base is shared or streamed. Raises CapacityError for one
        that does not fit below the limit.
        """
        assert len(limits) == max(1, len(stages)), (limits, stages)
        count = partial(memory_of_stages, stages) if stages else partial(_measure_one, base_bytes, in_parts)
        self._counted = cache(partial(count, outlined, device))
        self._lock = threading.Lock()  # counting joins an adapter to `outlined`
        self._rank, self._device = ACTIVATION_RANK, device
        self.limits = tuple(limits)
        memory, limit = max(self._within(self._measure(self._rank)), key=lambda pair: pair[0].base_bytes - pair[1])
        self._plan = RunPlan((), 1, RecomputePlan(), memory, limit, 1, {})
        check_base_fits(self._plan)

    @property
    def most_recomputed(self) -> int:
        """Layers that can be recomputed with profit."""
        return max(memory.most_recomputed for memory in self._measure(self._rank))

    @property
    def num_layers(self) -> int:
        """That can be recomputed; of the stage that has most."""
        return max(memory.num_layers for memory in self._measure(self._rank))

    def least_recomputed(self, jobs: Sequence[PlannedJob]) -> RecomputePlan:
        """The fewest layers with which all `jobs` fit at once, by the tokens of a micro-batch; all, where they never do. In stages, those
        of the stage that needs most.
        """
        layouts, memories = layouts_of(jobs), self._memories(jobs)
        rooms = [memory.room(layouts, limit) for memory, limit in self._within(memories)]
        least = [min(map(MemoryModel.most_tokens, memories, rooms, repeat(depth))) for depth in range(self.most_recomputed)]
        return RecomputePlan(tuple(accumulate(least, max)))

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
            fullest = self._at(max(token_budget, longest), recompute, jobs).memory
            return fastest_budget(token_budget, recompute, token_cost(fullest, self._device))
        budget = max(token_budget, longest)
        while budget > longest and not self.holds(budget, recompute, jobs):
            budget = max(budget // 2, longest)
        return budget

    def _largest_rank(self, jobs: Sequence[PlannedJob]) -> int:
        """Of `jobs` and of all that were here, as wide as the kernels make it."""
        return max(self._rank, *(rank_width(job.layout.largest_rank) for job in jobs if job.layout is not None), ACTIVATION_RANK)

    def _measure(self, rank: int, adapts_experts: ExpertJobs = False) -> tuple[MemoryModel, ...]:
        with self._lock:
            return self._counted(rank, adapts_experts)

    def _memories(self, jobs: Sequence[PlannedJob]) -> list[MemoryModel]:
        """Of each stage."""
        counted = self._measure(self._largest_rank(jobs), adapt_experts(jobs))
        return [counting_jobs(memory, jobs, deterministic=True) for memory in counted]  # each job has a mailbox of its own

    def _at(self, token_budget: int, recompute: RecomputePlan, jobs: Sequence[PlannedJob]) -> RunPlan:
        """Of the stage that has the least room left then: all take what that one can."""
        layouts, pairs = layouts_of(jobs), self._within(self._memories(jobs))
        memory, limit = max(pairs, key=lambda pair: pair[0].total_bytes(layouts, token_budget, recompute) - pair[1])
        return replace(self._plan, memory=memory, limit_bytes=limit, token_budget=token_budget, recompute=recompute)

    def _within(self, memories: Sequence[MemoryModel]) -> list[tuple[MemoryModel, int]]:
        """With the limit of each stage."""
        return list(zip(memories, self.limits, strict=True))
