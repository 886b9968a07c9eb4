"""What fits into the memory of a worker's device: a job that comes, the plan of its group, a measurement next to it."""

from __future__ import annotations

from collections.abc import Sequence

from tlora.batching.recompute_plan import RecomputePlan, same_for_all
from tlora.engine.commands import Share
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.job import Recompute
from tlora.planning.job_plan import PlannedJob
from tlora.planning.memory_bound import MemoryBound
from tlora.planning.micro_batches import fixed_depth


class WorkerMemory:
    """`share` is the last that was ordered."""

    def __init__(self, bound: MemoryBound, group: Engine, recompute: Recompute, share: Share) -> None:
        self._bound, self._group, self.share = bound, group, share
        self._recompute: Recompute = recompute

    def check(self, planned: PlannedJob) -> None:
        """A job that does not fit by itself gets a problem that says so."""
        self._bound.check(planned, self._deepest())

    def fits(self, newcomer: JobRun) -> bool:
        """Next to those who are here; alone, it was looked at before."""
        runs = list(self._group.runs.values())
        if not runs:
            return True
        longest, jobs = self._demand([*runs, newcomer])
        return self._bound.holds(longest, self._deepest(), jobs)

    def has_room_for(self, more: Sequence[JobRun], tokens: int = 0) -> bool:
        """Whether `more` jobs fit next to all that are here and their plan, and a micro-batch of so many tokens without recomputation."""
        group = self._group
        longest, jobs = self._demand([*group.runs.values(), *more])
        fits = self._bound.holds(max(longest, group.token_budget), group.model.recompute, jobs)
        return fits and (not tokens or self._bound.holds(max(longest, tokens), same_for_all(0), jobs))

    def apply_share(self, newcomer: JobRun | None = None) -> None:
        """What the last Share says, as far as the run options leave it open; room is kept for a `newcomer`."""
        group, share = self._group, self.share
        longest, jobs = self._demand([*group.runs.values(), *([newcomer] if newcomer else [])])
        recompute = self._deepest()
        if self._recompute == "auto":
            recompute = self._bound.least_recomputed(jobs).at_least(share.recomputed_layers)
        group.share(self._bound.lower(share.token_budget, longest, recompute, jobs), recompute, share.weights)

    def _deepest(self) -> RecomputePlan:
        """As many layers as may be recomputed at most: as ordered, or as many as memory asks for."""
        fixed = fixed_depth(self._recompute, self._group.model.num_layers)
        return same_for_all(max(self.share.recomputed_layers, self._bound.most_recomputed) if fixed is None else fixed)

    def _demand(self, runs: Sequence[JobRun]) -> tuple[int, list[PlannedJob]]:
        """The longest sample of `runs`, and the jobs as the memory model has them."""
        specs = [run.spec.model_copy(update={"gpus": run.replicas}) for run in runs]
        jobs = [PlannedJob(spec, layout=self._group.model.layout(spec)) for spec in specs]
        return max((run.longest for run in runs), default=1), jobs
