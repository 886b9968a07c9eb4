"""Between a controller's workers and the engine that has started them: what the queue needs goes out, proofs of ends come in."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tlora.cluster.leased_process import LeasedProcess
from tlora.cluster.remote_hosts import ProvenEnd
from tlora.cluster.worker_pool import WorkerPool
from tlora.protocol import (
    Action,
    ChangeGroup,
    Event,
    GpusAsked,
    GroupFound,
    GroupLost,
    JobFailed,
    JobFinished,
    JobGroup,
    JobRequest,
    JobSubmitted,
    RejectJob,
    StartGroup,
    StopGroup,
)
from tlora.scheduler.job import Lack

TELL_SECONDS = 0.5  # at least, between two looks at all workers; the keeper takes one a second
Prove = Callable[[str, int | None, str], None]
"""A host, the pid of a process there or None for all of them, and how it ended."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the cluster needs: hosts with workers that have something to do, and by the GPUs that each asks for the number of jobs that wait
    for as many as there are, or more of the same. With `lacks_another` some job waits that none of them holds. `workers`: the pids of those
    that it believes to be alive, by host.
    """

    busy: frozenset[str] = frozenset()
    waiting: Mapping[int, int] = field(default_factory=dict[int, int])
    lacks_another: bool = False
    workers: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


class Keeper(Protocol):
    """Of an engine's hosts (`host_keeper.py`, which only a controller with an engine imports)."""

    @property
    def most_gpus(self) -> int: ...
    def start(self) -> None: ...
    def want(self, demand: Demand) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


OpenKeeper = Callable[[Prove], Keeper]


class QueueDemand:
    """A fold of a cluster's events and actions: which GPUs groups have, and how many those jobs ask for that have none and are not held."""

    def __init__(self) -> None:
        self._asks: dict[str, int] = {}  # job -> GPUs
        self._held: set[str] = set()
        self._groups: dict[str, JobGroup] = {}

    def see(self, item: Event | Action) -> None:
        match item:
            case JobSubmitted(name):
                self._asks[name] = item.gpus
            case GpusAsked(name, gpus) if name in self._asks:
                self._asks[name] = gpus
            case JobFinished(name) | JobFailed(name) | RejectJob(name) | JobRequest(name, "cancel"):
                self._asks.pop(name, None)
                self._held.discard(name)
            case JobRequest(name, "hold"):
                self._held.add(name)
            case JobRequest(name):
                self._held.discard(name)
            case GroupFound(group, jobs):
                self._asks |= {job.job_id: job.gpus for job in jobs}
                self._groups[group.group_id] = group
            case StartGroup(group) | ChangeGroup(group):
                self._groups[group.group_id] = group
            case StopGroup(name) | GroupLost(name):
                self._groups.pop(name, None)
            case _:
                pass

    @property
    def busy(self) -> frozenset[int]:
        return frozenset(gpu for group in self._groups.values() for gpu in group.gpus)

    def waiting(self, without: Collection[str] = ()) -> Counter[int]:
        """The number of jobs by the GPUs that each asks for."""
        placed = {name for group in self._groups.values() for name in group.job_ids}
        aside = {*placed, *self._held, *without}
        return Counter(gpus for name, gpus in self._asks.items() if name not in aside)

    def lacks_another(self, lacks: Mapping[str, Lack]) -> bool:
        """Whether one of these jobs, of which more GPUs of the same are no use to some, is not held."""
        return any(not lack.more_would_do and name in self._asks and name not in self._held for name, lack in lacks.items())


class EngineHosts:
    """Of one controller. Without a keeper there is no engine, and nothing happens."""

    def __init__(self, worker_pool: WorkerPool, open_keeper: OpenKeeper | None) -> None:
        self._worker_pool, self._demand = worker_pool, QueueDemand()
        self._told, self._due = 0.0, 0.0 if open_keeper is not None else math.inf  # of what the keeper hears, on the monotonic clock
        self._keeper = open_keeper(self._prove) if open_keeper is not None else None
        self.lacks: Callable[[], Mapping[str, Lack]] = dict[str, Lack]  # of jobs that wait aside for other hosts

    def start(self) -> None:
        if self._keeper is not None:
            self._keeper.start()

    @property
    def can_bring(self) -> int:
        """GPUs that the engine's hosts can have in all; 0 without an engine, and while it is not known."""
        return 0 if self._keeper is None else self._keeper.most_gpus

    def _prove(self, host: str, pid: int | None, how: str) -> None:
        self._worker_pool.inbox.put(ProvenEnd(host, pid, how))

    def see(self, *items: Event | Action) -> None:
        if self._keeper is not None:
            for item in items:
                self._demand.see(item)
            self._due = min(self._due, self._told + TELL_SECONDS)

    @property
    def due_in_seconds(self) -> float:
        """When `tell` has something to say. It is never long after what was seen last."""
        return self._due - time.monotonic()

    def tell(self) -> None:
        """Say what the queue needs now, if that is due: it looks at all workers, which takes some milliseconds for 8,000."""
        if self._keeper is not None and self.due_in_seconds <= 0:
            self._told, self._due = time.monotonic(), math.inf
            busy = self._demand.busy
            hosts, pids = set[str](), dict[str, tuple[int, ...]]()
            for worker in (*self._worker_pool.workers.values(), *self._worker_pool.remote_hosts.spares.values()):
                if isinstance(worker.process, LeasedProcess):
                    host = worker.process.host
                    pids[host] = (*pids.get(host, ()), worker.process.pid)
                    if busy.intersection(worker.gpus) or worker.jobs:
                        hosts.add(host)
            lacks = self.lacks()
            waiting = self._demand.waiting({name for name, lack in lacks.items() if not lack.more_would_do})
            self._keeper.want(Demand(frozenset(hosts), waiting, self._demand.lacks_another(lacks), pids))

    def drain(self) -> None:
        """Before workers are stopped: none is started again."""
        if self._keeper is not None:
            self._keeper.drain()

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
