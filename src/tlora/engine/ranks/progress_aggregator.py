"""Folds the ranks' reports into one view of the run's jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from tlora.batching.replicas import ReplicaPlacement
from tlora.engine.run_monitor import row_of
from tlora.engine.watcher import JobProgress, RunProgress
from tlora.job import RunSpec
from tlora.store.job_result import JobResult


class ProgressAggregator:
    """`results` are of the jobs that have ended; `began` are the jobs that some rank has begun; `spans` those that several compute."""

    def __init__(self, run: RunSpec, ended: Mapping[str, JobResult] = MappingProxyType({})) -> None:
        """`ended`: jobs that an earlier run has ended."""
        self._rows = {job.name: JobProgress(job.name, "preparing", job.r) for job in run.jobs}  # the newest of each
        self._shown: dict[int, RunProgress] = {}
        self._rates: dict[int, Mapping[str, float]] = {}
        self.spans: Mapping[str, ReplicaPlacement] = {}
        self.results: dict[str, JobResult] = dict(ended)
        self.began: set[str] = set()
        self._rows |= {name: row_of(result) for name, result in ended.items()}

    @property
    def homes(self) -> dict[str, int]:
        """The GPU that each job is on, or was last."""
        return {name: row.gpu for name, row in self._rows.items() if row.gpu is not None}

    @property
    def total_steps(self) -> dict[str, int]:
        """Of the jobs that have been shown."""
        return {name: row.total_steps for name, row in self._rows.items()}

    def begin(self, rank: int, job: str) -> None:
        self.began.add(job)
        self._rows[job] = replace(self._rows[job], gpu=rank)

    def show(self, rank: int, progress: RunProgress, rates: Mapping[str, float]) -> None:
        """`rates`: tokens per second of jobs that have their home elsewhere."""
        self._shown[rank], self._rates[rank] = progress, rates
        for job in progress.jobs:
            if job.name not in self.results and job.status not in ("done", "failed", "stopped"):  # results report ends
                self._rows[job.name] = replace(job, gpu=rank)

    def end(self, rank: int, result: JobResult) -> None:
        """A rank may end a job that it took over before it has shown it."""
        self.results[result.name] = result
        self._rows[result.name] = replace(row_of(result), gpu=rank)

    def lose(self, rank: int) -> None:
        """Its jobs wait until another rank shows them."""
        self._shown.pop(rank, None)
        self._rates.pop(rank, None)
        for name, row in self._rows.items():
            if row.gpu == rank and name not in self.results:
                self._rows[name] = replace(row, status="queued", gpu=None, tokens_per_second=0.0, eta_seconds=None)

    def _on_all(self, row: JobProgress, total: float) -> JobProgress:
        """The row with the tokens of all GPUs that compute parts of the job, of `total` tokens per second."""
        if row.name in self.results:
            return row
        span = self.spans.get(row.name)
        row = replace(row, parts_on=span.peers if span is not None and row.gpu is not None else ())
        if not row.tokens_per_second:
            return row
        rate = row.tokens_per_second + sum(rates.get(row.name, 0.0) for rates in self._rates.values())
        return replace(row, tokens_per_second=rate, share=rate / total if total else 0.0)

    def progress(self, seconds: float, stage: str = "") -> RunProgress:
        """Rates are sums over all GPUs, and shares are of these."""
        shown = list(self._shown.values())
        total = sum(progress.tokens_per_second for progress in shown)
        jobs = tuple(self._on_all(row, total) for row in self._rows.values())
        padding = sum(progress.padding * progress.tokens_per_second for progress in shown) / total if total else 0.0
        stage = stage or next((f"GPU {rank}: {p.stage}" for rank, p in sorted(self._shown.items()) if p.stage), "")
        return RunProgress(seconds, jobs, total, padding, stage)
