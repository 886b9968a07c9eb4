"""The ranks' reports as changes of the view of the run's jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from tlora.batching.replicas import ReplicaPlacement
from tlora.engine.run_monitor import row_of
from tlora.job import RunSpec
from tlora.progress.view import JobProgress, ProgressView, RunProgress
from tlora.store.job_result import JobResult


class ProgressAggregator:
    """`results` are of the jobs that have ended; `began` are the jobs that some rank has begun; `spans` those that several compute."""

    def __init__(self, run: RunSpec, ended: Mapping[str, JobResult] = MappingProxyType({}), device: str = "cuda") -> None:
        """`ended`: jobs that an earlier run has ended; `device`: of the ranks."""
        rows = {job.name: JobProgress(job.name, "preparing", job.r) for job in run.jobs}
        self._view = ProgressView((rows | {name: row_of(result) for name, result in ended.items()}).values(), device)
        self.progress = self._view.progress
        self.lose = self._view.lose
        self.spans: Mapping[str, ReplicaPlacement] = {}
        self.results: dict[str, JobResult] = dict(ended)
        self.began: set[str] = set()

    @property
    def homes(self) -> dict[str, int]:
        """The GPU that each job is on, or was last."""
        return {name: row.gpu for name, row in self._view.rows.items() if row.gpu is not None}

    @property
    def total_steps(self) -> dict[str, int]:
        """Of the jobs that have been shown."""
        return {name: row.total_steps for name, row in self._view.rows.items()}

    def begin(self, rank: int, job: str) -> None:
        self.began.add(job)
        self._view.place(job, self._gpus(rank, job))

    def show(self, rank: int, progress: RunProgress, rates: Mapping[str, float]) -> None:
        """`rates`: tokens per second of jobs that are led elsewhere."""
        self._view.measure(rank, progress.tokens_per_second, progress.padding, progress.stage, rates)
        for job in progress.jobs:
            if job.name not in self.results and not job.has_ended:  # results report ends
                gpu, *parts_on = self._gpus(rank, job.name)
                self._view.show(replace(job, gpu=gpu, parts_on=tuple(parts_on)))

    def end(self, rank: int, result: JobResult) -> None:
        """A rank may end a job that it took over before it has shown it."""
        self.results[result.name] = result
        self._view.show(replace(row_of(result), gpu=rank))

    def _gpus(self, rank: int, job: str) -> tuple[int, ...]:
        span = self.spans.get(job)
        return (rank, *(span.peers if span is not None else ()))
