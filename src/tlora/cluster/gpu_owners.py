"""Which worker has each GPU of a cluster and which group wants it, and on which GPUs something has changed since they were looked at.

So that a change costs what it touches, however many workers there are. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from tlora.cluster.remote_worker import RemoteWorker
from tlora.protocol import JobGroup


class GpuOwners:
    """`workers`, by the first of their GPUs, belong to a pool that adds and removes some by itself."""

    def __init__(self, workers: dict[int, RemoteWorker]) -> None:
        self._workers = workers
        self._known: dict[int, RemoteWorker] = {}  # of the workers, those that are entered here
        self._gpus: dict[RemoteWorker, tuple[int, ...]] = {}  # under which they are entered
        self._worker_on: dict[int, RemoteWorker] = {}
        self._group_on: dict[int, str] = {}
        self._changed: set[int] = set()

    # -- what has changed ----------------------------------------------------------------------------------------------

    def mark(self, gpus: Iterable[int]) -> None:
        """Something has changed on these."""
        self._changed.update(gpus)

    def take_changed(self) -> set[int]:
        """The GPUs that were marked since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def notice(self) -> list[RemoteWorker]:
        """Enter the workers that the pool has taken on, which are the last in `workers`, and remove those that it has dropped. Costs
        nothing where there are none. Returns those that are new.
        """
        new: list[RemoteWorker] = []
        for worker in reversed(self._workers.values()):
            if worker in self._gpus:
                break
            new.append(worker)
        for worker in reversed(new):
            self.enter(worker)
        if len(self._known) != len(self._workers):
            for gpu, worker in self._known.items() - self._workers.items():
                del self._known[gpu]
                self.remove(worker)
        return new

    # -- workers -------------------------------------------------------------------------------------------------------

    def enter(self, worker: RemoteWorker) -> None:
        """The worker has come, or has other GPUs now."""
        self.remove(worker)
        self._known[worker.gpu], self._gpus[worker] = worker, worker.gpus
        self._worker_on |= dict.fromkeys(worker.gpus, worker)
        self.mark(worker.gpus)

    def remove(self, worker: RemoteWorker) -> None:
        before = self._gpus.pop(worker, ())
        for gpu in before:
            if self._worker_on.get(gpu) is worker:
                del self._worker_on[gpu]
        if before and self._known.get(before[0]) is worker:
            del self._known[before[0]]
        self.mark(before)

    def workers_on(self, gpus: Iterable[int]) -> list[RemoteWorker]:
        """Each once."""
        on = self._worker_on
        return list(dict.fromkeys([on[gpu] for gpu in gpus if gpu in on]))

    # -- groups --------------------------------------------------------------------------------------------------------

    def want(self, group: JobGroup, before: JobGroup | None) -> None:
        """The group has these GPUs now, and had others as `before`."""
        if before is not None:
            self.forget(before)
        for gpu in group.gpus:
            other = self._group_on.setdefault(gpu, group.group_id)
            assert other == group.group_id, f"{group.group_id} shall have {group.gpus}, of which {other} has {gpu}"
        self.mark(group.gpus)

    def forget(self, group: JobGroup) -> None:
        for gpu in group.gpus:
            del self._group_on[gpu]
        self.mark(group.gpus)

    def groups_on(self, gpus: Iterable[int]) -> list[str]:
        """Names of groups, each once."""
        on = self._group_on
        return list(dict.fromkeys([on[gpu] for gpu in gpus if gpu in on]))
