"""When jobs that wait will start, in which order, and why they wait: the policy itself decides, on a copy of the state whose jobs end as
predicted.

It holds as long as nothing else happens: a job that comes, one that fails, or steps that take longer than was predicted change it.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from tlora.protocol import Action, ChangeGroup, Event, GroupReady, JobFinished, JobGroup, StartGroup, StopGroup, Tick
from tlora.scheduler.draft import Draft
from tlora.scheduler.job import Job
from tlora.scheduler.plans import shared_plan
from tlora.scheduler.reservation import Reservation
from tlora.scheduler.scheduler import Policy, Scheduler
from tlora.scheduler.settings import Settings
from tlora.scheduler.state import ClusterState
from tlora.scheduler.waiting import Key, arrival
from tlora.shape.cost import CostModel
from tlora.wording.numbers import are, quantity

_GROUPS_LOOKED_AT = 8
_MOST_BOUND = 64.0  # no job is asked to bear more
_FINE = 0.1


class Reasons:
    """Of one state, as long as it does not change. Jobs that are alike are looked at once."""

    def __init__(
        self, state: ClusterState, shares: bool, names: tuple[str, str] = ("GPU", "GPUs"), kept: Reservation | None = None
    ) -> None:
        """`shares`: whether the policy lets jobs share a GPU. `names`: what a GPU is called, and several: a server may have CPUs. `kept`:
        what the policy keeps for one of those that wait.
        """
        self._state, self._shares, self._names, self._kept = state, shares, names, kept
        self._known: dict[object, str] = {}

    def of(self, job: Job) -> str:
        """Words for behind a colon; empty where there is nothing to say but that others come first."""
        spec, kept = job.spec, self._kept
        if kept is not None and kept.job is job:
            why = self._why(job)
            meanwhile = f"the {self._names[1]} on which it will soonest start are kept for it, and used by jobs that end before that"
            return f"{why}; {meanwhile}" if why else meanwhile
        key = spec.base_model, spec.gpus, spec.max_slowdown, spec.profile, job.least_room
        if key not in self._known:
            self._known[key] = self._why(job)
        return self._known[key]

    def _why(self, job: Job) -> str:
        state, asked = self._state, job.spec.gpus
        if state.pool.num_free >= asked:
            kept = self._kept
            if Draft(state).allocate_for(job, asked) is None:
                return f"it asks for {asked} {self._names[asked > 1]}, and the {state.pool.num_free} that are free do not hold it together"
            if kept is None or state.pool.num_free - len(kept.free) >= asked:
                return ""
            wanted = kept.job.spec.gpus
            for_whom = f"a job before it that asks for {wanted} {self._names[wanted > 1]}"
            return f"what is free is kept for {for_whom}, which this one would put off"
        one, several = self._names
        asks = f"it asks for {quantity(asked, one, several)}"
        free = f"{asks} and {state.pool.num_free} {are(state.pool.num_free)} free" if state.pool.num_free else f"no {one} is free"
        if not self._shares:
            return f"{free}, and the policy lets no jobs share one"
        groups = [state.groups[name] for name in state.groups_of_base[job.spec.base_model]]
        narrow = [known.group for known in groups if known.num_nodes == 1]
        if not narrow:
            return f"{free}, and none holds its base" if not groups else f"{free}"
        reasons = [self._why_not_with(job, group) for group in islice(narrow, _GROUPS_LOOKED_AT)]
        return f"{free}, and {min(reasons)[1]}"

    def _why_not_with(self, job: Job, group: JobGroup) -> tuple[float, str]:
        """The least bound with which it could join, and words."""
        members = [self._state.jobs[name] for name in group.job_ids]
        others = "the job there" if len(members) == 1 else f"the {len(members)} jobs there"
        if self._fits(group, [*members, job]):
            return job.spec.max_slowdown, f"to share one would cost {others} more than it gains, or a job before it comes first there"
        if self._fits(group, [*members, _with_bound(job, _MOST_BOUND)]):
            least = self._least_bound(job, group, members)
            share = f"to share one with {others} its steps would take up to {least:.1f} times as long as alone"
            return least, f"{share}, and its max_slowdown is {job.spec.max_slowdown:g}; with {least:.1f} or more it could"
        if self._fits(group, [_with_bound(one, _MOST_BOUND) for one in (*members, job)]):
            bound = min(one.spec.max_slowdown for one in members)
            return _MOST_BOUND, f"the max_slowdown of {others} ({bound:g}) leaves it no room to share one"
        return _MOST_BOUND, f"there is no memory left for it with {others}"

    def _least_bound(self, job: Job, group: JobGroup, members: Sequence[Job]) -> float:
        """To a tenth, upwards."""
        low, high = job.spec.max_slowdown, _MOST_BOUND
        while high - low > _FINE / 2:
            middle = (low + high) / 2
            fits = self._fits(group, [*members, _with_bound(job, middle)])
            low, high = (low, middle) if fits else (middle, high)
        return -(-high // _FINE) * _FINE

    def _fits(self, group: JobGroup, jobs: Sequence[Job]) -> bool:
        state = self._state
        room = state.rooms.on(jobs, group.gpus)
        return shared_plan(state.cost_on(group.gpus), len(group.gpus), state.pool.num_nodes(group.gpus), jobs, room_bytes=room) is not None


def _with_bound(job: Job, bound: float) -> Job:
    bounded = copy.copy(job)
    bounded.spec = replace(job.spec, max_slowdown=bound)
    bounded.need = job.spec.profile.tokens_per_step / (bound * job.alone_step_seconds)
    return bounded


MOST_STARTS = 200  # that are foreseen: those behind have no predicted start
_TICK_SECONDS = 60.0
_MOST_TICK_SECONDS = 960.0  # ticks that change nothing come at twice the time, up to this
_MOST_EVENTS = 20 * MOST_STARTS
_FIRST_ARRIVED = 100  # jobs that are looked at wherever they are in the policy's order: those that starve are among them
_LEAST_LOOKED_AT = 300  # jobs of the policy's order


class Start(NamedTuple):
    """`at` is on the cluster's clock; inf where it is not foreseen."""

    job_id: str
    at: float


