"""Policies that give each job its own GPUs, as many as it asks for: the well-known baselines. None shares a base.

All order by priority first, place by `Draft.allocate` and run a job under `exclusive_plan`; no job gets GPUs ahead of time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from tlora.protocol import JobGroup
from tlora.scheduler.draft import Draft, finds_room
from tlora.scheduler.job import Job, Lane
from tlora.scheduler.plans import exclusive_plan
from tlora.scheduler.reservation import TRIED, Reservation, end_alone, end_of, reserve
from tlora.scheduler.scheduler import Policy
from tlora.scheduler.settings import Settings
from tlora.scheduler.state import ClusterState
from tlora.scheduler.waiting import Key, Waiting, arrival

LAS_LIMITS = (3250.0, 18000.0)
"""GPU-seconds at which a job sinks a queue: Tiresias' simulator (SymbioticLab/Tiresias, jobs.py) has 3,250, and 18,000 as its last."""

_Rank = tuple[float, float]  # minus the priority, and the policy's own measure: the job of the greater rank gives way


def fifo() -> Policy:
    """Strict first in, first out: the job that came first starts first, and those behind it wait for it."""
    waiting = Waiting(arrival, lanes=False)

    def decide(state: ClusterState) -> list[JobGroup]:
        if not state.pool.num_free or not state.pending:
            return []
        waiting.follow(state)
        draft = Draft(state)
        while (job := waiting.first()) is not None and start_alone(draft, job):
            waiting.take(job)
        return draft.wanted()

    return decide


def backfill() -> Policy:
    """First in, first out, but any job that fits starts, also before an earlier one that does not fit, however long that one then waits."""
    return _each_that_fits(arrival)


def easy(settings: Settings = Settings()) -> Policy:  # noqa: B008 (it is frozen)
    """Backfill under a reservation: the first that does not fit gets the GPUs on which it soonest will, and those behind it use them only
    as long as their predicted ends do not put it off.
    """
    waiting = Waiting(arrival)

    def decide(state: ClusterState) -> list[JobGroup]:
        if not state.pool.num_free or not state.pending:
            return []
        waiting.follow(state)
        draft, kept = Draft(state), None
        failures: dict[Lane, int] = {}
        hopeless: set[Lane] = set()
        while (job := waiting.first(hopeless)) is not None:
            waiting.take(job)
            if start_alone(draft, job) or (kept is not None and _start_under(draft, kept, job, settings)):
                continue
            kept = kept or reserve(draft, job, partial(end_of, state, settings))
            failures[job.lane] = failures.get(job.lane, 0) + 1
            if failures[job.lane] >= TRIED:
                hopeless.add(job.lane)
        return draft.wanted()

    return decide


def _start_under(draft: Draft, kept: Reservation, job: Job, settings: Settings) -> bool:
    gpus = kept.choose(draft, job, end_alone(draft.state, settings, job))
    if gpus is None:
        return False
    draft.open([job], gpus, exclusive_plan(draft.state.cost, job, len(gpus), draft.state.rooms.on([job], gpus)))
    return True


def sjf() -> Policy:
    """The job of the least remaining time that fits starts; none is stopped. Knows each job's time, as an oracle would."""
    return _each_that_fits(shortest)


def shortest(job: Job) -> Key:
    """The key of a job that waits under `sjf` and `srtf`."""
    return -job.spec.priority, job.remaining_seconds(job.seen_at), job.number


def srtf() -> Policy:
    """Shortest remaining time first: as `sjf`, and jobs that have longer to go give way."""
    return _preemptive(lambda job, now: (-job.spec.priority, job.remaining_seconds(now)))


def las(limits: tuple[float, ...] = LAS_LIMITS) -> Policy:
    """Tiresias' discretized two-dimensional LAS: queues by GPU-seconds attained, first in, first out in each; lower queues give way.

    `limits` ascend and part the queues. Gu et al., Tiresias, NSDI 2019, section 3.2, without promoting starving jobs (PROMOTEKNOB
    there). A running job sinks when the next event or tick looks at it.
    """
    return _preemptive(lambda job, now: (-job.spec.priority, float(bisect_right(limits, job.service_at(now)))))


def least_attained(job: Job) -> Key:
    """The key of a job that waits under `las`."""
    return -job.spec.priority, float(bisect_right(LAS_LIMITS, job.service_gpu_seconds)), job.number


