"""Groups that no one worker can have: that of a group's first GPU leads it, and workers of the others lend it theirs. On the controller's
host, and on one with an agent, a worker can have any GPUs; one that was started by itself on another host has its own alone.

A leader trains from the first moment, on what it has. It takes in what is lent when that has loaded the base, and holds it until it has
said that it has let it go; then its lender begins anew by itself. The reconciler asks; no decision about jobs is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tlora.cluster.gpu_owners import GpuOwners
from tlora.cluster.hosts import by_host
from tlora.cluster.remote_worker import RemoteWorker
from tlora.protocol import Event, GroupKept, JobGroup
from tlora.worker_protocol import Join


class Lenders:
    """`holder_of` gives one number for all GPUs that one worker can have; `load` has the worker on some load that base; `bind` makes a
    process that waits there the worker of some.
    """

    def __init__(
        self,
        workers: dict[int, RemoteWorker],
        owners: GpuOwners,
        holder_of: Callable[[int], int],
        load: Callable[[tuple[int, ...], str], object],
        bind: Callable[[tuple[int, ...]], RemoteWorker | None],
    ) -> None:
        self._workers, self._owners, self._holder_of, self._load, self._bind = workers, owners, holder_of, load, bind

    def home(self, gpus: tuple[int, ...]) -> tuple[int, ...]:
        """Those that the worker has that leads a group with these."""
        own = self._holder_of(gpus[0])
        return tuple([gpu for gpu in gpus if self._holder_of(gpu) == own])

    def split(self, worker: RemoteWorker, gpus: Iterable[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those that the worker can have, and those that others lend it; each in ascending order."""
        own, there = self._holder_of(worker.gpu), sorted(set(gpus))
        return tuple([gpu for gpu in there if self._holder_of(gpu) == own]), tuple([gpu for gpu in there if self._holder_of(gpu) != own])

    def is_held(self, lender: RemoteWorker) -> bool:
        """Whether a leader has not yet let its GPUs go."""
        return bool(lender.lends_to) and any(not set(worker.lent).isdisjoint(lender.gpus) for worker in self._workers.values())

    def listen_at(self, group: JobGroup, leader: RemoteWorker) -> str:
        """The address of the leader's host at which the group's other workers reach it; "" for one worker, and while no other has come."""
        others = self._owners.workers_on(self.split(leader, group.gpus)[1])
        if not others:
            return ""
        return leader.address if leader.host is not None else others[0].reached_at

    def borrow(self, group: JobGroup, leader: RemoteWorker, busy: Callable[[RemoteWorker], bool], events: list[Event]) -> list[int] | None:
        """GPUs of others that the leader may be told to have; None where something has to be awaited first. `busy`: a worker has a
        group of its own. Where the leader cannot listen, an event keeps the group on its own GPUs.
        """
        home, rest = self.split(leader, group.gpus)
        ready, taken, awaited = list[int](), list[RemoteWorker](), leader.listening is None
        if leader.listening is not None and leader.listening.problem:
            events.append(GroupKept(group.group_id, home, leader.listening.problem))
            return None
        for part in by_host(rest, self._holder_of).values() if not awaited else ():
            there = self._there(part)
            ends = [worker for worker in there if worker.obeys and not worker.lends_to and worker.load is not None and not busy(worker)]
            for worker in ends:
                worker.stop(begins_anew=True)
            lenders = [worker for worker in there if worker.obeys and worker not in ends and not busy(worker)]
            lent = {gpu for worker in lenders for gpu in worker.gpus if worker.lends_to in ("", group.group_id)}
            if not set(part) <= lent:
                awaited = True
                continue
            taken += lenders
            ready += part
        if awaited:
            return None
        for worker in taken:  # all at once: what one has to load is told together with whom it lends to
            if worker.load is None:
                self._load(worker.gpus, group.base_model)
            worker.lends_to = group.group_id
        return ready

    def _there(self, gpus: list[int]) -> list[RemoteWorker]:
        """The workers on these; where some have none, a process that waits there for GPUs becomes theirs."""
        free = tuple([gpu for gpu in gpus if not self._owners.workers_on([gpu])])
        if free and (bound := self._bind(free)) is not None:
            self._owners.enter(bound)
        return self._owners.workers_on(gpus)

    def tell(self, group: JobGroup, leader: RemoteWorker, jobs: tuple[Join, ...]) -> None:
        """The lenders of what the leader has: whom they work for, and what they may read of `jobs`."""
        for worker in self._owners.workers_on(leader.lent):
            if worker.lends_to == group.group_id and worker.obeys and worker.load is not None and leader.listening is not None:
                worker.lend(group.group_id, leader, [gpu for gpu in leader.lent if gpu in worker.gpus], jobs)
