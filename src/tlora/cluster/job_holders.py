"""Which workers may hold each job, so that no job is let into one while another has it still.

Follows what comes to hold a job; that it is let go is seen when it is asked for. So a question costs what holds the job, however many
workers there are.
"""

from __future__ import annotations

from collections.abc import Mapping

from tlora.cluster.remote_worker import RemoteWorker


class JobHolders:
    """`workers`, by the first of their GPUs: those that are there."""

    def __init__(self, workers: Mapping[int, RemoteWorker]) -> None:
        self._workers = workers
        self._of: dict[str, dict[RemoteWorker, None]] = {}

    def enter(self, *workers: RemoteWorker) -> None:
        """These may hold jobs that they did not hold before."""
        for worker in workers:
            for name in worker.jobs:
                self._of.setdefault(name, {})[worker] = None

    def is_held(self, job_id: str) -> bool:
        """Whether a worker that is there holds the job."""
        of = self._of.get(job_id, {})
        for worker in [worker for worker in of if not (job_id in worker.jobs and self._workers.get(worker.gpu) is worker)]:
            del of[worker]
        if not of:
            self._of.pop(job_id, None)
        return bool(of)
