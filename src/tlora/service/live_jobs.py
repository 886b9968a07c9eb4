"""The service's core: what follows for the store from what happens in the cluster (`progress/cluster.py`). Effects are values.

No store, no files and no clock: `job_status_writer.py` carries the effects out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tlora.api import Status
from tlora.cluster.remote_worker import gpu_names
from tlora.progress.cluster import ClusterProgress
from tlora.progress.view import JobProgress, ProgressView
from tlora.protocol import (
    Action,
    Event,
    GroupFound,
    JobFailed,
    JobFinished,
    JobGroup,
    JobRequest,
    RejectJob,
    StepsDone,
)
from tlora.service.live_state import ClusterSnapshot
from tlora.service.machine import Devices
from tlora.service.waiting_queue import QueuePlace
from tlora.wording.numbers import place_names


@dataclass(frozen=True, slots=True)
class ChangeStatus:
    """Compare-and-set in the store: the job gets `status` if it has one of `before`. `starts`: from now on it trains."""

    job_id: str
    before: tuple[Status, ...]
    status: Status
    message: str
    starts: bool = False


@dataclass(frozen=True, slots=True)
class ShowSteps:
    """The job has made so many optimizer steps."""

    job_id: str
    steps: int


@dataclass(frozen=True, slots=True)
class EndJob:
    """`status` is "succeeded", "failed" for `reason`, or "cancelled", which the store knows already."""

    job_id: str
    status: Status
    reason: str = ""


Effect = ChangeStatus | ShowSteps | EndJob


class LiveJobs:
    """Changed by `see` and `end` alone. Safe in several threads."""

    def __init__(self) -> None:
        self.reading: dict[str, str] = {}  # jobs whose data is being read -> how far that has come
        self.lacking: dict[str, str] = {}  # jobs that wait for what the server has lost, or has no room for -> for what
        self._cluster = ClusterProgress(ProgressView())
        self._queued: dict[str, None] = {}  # jobs that wait for a place, in the order in which they came to
        self._lock = threading.Lock()

    def see(self, item: Event | Action) -> Iterable[Effect]:
        """What has happened, and what follows from it, in order."""
        with self._lock:
            effects = list[Effect]()
            for before, after in self._cluster.see(item):
                effects += _follow(item, before, after)
                if after.status != "queued":
                    self._queued.pop(after.name, None)
                else:
                    self._queued.setdefault(after.name)
                    self.lacking.pop(after.name, None)
        match item:
            case JobFinished(job_id):
                effects.append(EndJob(job_id, "succeeded"))
            case JobFailed(job_id, reason) | RejectJob(job_id, reason):
                effects.append(EndJob(job_id, "failed", reason))
            case JobRequest(job_id, "cancel"):
                effects.append(EndJob(job_id, "cancelled"))
            case _:
                pass
        return effects

    def end(self, job_id: str) -> None:
        """By its owner or by itself."""
        with self._lock:
            self.reading.pop(job_id, None)
            self.lacking.pop(job_id, None)
            self._queued.pop(job_id, None)
            self._cluster.forget(job_id)

    def snapshot(self, places: Devices, queue: Mapping[str, QueuePlace]) -> ClusterSnapshot:
        """`queue`: as the policy foresaw it last."""
        with self._lock:
            rows, groups, reading = list(self._cluster.view.rows.values()), list(self._cluster.groups.values()), self.reading | self.lacking
            waiting = dict(self.lacking)
            queued, kinds = list(self._queued), dict(self._cluster.kinds)
            delayed = {job_id: why for group in groups for job_id in group.job_ids if (why := self._cluster.why_delayed(job_id))}
            placements = {group.group_id: why for group in groups if (why := self._cluster.why_there(group))}
            hosts = tuple([replace(host, gpus=set(host.gpus)) for host in self._cluster.hosts.values()])
            silent = self._cluster.silent
        starts = dict[str, float]()
        behind = len(queue) + 1  # those that the policy has not seen yet
        order = sorted(queued, key=lambda job_id: queue[job_id].number if job_id in queue else behind)
        for index, job_id in enumerate(order):
            before = "it is the next" if not index else f"{index:,} {'job waits' if index == 1 else 'jobs wait'} before it"
            place = queue.get(job_id)
            why = f"; {place.reason}" if place is not None and place.reason else ""
            waiting[job_id] = f"a {place_names(places.device)[0]} that it fits on: {before}{why}"
            if place is not None and place.starts is not None:
                starts[job_id] = place.starts
        living = {row.name for row in rows if not row.has_ended}
        loading = {row.name for row in rows if row.status == "preparing"}
        groups = [_of_living(group, living) for group in groups]
        for group in groups:
            for job_id in group.job_ids:
                if job_id in loading:
                    waiting[job_id] = f"its group on {gpu_names(group.gpus, *place_names(places.device))} to load the base and let it in"
        waiting |= delayed
        places_of = {job_id: number for number, job_id in enumerate(order, 1)}
        gpus = tuple(sorted({gpu for host in hosts for gpu in host.gpus})) or places.gpus
        return ClusterSnapshot(places.device, gpus, tuple(groups), waiting, reading, places_of, starts, hosts, kinds, placements, silent)


def _follow(item: Event | Action, before: JobProgress | None, after: JobProgress) -> Iterator[Effect]:
    """What follows for the store from the change of a job's row."""
    name, was = after.name, before.status if before is not None else "queued"
    if isinstance(item, StepsDone) and not after.has_ended:
        yield ShowSteps(name, int(item.steps))
    if isinstance(item, GroupFound) and after.status in ("training", "paused") and name in item.group.job_ids:
        yield ShowSteps(name, after.step)
        yield ChangeStatus(name, ("queued", "running"), "running", "trains; it did so while the server was away")
    elif after.status == "training" != was:
        yield ChangeStatus(name, ("queued",), "running", f"trains, steps done: {after.step:,}", starts=True)
    elif after.status == "queued" and before is not None and before.gpu is not None:
        yield ChangeStatus(name, ("running",), "queued", "left its group; it goes on from its checkpoint")


def _of_living(group: JobGroup, living: set[str]) -> JobGroup:
    """Without jobs that have ended: the scheduler keeps them in the group until it changes it."""
    for job_id in group.job_ids:
        group = group if job_id in living else group.without(job_id)
    return group
