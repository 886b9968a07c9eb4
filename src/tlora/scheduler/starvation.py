"""Jobs that have waited too long, and which of them go first now. Not here: where they run, and at whose expense.

A cache of `ClusterState`, which it follows: reading it gives the same as building it anew each time.
"""

from __future__ import annotations

import math
from bisect import insort
from heapq import heappop, heappush

from tlora.scheduler.job import RECENT_SECONDS, Job
from tlora.scheduler.settings import Settings
from tlora.scheduler.state import ClusterState


def starves_after(job: Job, settings: Settings) -> float:
    """Seconds in the queue, all stays in it together, after which the job is starving: max(least, min(factor * length, most))."""
    if settings.starvation_factor == math.inf:
        return math.inf
    length = job.spec.profile.steps * job.alone_step_seconds
    return max(settings.starvation_least_seconds, min(settings.starvation_factor * length, settings.starvation_most_seconds))


class Starvation:
    """A job that has waited too long counts as starving until it ends. `first` are those that go before all others of their priority."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._state: ClusterState | None = None
        self._times_corrected = 0
        self._changes_at = math.inf
        self._forget()

    def _forget(self) -> None:
        self._due: list[tuple[float, int, int, Job]] = []  # when a job that waits will starve; its number and `times_unqueued`
        self._known: dict[str, int] = {}  # job -> `times_unqueued`, of all that are due or late
        self._late: list[tuple[float, int, Job]] = []  # minus the priority and the number, rising
        self._numbers: set[int] = set()  # of those that are late

    def follow(self, state: ClusterState) -> None:
        """Take in the jobs that have begun to wait since the last time, and those that have waited too long by now."""
        if state is not self._state or state.cost.times_corrected != self._times_corrected:
            self._state, self._times_corrected = state, state.cost.times_corrected
            self._forget()
            for job in state.jobs.values():  # those that wait come below
                if job.status != "pending" and job.waited_seconds >= starves_after(job, self._settings):
                    self._add(job)
        for name in reversed(state.pending):
            job = state.jobs[name]
            if self._known.get(name) == job.times_unqueued:
                break
            self._known[name] = job.times_unqueued
            at = job.seen_at + starves_after(job, self._settings) - job.waited_seconds
            if at < math.inf and job.number not in self._numbers:
                heappush(self._due, (at, job.number, job.times_unqueued, job))
        while self._due and self._due[0][0] <= state.now:
            _, _, times, job = heappop(self._due)
            if job.status == "pending" and job.times_unqueued == times:
                self._add(job)
            elif self._known.get(job.spec.job_id) == times:
                del self._known[job.spec.job_id]

    @property
    def next_at(self) -> float:
        """Until when `first` gives the same, as long as nothing happens."""
        due = self._due[0][0] if self._due else math.inf
        return min(due, self._changes_at)

    def first(self, state: ClusterState) -> list[Job]:
        """Starving jobs, by priority and then as they came, as long as they together ask for no more than their share of the GPUs.

        The first of them may ask for more, as long as it and those like it that come before it have had no more than the share of the GPU
        time of about the last day. Those that come after it do not count: they cannot keep it back.
        """
        starving: list[Job] = []
        ended: list[int] = []
        room = share = self._settings.starvation_share * state.pool.num_gpus
        barred: bool | None = None  # not known yet
        self._changes_at = math.inf
        for index, (_, _, job) in enumerate(self._late):
            if job.status == "ended":
                ended.append(index)
            elif job.status != "held":
                if not starving and job.spec.gpus > share:
                    if barred is None:  # a later job is barred if this one is: more come before it
                        barred = self._is_barred(state, job, share)
                    if barred:
                        continue
                if not starving:
                    room = max(share, job.spec.gpus)
                room -= job.spec.gpus
                if room < 0:
                    break
                starving.append(job)
        for index in reversed(ended):
            _, number, job = self._late.pop(index)
            self._numbers.discard(number)
            self._known.pop(job.spec.job_id, None)
        return starving

    def _is_barred(self, state: ClusterState, job: Job, share: float) -> bool:
        """Whether it and those like it before it in order had more than the share of the last day."""
        last = -job.spec.priority, job.number
        ended = [other for other in state.ended_late if other.waited_seconds >= starves_after(other, self._settings)]
        late = [other for _, _, other in self._late if other.status != "ended" and (other.step_seconds or other.recent_gpu_seconds)] + ended
        before = [other for other in late if other.spec.gpus > share and (-other.spec.priority, other.number) <= last]
        beyond = sum([other.recent_at(state.now) for other in before]) - share * RECENT_SECONDS
        self._changes_at = state.now + abs(beyond) / state.pool.num_gpus  # it neither rises nor falls faster
        return beyond > 0

    def _add(self, job: Job) -> None:
        if job.number not in self._numbers:
            self._numbers.add(job.number)
            insort(self._late, (-job.spec.priority, job.number, job))
