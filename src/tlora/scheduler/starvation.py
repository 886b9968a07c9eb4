"""Jobs that have waited too long, and which of them go first now. Not here: where they run, and at whose expense.

A cache of `ClusterState`, which it follows. It also remembers the GPU time that starving jobs had beyond their share; one made anew
starts without that debt.
"""

from __future__ import annotations

import math
from bisect import insort
from heapq import heappop, heappush

from tlora.scheduler.settings import Settings
from tlora.scheduler.state import ClusterState, Job


def starves_after(job: Job, settings: Settings) -> float:
    """Seconds in the queue, all stays in it together, after which the job is starving: max(least, min(factor * length, most))."""
    if settings.starvation_factor == math.inf:
        return math.inf
    length = job.spec.profile.steps * job.alone_step_seconds
    return max(settings.starvation_least_seconds, min(settings.starvation_factor * length, settings.starvation_most_seconds))


class Starvation:
    """Who has waited too long stays so until it ends. `first` are those of them that go before all others of their priority."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._state: ClusterState | None = None
        self._times_corrected = 0
        self._first: list[Job] = []
        self._owed = 0.0  # GPU-seconds that those who went first had beyond their share
        self._owing = 0.0  # what that grew by in a second, when it was last counted
        self._counted_at = 0.0
        self._forget()

    def _forget(self) -> None:
        self._due: list[tuple[float, int, int, Job]] = []  # when a job that waits will starve; its number and `times_unqueued`
        self._known: dict[str, int] = {}  # job -> `times_unqueued`, of all that are due or late
        self._late: list[tuple[float, int, Job]] = []  # minus the priority and the number, rising
        self._numbers: set[int] = set()  # of those that are late

    def follow(self, state: ClusterState) -> None:
        """Take in who has begun to wait since the last time, and who has waited too long by now."""
        if state is self._state:
            self._count(state)
        if state is not self._state or state.cost.times_corrected != self._times_corrected:
            if state is not self._state:
                self._first, self._owed, self._counted_at = [], 0.0, state.now
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
        return min(due, self._counted_at - self._owed / self._owing) if self._owed and self._owing < 0 else due

    def first(self, state: ClusterState) -> list[Job]:
        """Those who starve, by priority and then as they came, as long as they together ask for no more than their share of the GPUs.

        The first of them may ask for more. While GPU time is owed for that, no other job becomes one of them.
        """
        found: list[Job] = []
        known = {job.number for job in self._first}
        ended: list[int] = []
        room = 0.0
        for index, (_, _, job) in enumerate(self._late):
            if job.status == "ended":
                ended.append(index)
            elif job.status != "held" and (not self._owed or job.number in known):
                if not found:
                    room = max(self._settings.starvation_share * state.num_gpus, job.spec.gpus)
                room -= job.spec.gpus
                if room < 0:
                    break
                found.append(job)
        for index in reversed(ended):
            _, number, job = self._late.pop(index)
            self._numbers.discard(number)
            self._known.pop(job.spec.job_id, None)
        self._first = found
        return found

    def _count(self, state: ClusterState) -> None:
        """Add what the first have had since the last time, up to what they asked for, and take off the share. Never more than is made
        up for in `starvation_most_seconds`."""
        seconds, self._counted_at = state.now - self._counted_at, state.now
        share = self._settings.starvation_share * state.num_gpus
        self._owing = sum([min(job.gpu_share, job.spec.gpus) for job in self._first]) - share
        self._owed = min(max(0.0, self._owed + self._owing * seconds), share * self._settings.starvation_most_seconds)

    def _add(self, job: Job) -> None:
        if job.number not in self._numbers:
            self._numbers.add(job.number)
            insort(self._late, (-job.spec.priority, job.number, job))
