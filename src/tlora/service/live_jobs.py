"""The service's core: jobs that have not ended, as a fold of what happens in the cluster. Each event has effects, which are values.

No store, no files and no clock: `job_status_writer.py` carries the effects out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tlora.api import Status
from tlora.cluster.remote_worker import called
from tlora.protocol import (
    Action,
    ChangeGroup,
    Event,
    GroupFound,
    GroupLost,
    JobFailed,
    JobFinished,
    JobGroup,
    JobRequest,
    JobSubmitted,
    RejectJob,
    StartGroup,
    StepsDone,
    StopGroup,
)
from tlora.service.live_state import ClusterSnapshot
from tlora.service.machine import NAMES, Devices
from tlora.service.waiting_queue import QueuePlace


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
    """Changed by `see` and `end` alone; `snapshot` may be called in any thread meanwhile."""

    def __init__(self) -> None:
        self.reading: dict[str, str] = {}  # jobs whose data is being read, or cannot be yet -> how far that has come, or why
        self._groups: dict[str, JobGroup] = {}
        self._waiting: dict[str, None] = {}  # jobs that the cluster has and that are in no group
        self._held: set[str] = set()  # paused by their owners
        self._running: set[str] = set()
        self._ended: set[str] = set()  # of those that are in a group still

    def see(self, item: Event | Action) -> Iterable[Effect]:
        """What has happened, and what follows from it, in order."""
        match item:
            case JobSubmitted(job_id):
                self._waiting[job_id] = None
            case JobRequest(job_id, "hold"):
                self._held.add(job_id)
                self._waiting.pop(job_id, None)
            case JobRequest(job_id, "release") if job_id in self._held:  # one that was not held may run
                self._release(job_id)
            case GroupFound(group, _, steps):
                return self._find(group, steps)
            case StartGroup(group) | ChangeGroup(group):
                return self._place(group)
            case StopGroup(group_id) | GroupLost(group_id):
                return list(self._leave(self._groups.pop(group_id, None), frozenset()))
            case StepsDone(job_id, _, steps):
                return list(self._see_steps(job_id, int(steps)))
            case JobFinished(job_id):
                return [EndJob(job_id, "succeeded")]
            case JobFailed(job_id, reason) | RejectJob(job_id, reason):
                return [EndJob(job_id, "failed", reason)]
            case JobRequest(job_id, "cancel"):
                return [EndJob(job_id, "cancelled")]
            case _:
                pass
        return []

    def end(self, job_id: str) -> None:
        """By its owner or by itself."""
        self._waiting.pop(job_id, None)
        self.reading.pop(job_id, None)
        self._running.discard(job_id)
        self._held.discard(job_id)
        if self._is_placed(job_id):
            self._ended.add(job_id)

    def _is_placed(self, job_id: str) -> bool:
        return any(job_id in group.job_ids for group in list(self._groups.values()))

    def _place(self, group: JobGroup) -> list[Effect]:
        before = self._groups.get(group.group_id)
        self._groups[group.group_id] = group
        for job_id in group.job_ids:
            self._waiting.pop(job_id, None)
        return list(self._leave(before, frozenset(group.job_ids)))

    def _find(self, group: JobGroup, steps: Sequence[int]) -> list[Effect]:
        """Its jobs were trained on while no server was there."""
        effects, done = self._place(group), dict(zip(group.job_ids, steps, strict=False))
        for job_id in group.job_ids:
            self._running.add(job_id)
            effects.append(ShowSteps(job_id, done.get(job_id, 0)))
            effects.append(ChangeStatus(job_id, ("queued", "running"), "running", "trains; it did so while the server was away"))
        return effects

    def _leave(self, before: JobGroup | None, stay: frozenset[str]) -> Iterator[Effect]:
        for job_id in before.job_ids if before is not None else ():
            if job_id in stay:
                continue
            if job_id in self._ended:
                self._ended.discard(job_id)
                continue
            if job_id not in self._held:
                self._waiting[job_id] = None
            if job_id in self._running:
                self._running.discard(job_id)
                yield ChangeStatus(job_id, ("running",), "queued", "left its group; it goes on from its checkpoint")

    def _release(self, job_id: str) -> None:
        """It waits for a group again; what it was said to run before is over."""
        self._held.discard(job_id)
        self._running.discard(job_id)
        if not self._is_placed(job_id):
            self._waiting[job_id] = None

    def _see_steps(self, job_id: str, steps: int) -> Iterator[Effect]:
        if job_id in self._ended:  # cancelled; its worker takes steps until it hears of it
            return
        yield ShowSteps(job_id, steps)
        if job_id not in self._running and job_id not in self._held:
            self._running.add(job_id)
            yield ChangeStatus(job_id, ("queued",), "running", f"trains, {steps:,} steps done", starts=True)

    def snapshot(self, places: Devices, queue: Mapping[str, QueuePlace]) -> ClusterSnapshot:
        """`queue`: as the policy foresaw it last. In any thread: of copies."""
        running, waiting, starts = set(self._running), dict[str, str](), dict[str, float]()
        behind = len(queue) + 1  # those that the policy has not seen yet
        order = sorted(self._waiting, key=lambda job_id: queue[job_id].number if job_id in queue else behind)
        for index, job_id in enumerate(order):
            before = "it is the next" if not index else f"{index:,} {'job waits' if index == 1 else 'jobs wait'} before it"
            place = queue.get(job_id)
            why = f"; {place.reason}" if place is not None and place.reason else ""
            waiting[job_id] = f"a {NAMES[places.device][0]} that it fits on: {before}{why}"
            if place is not None and place.starts is not None:
                starts[job_id] = place.starts
        groups = [_of_living(group, set(self._ended)) for group in list(self._groups.values())]
        for group in groups:
            for job_id in group.job_ids:
                if job_id not in running:
                    waiting[job_id] = f"its group on {called(group.gpus, *NAMES[places.device])} to load the base and let it in"
        places_of = {job_id: number for number, job_id in enumerate(order, 1) if job_id in waiting}
        return ClusterSnapshot(places.device, places.gpus, tuple(groups), waiting, dict(self.reading), places_of, starts)


def _of_living(group: JobGroup, ended: set[str]) -> JobGroup:
    """Without jobs that have ended: the scheduler keeps them in the group until it changes it."""
    kept = [index for index, job_id in enumerate(group.job_ids) if job_id not in ended]
    if len(kept) == len(group.job_ids):
        return group
    jobs, weights = (tuple(values[index] for index in kept) for values in (group.job_ids, group.weights))
    return replace(group, job_ids=jobs, weights=weights)
