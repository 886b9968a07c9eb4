"""Which job comes first, and the jobs that wait in such an order, without looking at all of them at each event.

Not here: what tenants have used (`tenants.py`), which jobs starve (`starvation.py`), and what a job gets. `Waiting` is a
cache of `ClusterState.pending`, which it follows: reading it gives the same as building it anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from heapq import heappop, heappush

from tlora.scheduler.job import Job, Lane
from tlora.scheduler.settings import Settings
from tlora.scheduler.state import ClusterState

_MOST_PRESSED = 10.0  # times as urgent as without a deadline
_OVERRUN_SHARE = 0.1  # of the time that it has run, a job that goes on beyond its steps is taken to need once more


def urgency(job: Job, now: float, settings: Settings) -> float:
    """(patience + age) / (remaining time alone * GPUs ** width_exponent), age since its submission; times remaining / slack where a
    deadline is near.

    Slack is the time until the deadline less what remains. Where it is gone the factor is 10, as it is where little is left.
    """
    remaining = max(remaining_seconds(job, now, settings), 1.0)
    own = (settings.patience_seconds + now - job.submitted_at) / (remaining * job.spec.gpus**settings.width_exponent)
    deadline = job.spec.deadline
    if deadline is None:
        return own
    slack = deadline - now - remaining
    return own * (min(max(remaining / slack, 1.0), _MOST_PRESSED) if slack > 0 else _MOST_PRESSED)


def remaining_seconds(job: Job, now: float, settings: Settings) -> float:
    """What is left of it alone. Of one that runs on beyond its declared steps, max(what they leave, 0.1 * the time that it has run).

    It then runs on by more than a start takes: what a start or a change of GPUs took is not among its steps.
    """
    planned = job.remaining_seconds(now)
    if planned > 0.0 or (job.step_seconds and job.overran_seconds(now) <= settings.moves.cold_start_seconds):
        return planned
    return max(planned, _OVERRUN_SHARE * job.ran_at(now))


def rank(job: Job, now: float, settings: Settings, levels: Mapping[str, int]) -> tuple[float, ...]:
    """The key of those that wait, the least first: priority; its tenant's level (`Tenants.levels`); urgency; residual capacity alone."""
    if settings.order == "arrival":
        return -job.spec.priority, job.number
    residual = job.spec.profile.tokens_per_step / job.alone_step_seconds - job.need
    return -job.spec.priority, levels.get(job.spec.tenant, 0), -urgency(job, now, settings), residual, job.number


Key = tuple[float, ...]
_ONE_LANE: Lane = (0, 0.0, False)

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
        self._lanes: dict[Lane, list[_Entry]] = {}
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

    def first(self, without: Collection[Lane] = ()) -> Job | None:
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