def forecast(
    state: ClusterState,
    policy: Policy,
    start_seconds: float,
    order: Callable[[Job], Key] = arrival,
    is_late: Callable[[], bool] = lambda: False,
) -> list[Start]:
    """All jobs that wait, in the order in which they will start. `policy` is one made for this, as it remembers what it sees; `order` is
    the key of those that wait under it: of a long queue only the first are looked at, and the others follow in that order.

    A new group takes `start_seconds` to load its base. Costs a decision of the policy for each start; none more is made once `is_late`.
    """
    waiting = sorted((name for name in state.pending if name not in state.held), key=lambda name: order(state.jobs[name]))
    if not waiting:
        return []
    looked_at = {*waiting[: max(_LEAST_LOOKED_AT, 2 * state.pool.num_gpus)], *islice(state.pending, _FIRST_ARRIVED)}
    rolled = _Rolled(_scheduler_over(state, policy, looked_at), start_seconds, looked_at.intersection(waiting))
    rolled.run(is_late)
    late = [Start(name, math.inf) for name in waiting if name not in rolled.starts]
    return [*(Start(name, at) for name, at in rolled.starts.items()), *late]


def _scheduler_over(state: ClusterState, policy: Policy, looked_at: set[str]) -> Scheduler:
    """Over a copy, which shares what never changes, of the jobs that do not wait and of those that are looked at."""
    scheduler = Scheduler(policy, CostModel({}), lambda _: None)
    pending = {name: None for name in state.pending if name in looked_at}
    jobs = {name: copy.copy(job) for name, job in state.jobs.items() if name in pending or name not in state.pending}
    shared: Sequence[object] = [state.cost, state.kinds, *(known.group for known in state.groups.values())]
    memo: dict[int, object] = {id(one): one for one in shared}
    memo |= {id(state.jobs): jobs, id(state.pending): pending, id(state.ended_late): deque(state.ended_late)}
    scheduler.state = copy.deepcopy(state, memo)
    return scheduler


@dataclass(slots=True)
class _Rolled:
    """The copy on its way: `ready_at` of groups that load, `starts` of jobs that waited, in their order."""

    scheduler: Scheduler
    start_seconds: float
    waiting: set[str]
    starts: dict[str, float] = field(default_factory=dict[str, float])
    ready_at: dict[str, float] = field(default_factory=dict[str, float])

    def run(self, is_late: Callable[[], bool]) -> None:
        state = self.scheduler.state
        for name, known in state.groups.items():
            if not known.ready:
                self.ready_at[name] = max(state.now, known.changed_at + self.start_seconds)
        gap, tick_at = _TICK_SECONDS, state.now + _TICK_SECONDS
        for _ in range(_MOST_EVENTS):
            if not self.waiting or len(self.starts) >= MOST_STARTS or is_late():
                return
            at, event = min([self._next_end(), self._next_ready(), (tick_at, Tick())], key=lambda coming: coming[0])
            assert event is not None, "ticks always come"
            acted = self._happen(event, at)
            if not acted and not state.groups and gap >= _MOST_TICK_SECONDS:  # nothing runs, and no GPU that is there takes any
                return
            gap = _TICK_SECONDS if acted or not isinstance(event, Tick) else min(2 * gap, _MOST_TICK_SECONDS)
            tick_at = at + gap

    def _happen(self, event: Event, at: float) -> bool:
        """Whether the policy did anything about it."""
        actions = self.scheduler.handle(event, at)
        for action in actions:
            self._see(action, at)
        if isinstance(event, GroupReady):
            self.ready_at.pop(event.group_id, None)
        return bool(actions)

    def _see(self, action: Action, at: float) -> None:
        match action:
            case StartGroup(group) | ChangeGroup(group):
                starts = isinstance(action, StartGroup)
                seconds = self.start_seconds if starts else min(self.start_seconds, Settings().moves.join_seconds)
                self.ready_at[group.group_id] = at + seconds
                for name in group.job_ids:
                    if name in self.waiting:
                        self.waiting.remove(name)
                        self.starts[name] = at
            case StopGroup(group_id):
                self.ready_at.pop(group_id, None)
            case _:
                pass

    def _next_end(self) -> tuple[float, Event | None]:
        state = self.scheduler.state
        placed = [name for known in state.groups.values() for name in known.group.job_ids]
        at, name = min([(self._end_of(state.jobs[name]), name) for name in placed], default=(math.inf, ""))
        return max(at, state.now), JobFinished(name) if name else None

    def _end_of(self, job: Job) -> float:
        ready_at, steps = self.ready_at.get(job.group_id or ""), job.spec.profile.steps
        if ready_at is not None and not job.steps_reported:  # it begins when its group is ready
            return ready_at + max(0.0, steps - job.steps_before) * job.step_seconds
        return job.seen_at + max(0.0, steps - job.steps_done) * job.step_seconds

    def _next_ready(self) -> tuple[float, Event | None]:
        at, name = min([(at, name) for name, at in self.ready_at.items()], default=(math.inf, ""))
        return max(at, self.scheduler.state.now), GroupReady(name) if name else None
