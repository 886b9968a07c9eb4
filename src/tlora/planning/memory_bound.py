"""`memory_limit` where others choose the token budget: a worker's Shares are lowered to it, and a job that cannot fit is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tlora.planning.job_plan import PlannedJob
from tlora.planning.memory import measure
from tlora.planning.plan import RunPlan, check_base_fits, check_capacity, counting_jobs
from tlora.supermodel.supermodel import SuperModel

_RANK = 64  # up to which a GPU's activations are counted


class MemoryBound:
    def __init__(self, outlined: SuperModel, base_bytes: int, device: torch.device, limit_bytes: int) -> None:
        """`outlined` lies on the meta device; `base_bytes` are what the base takes on `device`. Raises CapacityError for one that does not
        fit below the limit.
        """
        self._plan = RunPlan((), 1, 0, measure(outlined, base_bytes, device, _RANK), limit_bytes, 1, None)
        check_base_fits(self._plan)

    def check(self, job: PlannedJob, recomputed_layers: int) -> None:
        """A job that does not fit by itself, in micro-batches of its longest sample, gets a problem that says so."""
        check_capacity(job, replace(self._at(job.longest, recomputed_layers, [job]), longest=job.longest))

    def holds(self, longest: int, recomputed_layers: int, jobs: Sequence[PlannedJob]) -> bool:
        """Whether all `jobs` fit at once, in micro-batches of the `longest` sample of any."""
        return self._at(longest, recomputed_layers, jobs).fits([job.layout for job in jobs if job.layout is not None])

    def lower(self, token_budget: int, longest: int, recomputed_layers: int, jobs: Sequence[PlannedJob]) -> int:
        """The largest of `token_budget`, its half, its quarter, … with which all `jobs` fit at once; `longest` if none does."""
        budget, layouts = max(token_budget, longest), [job.layout for job in jobs if job.layout is not None]
        while budget > longest and not self._at(budget, recomputed_layers, jobs).fits(layouts):
            budget = max(budget // 2, longest)
        return budget

    def _at(self, token_budget: int, recomputed_layers: int, jobs: Sequence[PlannedJob]) -> RunPlan:
        memory = counting_jobs(self._plan.memory, jobs, deterministic=True)  # each has a mailbox of its own
        return replace(self._plan, memory=memory, token_budget=token_budget, recomputed_layers=recomputed_layers)
