"""Workers of an earlier controller: where its groups and jobs go on."""

from __future__ import annotations

from collections.abc import Iterable

from tlora.cluster.remote_worker import RemoteWorker


class FoundWorkers:
    """Where the groups and jobs of an earlier controller are: some are found twice, as they were moving or belong to two controllers."""

    def __init__(self, workers: Iterable[RemoteWorker]) -> None:
        self._last_of: dict[str, tuple[int, RemoteWorker]] = {}  # of a group, the worker where its jobs went last
        self._attempts: dict[str, int] = {}  # of a job, the last
        for worker in workers:
            for name, held in worker.jobs.items():
                self._attempts[name] = max(held.attempt, self._attempts.get(name, 0))
            last = max((held.attempt for held in worker.jobs.values()), default=0)
            if worker.found is not None:
                before = self._last_of.get(worker.found.group_id)
                if before is None or last > before[0]:
                    self._last_of[worker.found.group_id] = last, worker

    def is_last(self, worker: RemoteWorker, group_id: str) -> bool:
        """Whether the group goes on there: where its jobs went last."""
        return self._last_of[group_id][1] is worker

    def is_best(self, worker: RemoteWorker, job_id: str) -> bool:
        """Whether the job goes on there: a job that was being handed over is in two workers, and its attempt is the later one in one."""
        return job_id in worker.jobs and worker.jobs[job_id].attempt == self._attempts[job_id]
