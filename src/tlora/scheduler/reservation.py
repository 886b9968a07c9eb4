"""GPUs that are kept for a job which finds no room now, and until when others may use them: EASY backfill.

Lifka, The ANL/IBM SP scheduling system, JSSPP 1995: the job starts when enough of what runs has ended, as predicted. Until then those
behind it run on its GPUs if they end before that, or if it will have no need of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tlora.protocol import JobGroup
from tlora.scheduler.draft import Draft, may_lie_apart
from tlora.scheduler.job import Job
from tlora.scheduler.settings import Settings
from tlora.scheduler.state import ClusterState
from tlora.scheduler.waiting import remaining_seconds

EndOf = Callable[[JobGroup], float]
TRIED = 64  # jobs of a lane that are looked at for a place under a reservation: one that is too long says little of the next


@dataclass(slots=True)
class Reservation:
    """`free` are free GPUs of `nodes`, taken from the draft; at the time `at` all GPUs that the job needs are free. `spare` of them it
    will not need then.
    """

    job: Job
    nodes: tuple[str, ...]
    at: float
    spare: int
    free: list[int]

    def choose(self, draft: Draft, job: Job, until: float) -> tuple[int, ...] | None:
        """GPUs of one node for `job`, which runs on them `until` then, if that does not put off the job that they are kept for."""
        count = job.spec.gpus
        delays = until > self.at
        if delays and count > self.spare:
            return None
        for node in self.nodes:
            there = [gpu for gpu in self.free if draft.state.pool.node_of[gpu] == node and draft.state.memory.has_room(gpu, job.least_room)]
            if len(there) >= count:
                chosen = tuple(there[:count])
                self.free = [gpu for gpu in self.free if gpu not in chosen]
                self.spare -= count if delays else 0
                draft.give_back(chosen)
                draft.take(chosen)
                return chosen
        return None


def reserve(draft: Draft, job: Job, end_of: EndOf) -> Reservation | None:
    """For a job that finds no room: on the nodes on which it will soonest, whose free GPUs are taken. None where it never will."""
    soonest = _soonest(draft, job, end_of)
    if soonest is None:
        return None
    at, spare, nodes = soonest
    free = [gpu for node in nodes for gpu in draft.free_of(node)]
    draft.take(free)
    return Reservation(job, nodes, at, spare, free)


def end_of(state: ClusterState, settings: Settings, group: JobGroup) -> float:
    """When its GPUs come free, as predicted: once the last of its members has ended."""
    known = state.groups.get(group.group_id)
    loads = known is None or not known.ready
    begun = state.now if known is None else known.changed_at
    starts = max(state.now, begun + settings.moves.cold_start_seconds) if loads else state.now
    return max([starts + _left(state, settings, state.jobs[name]) for name in group.job_ids], default=state.now)


def end_alone(state: ClusterState, settings: Settings, job: Job) -> float:
    """When it will have ended that starts now, by itself on as many GPUs as it asks for."""
    return state.now + settings.moves.cold_start_seconds + remaining_seconds(job, state.now, settings)


def _left(state: ClusterState, settings: Settings, job: Job) -> float:
    slowdown = job.step_seconds / job.alone_step_seconds if job.step_seconds else 1.0
    return remaining_seconds(job, state.now, settings) * slowdown


def _soonest(draft: Draft, job: Job, end_of: EndOf) -> tuple[float, int, tuple[str, ...]] | None:
    """When, how many GPUs it then leaves, and on which nodes."""
    count, size, state = job.spec.gpus, draft.state.pool.node_size, draft.state
    coming = {name: _coming(draft, name, job, end_of) for name in state.pool.lasting_nodes}
    if count <= size:
        time_by_node = {name: times[count - 1] for name, times in coming.items() if len(times) >= count}
        if time_by_node:
            node = min(time_by_node, key=lambda name: (time_by_node[name], name))
            return time_by_node[node], sum(at <= time_by_node[node] for at in coming[node]) - count, (node,)
    if not size or job.spec.on_one_host or (count <= size and not job.least_room):
        return None
    if may_lie_apart(state.pool, job):
        every = sorted((at, name) for name, times in coming.items() for at in times)[:count]
        return None if len(every) < count else (every[-1][0], 0, tuple(dict.fromkeys(name for _, name in every)))
    whole, rest = divmod(count, size)
    by_time = sorted((times[-1], name) for name, times in coming.items() if len(times) == size)[:whole]
    if len(by_time) < whole:
        return None
    nodes = [name for _, name in by_time]
    at = by_time[-1][0]
    if rest:
        others = [(times[rest - 1], name) for name, times in coming.items() if name not in nodes and len(times) >= rest]
        if not others:
            return None
        last = min(others)
        at, nodes = max(at, last[0]), [*nodes, last[1]]
    return at, 0, tuple(nodes)


def _coming(draft: Draft, node: str, job: Job, end_of: EndOf) -> list[float]:
    """When each GPU of the node that has room for the job comes free, rising."""
    state = draft.state
    ends = {gpu: end for group in _groups_on(draft, node) for end in (end_of(group),) for gpu in group.gpus}
    free = set(draft.free_of(node))
    roomy = [gpu for gpu in state.pool.nodes[node].gpus if state.memory.has_room(gpu, job.least_room)]
    return sorted(state.now if gpu in free else ends.get(gpu, math.inf) for gpu in roomy)


def _groups_on(draft: Draft, node: str) -> Iterator[JobGroup]:
    """As they shall be."""
    state = draft.state
    for name in state.pool.groups_on(node):
        if name not in draft.changed:
            yield state.groups[name].group
    for group in draft.changed.values():
        if group.job_ids and any(state.pool.node_of[gpu] == node for gpu in group.gpus):
            yield group
