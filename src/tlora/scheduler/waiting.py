"""Jobs that wait, in the order in which a policy wants them, without looking at all of them at each event.

A cache of `ClusterState.pending`, which it follows: reading it gives the same as building it anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from heapq import heappop, heappush

from tlora.scheduler.job import Job
from tlora.scheduler.state import ClusterState

Key = tuple[float, ...]
_ONE_LANE = (0, 0.0)

_Entry = tuple[Key, int, Job]  # between is the job's `times_unqueued` when it came: one that has left and come back is another entry


def arrival(job: Job) -> Key:
    """The highest priority first, and of equals the job submitted first."""
    return (-job.spec.priority, job.number)


class Waiting:
    """Heaps of the jobs that wait, one for each lane (`Job.lane`), by `key`, or a single one (`lanes=False`).

    A key ends with the job's number, and must not change while its job waits, except where the cost model is corrected. Rests on two
    facts about `ClusterState.pending`: a job that begins to wait is appended at its end, and one that was placed in between has another
    `times_unqueued`.
    """

    def __init__(self, key: Callable[[Job], Key], lanes: bool = True) -> None:
        self._key, self._by_gpus = key, lanes
        self._state: ClusterState | None = None
        self._times_corrected = 0
        self._forget()

    def _forget(self) -> None:
        self._lanes: dict[tuple[int, float], list[_Entry]] = {}
        self._known: dict[str, int] = {}  # job -> `times_unqueued`, of all entries
        self._taken: list[_Entry] = []

    def follow(self, state: ClusterState) -> None:
        """Take in the jobs that have begun to wait since the last time. A job that was taken and yet still waits is back."""
        if state is not self._state or state.cost.times_corrected != self._times_corrected:
            self._state, self._times_corrected = state, state.cost.times_corrected
            self._forget()
        for entry in self._taken:
            if _is_waiting(entry):
                heappush(self._lane(entry[2]), entry)
            else:
                self._drop(entry)
        self._taken.clear()
        for name in reversed(state.pending):
            job = state.jobs[name]
            if self._known.get(name) == job.times_unqueued:
                break
            self._known[name] = job.times_unqueued
            heappush(self._lane(job), (self._key(job), job.times_unqueued, job))

    def first(self, without: Collection[tuple[int, float]] = ()) -> Job | None:
        """The first in order of those whose lane is not in `without`."""
        best: _Entry | None = None
        for own, lane in self._lanes.items():
            if own in without:
                continue
            while lane and not _is_waiting(lane[0]):
                self._drop(heappop(lane))
            if lane and (best is None or lane[0][0] < best[0]):
                best = lane[0]
        return None if best is None else best[2]

    def take(self, job: Job) -> None:
        """The one that `first` gave is no longer among them."""
        entry = heappop(self._lane(job))
        assert entry[2] is job, f"{job.spec.job_id} is not the first of its lane"
        self._taken.append(entry)

    def _lane(self, job: Job) -> list[_Entry]:
        return self._lanes.setdefault(job.lane if self._by_gpus else _ONE_LANE, [])

    def _drop(self, entry: _Entry) -> None:
        name = entry[2].spec.job_id
        if self._known.get(name) == entry[1]:
            del self._known[name]


def _is_waiting(entry: _Entry) -> bool:
    _, times_unqueued, job = entry
    return job.status == "pending" and job.times_unqueued == times_unqueued