def start_alone(draft: Draft, job: Job) -> bool:
    """Open a group of `job` on as many GPUs as it asks for, if there are."""
    gpus = draft.allocate_for(job, job.spec.gpus)
    if gpus is None:
        return False
    draft.open([job], gpus, exclusive_plan(draft.state.cost, job, len(gpus), draft.state.rooms.on([job], gpus)))
    return True


def _each_that_fits(key: Callable[[Job], Key]) -> Policy:
    waiting = Waiting(key)

    def decide(state: ClusterState) -> list[JobGroup]:
        if not state.pool.num_free or not state.pending:
            return []
        waiting.follow(state)
        draft = Draft(state)
        too_many: set[Lane] = set()  # GPUs only get fewer within a decision, so that those behind do not fit either
        while (job := waiting.first(too_many)) is not None:
            if start_alone(draft, job):
                waiting.take(job)
            else:
                too_many.add(job.lane)
        return draft.wanted()

    return decide


def _preemptive(rank: Callable[[Job, float], _Rank]) -> Policy:
    """A waiting job takes the GPUs of jobs of a greater rank, the greatest first; of equal ranks the running job continues.

    The rank of a waiting job does not change with time. A preempted job waits again in the same decision.
    """
    waiting = Waiting(lambda job: (*rank(job, job.seen_at), job.number))

    def decide(state: ClusterState) -> list[JobGroup]:
        if not state.pending:
            return []
        waiting.follow(state)
        draft = Draft(state)
        running: list[_Running] | None = None
        stopped: list[Job] = []
        too_many: set[Lane] = set()
        while True:
            candidates = [job for job in stopped if job.lane not in too_many]
            first = waiting.first(too_many)
            if first is not None:
                candidates.append(first)
            if not candidates:
                return draft.wanted()
            job = min(candidates, key=lambda job: (rank(job, state.now), job.number))
            if not start_alone(draft, job):
                if running is None:
                    running = _running(state, rank)
                victims = _who_gives_way(draft, job, _behind(running, rank(job, state.now)))
                if victims is None:
                    too_many.add(job.lane)  # a later job in the order finds fewer that give way
                    continue
                for group in victims:
                    stopped += draft.members(group.group_id)
                    draft.stop(group.group_id)
                running = [other for other in running if other.group not in victims]
                started = start_alone(draft, job)
                assert started, f"{job.spec.job_id} has no room on the GPUs of {len(victims)} groups that gave way"
            if job is first:
                waiting.take(job)
            else:
                stopped = [other for other in stopped if other is not job]

    return decide


class _Running(NamedTuple):
    """A group that runs and the least rank of its members, of which one taken over from another policy may have several: none of them
    gives way to a job that it goes before. `number` is of the member's submission.
    """

    rank: _Rank
    number: int
    group: JobGroup


def _running(state: ClusterState, rank: Callable[[Job, float], _Rank]) -> list[_Running]:
    """The groups, the greatest rank first."""
    groups = [known.group for known in state.groups.values()]
    ranked = [(min([(rank(job, state.now), job.number) for job in map(state.jobs.__getitem__, group.job_ids)]), group) for group in groups]
    return sorted([_Running(*least, group) for least, group in ranked], key=lambda running: running[:2], reverse=True)


def _behind(running: Iterable[_Running], rank: _Rank) -> Iterable[JobGroup]:
    """The groups of which each member is of a greater rank."""
    return [other.group for other in takewhile(lambda other: other.rank > rank, running)]


def _who_gives_way(draft: Draft, job: Job, others: Iterable[JobGroup]) -> list[JobGroup] | None:
    """The first of `others` whose GPUs, with the free ones, make room for `job`, without any that are not needed; None if none do."""
    state, least = draft.state, job.least_room
    free = {name: len(draft.free_for(name, least)) for name in state.pool.nodes}
    chosen: list[JobGroup] = []
    for other in others:
        chosen.append(other)
        _add(free, state, other, 1, least)
        if finds_room(state.pool, job, free.values()):
            break
    else:
        return None
    needed = [chosen[-1]]
    for other in chosen[-2::-1]:
        _add(free, state, other, -1, least)
        if not finds_room(state.pool, job, free.values()):
            _add(free, state, other, 1, least)
            needed.append(other)
    return needed


def _add(free: dict[str, int], state: ClusterState, group: JobGroup, sign: int, least_room: float) -> None:
    """Those of its GPUs that have so much room and are not to be left."""
    for gpu in group.gpus:
        if state.memory.has_room(gpu, least_room) and not state.pool.is_left(gpu):
            free[state.pool.node_of[gpu]] += sign
