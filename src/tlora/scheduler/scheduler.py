"""Folds events into the state, asks the policy where we want to be, and answers with the actions that close the gap.

The same scheduler runs a real cluster and a simulated one: `now` is an argument. Events may come late, twice and out of order; what
speaks of a job or group that is not there is ignored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from tlora.protocol import (
    Action,
    BaseAdded,
    BaseMeasured,
    ChangeGroup,
    Event,
    GpusAsked,
    GpusLost,
    GpusUnheard,
    GroupFound,
    GroupKept,
    GroupLost,
    GroupReady,
    JobDelayed,
    JobFailed,
    JobFinished,
    JobGroup,
    JobRequest,
    JobSubmitted,
    KindsFound,
    MemoryFound,
    NodeAdded,
    NodeDraining,
    RejectJob,
    StartGroup,
    StepsDone,
    StopGroup,
    Tick,
)
from tlora.scheduler.admission import MOST_COUNTED, lack_of, park, those_without_room, unpark, why_never, why_unsound
from tlora.scheduler.sound_groups import why_impossible
from tlora.scheduler.state import ClusterState
from tlora.scheduler.tenants import Tenants
from tlora.shape.cost import CostModel

_MOST_DECISIONS = 16  # at one event

Policy = Callable[[ClusterState], list[JobGroup]]
"""Where we want to be: the groups that change, those without jobs being ones that end. Changes nothing itself."""


class Scheduler:
    """One cluster's. `seen` are the jobs that were ever submitted: an order that comes twice is one.

    What it believes of costs is a copy of `cost`, which reports of steps correct.
    """

    def __init__(
        self,
        policy: Policy,
        cost: CostModel,
        on_fault: Callable[[str], object] | None = None,
        tenants: Tenants | None = None,
        on_wait: Callable[[str, str], object] | None = None,
    ) -> None:
        """`on_fault` is called with the reason why a decision was left out, if the policy raised or wants what cannot be. All else that an
        event brings has been done then, and the next event asks again. Without `on_fault`, such a policy raises. `tenants` has what they
        used before. With `on_wait` hosts may come: jobs that cannot run on what is there wait for them, and it is called with the name of
        each, and why, once. Without, they are rejected.
        """
        self._on_fault = on_fault
        may_come = on_wait is not None
        self.state, self._policy = ClusterState(copy.deepcopy(cost), tenants=tenants or Tenants(), hosts_may_come=may_come), policy
        self._seen: set[str] = set()
        self._on_wait, self._told_to_wait = on_wait, set[str]()

    def handle(self, event: Event, now: float) -> list[Action]:
        """What is to be done now that `event` has happened. Time does not go back: an earlier `now` counts as the latest."""
        state = self.state
        if now > state.now:
            state.now = now
        actions, decide = self._fold(event)
        if decide:
            if state.emptied:
                actions += self._end_empty_groups()
            actions += (
                self._decide_for_all_who_wait()
                if isinstance(event, Tick | BaseMeasured | NodeAdded | MemoryFound | KindsFound)
                else self._decide()
            )
        return actions

    def _decide_for_all_who_wait(self) -> list[Action]:
        """Decide again as long as a waiting job gets a place in a group that others may want to join too: no group changes twice in one
        decision, and until the next event all of them would wait. Where jobs come or end there is one decision for each.
        """
        actions: list[Action] = []
        for _ in range(_MOST_DECISIONS):
            waiting = len(self.state.pending)
            decided = self._decide()
            actions += decided
            if not 0 < len(self.state.pending) < waiting or not any(isinstance(action, ChangeGroup) for action in decided):
                break
        return actions

    def _decide(self) -> list[Action]:
        state = self.state
        self._judge_those_that_wait_anew()
        try:
            wanted = self._policy(state)
            if wanted and (reason := why_impossible(state, wanted)) is not None:
                raise ValueError(f"the policy wants what cannot be: {reason}")
        except Exception as error:  # a policy may be a user's code
            if self._on_fault is None:
                raise
            self._on_fault(f"{type(error).__name__}: {error}")
            return []
        state.newly_measured.clear()
        return reconcile(state, wanted) if wanted else []

    def _fold(self, event: Event) -> tuple[list[Action], bool]:
        """What follows at once, and whether there is something to decide."""
        state = self.state
        match event:
            case StepsDone():
                if event.job_id in state.jobs:
                    state.see_steps(event)
                return [], False
            case JobSubmitted():
                return self._submit(event)
            case GpusAsked():
                self._ask_for(event)
                return [], False  # others may follow; a back end sends a `NodeAdded` or a Tick after the last
            case JobRequest(verb="hold"):
                return self._hold(event.job_id)
            case JobRequest(verb="release"):
                return self._release(event.job_id)
            case JobFinished() | JobFailed() | JobRequest():  # whose last verb is cancel
                known = event.job_id in state.jobs
                if known:
                    state.end_job(event.job_id)
                return [], known
            case GroupReady():
                if event.group_id in state.groups:
                    state.make_ready(event.group_id)
                return [], False
            case BaseAdded() | JobDelayed():
                return [], False
            case GpusUnheard(gpus, why):
                state.pool.set_unheard(gpus, yes=bool(why))
                return [], not why
            case BaseMeasured(base, device, speed):
                state.measure(base, device, speed)
                return [], True
            case Tick():
                return [], True
            case GroupFound():
                return self._adopt(event), False  # others may follow; a back end sends a Tick after the last
            case GroupLost():
                known = event.group_id in state.groups
                if known:
                    state.end_group(event.group_id)
                return self._reject_too_large(), known
            case GroupKept(group_id, gpus):
                known = state.groups.get(group_id)
                fewer = known is not None and set(gpus) < set(known.group.gpus)
                return reconcile(state, [known.group.on(gpus)]) if known is not None and fewer else [], fewer
            case NodeAdded():
                return self._add_node(event), True
            case MemoryFound(gpus, memory_bytes):
                changed = state.find_memory(gpus, memory_bytes)
                has_come = self._has_come(gpus)
                if changed:
                    self._judge_all(now=has_come)
                return self._reject_too_large() if changed else [], changed and has_come
            case KindsFound(gpus, kinds, speeds):
                return [], state.find_kinds(gpus, kinds, speeds) and self._has_come(gpus)
            case NodeDraining() | GpusLost():
                return self._take_out(event), True

    def _take_out(self, event: NodeDraining | GpusLost) -> list[Action]:
        """GPUs that are lost, or are to be left; of those that are lost nothing is waited to be heard."""
        if isinstance(event, GpusLost):
            self.state.pool.unheard.difference_update(event.gpus)
            ended = self.state.lose_gpus(event.gpus)
        else:
            ended = self.state.drain_node(event.node, finish=event.finish)
        self._ask_those_that_wait()
        self._judge_all()
        return [StopGroup(group_id) for group_id in ended]

    def _has_come(self, gpus: Iterable[int]) -> bool:
        """Or the host that has the GPUs is about to come: then it is decided."""
        return any(gpu in self.state.pool.node_of for gpu in gpus)

    def _add_node(self, event: NodeAdded) -> list[Action]:
        """Jobs that came before the first, or while some were away, are judged by those that are there now."""
        pool = self.state.pool
        most, may_lack = pool.most_gpus, not pool.most_gpus or pool.num_gpus != pool.most_gpus
        self.state.add_node(event.node, event.rack, event.gpus)
        self._judge_all(pending=may_lack)
        if self.state.hosts_may_come or not may_lack or not most or pool.most_gpus > most:  # or the cluster is not known as a whole
            return []
        without_room, jobs = those_without_room(self.state, self.state.pending), self.state.jobs
        return self._reject([name for name in without_room if lack_of(self.state, jobs[name].spec) is not None])

    def _judge_all(self, *, pending: bool = True, now: bool = True) -> None:
        """Where hosts may come, of jobs that wait, since other GPUs are there: which go aside, which no more, and what the others lack. Not
        `pending`: these found room before. `now`: as `those_without_room`.
        """
        state = self.state
        if not state.hosts_may_come:
            return
        unpark(state, *state.parked)
        park(state, *those_without_room(state, state.pending, now=now) if pending else ())
        self._say_that_they_wait(*state.parked if now else ())

    def _submit(self, spec: JobSubmitted, *, trains: bool = False) -> tuple[list[Action], bool]:
        """One that `trains` already fits on what is there."""
        if spec.job_id in self._seen:
            return [], False
        self._seen.add(spec.job_id)
        reason = why_unsound(self.state.cost, spec) if trains else why_never(self.state, spec)
        if reason is not None:
            return [RejectJob(spec.job_id, reason)], False
        self.state.submit(spec)
        return [], True

    def _ask_for(self, event: GpusAsked) -> None:
        """Of a job that trains: when it waits again. Whether GPUs are there for one that waits is for the next decision: their host may be
        about to come.
        """
        job_id = event.job_id
        job = self.state.jobs.get(job_id)
        if job is None or event.gpus > MOST_COUNTED:
            return
        if job.group_id is not None:
            self.state.asked_later[job_id] = event
            return
        self.state.asked_later.pop(job_id, None)
        if self.state.ask_for(event) and job_id in self.state.parked:
            unpark(self.state, job_id)

    def _ask_those_that_wait(self) -> None:
        """Jobs that asked for other GPUs while they trained, and have lost or left their group since."""
        for name in list(self.state.waiting_anew) if self.state.asked_later else ():
            if name in self.state.pending and (asked := self.state.asked_later.pop(name, None)) is not None:
                self._ask_for(asked)

    def _judge_those_that_wait_anew(self) -> None:
        """Jobs that have been submitted, released or stopped since the last decision, or ask for other GPUs."""
        state = self.state
        self._ask_those_that_wait()
        names, state.waiting_anew = dict.fromkeys(state.waiting_anew), []
        if names and state.hosts_may_come:
            park(state, *those_without_room(state, [name for name in names if name in state.pending]))
            self._say_that_they_wait(*[name for name in names if name in state.parked])

    def _release(self, job_id: str) -> tuple[list[Action], bool]:
        """Whether it was held, by a user. The hosts may be others by now."""
        if job_id not in self.state.held or job_id in self.state.parked:
            return [], False
        self.state.release(job_id)
        never = not self.state.hosts_may_come and lack_of(self.state, self.state.jobs[job_id].spec) is not None
        return self._reject([job_id] if never else []), True

    def _say_that_they_wait(self, *parked: str) -> None:
        """Once of each."""
        for name in parked:
            if self._on_wait is not None and name not in self._told_to_wait:
                self._told_to_wait.add(name)
                self._on_wait(name, self.state.parked[name].reason)

    def _reject_too_large(self) -> list[Action]:
        """Jobs that wait and for which no GPU has room any more, since less of it was found than was known when they came. Where hosts may
        come they wait aside.
        """
        state = self.state
        return self._reject([name for name in state.pending if state.jobs[name].least_room == math.inf and not state.hosts_may_come])

    def _reject(self, names: list[str]) -> list[Action]:
        """Jobs that wait and can never run."""
        actions = list[Action]()
        for name in names:
            actions.append(RejectJob(name, why_never(self.state, self.state.jobs[name].spec) or "no GPU has room for it"))
            self.state.end_job(name)
        return actions

    def _adopt(self, found: GroupFound) -> list[Action]:
        """Its jobs are submitted, and placed as they are. Where that cannot be, the group is stopped and its jobs wait."""
        actions: list[Action] = []
        for spec in found.jobs:
            actions += self._submit(spec, trains=True)[0]
        state, group = self.state, found.group
        for name in group.job_ids:
            if name not in state.pending:
                group = group.without(name)
        silent = state.pool.unheard.intersection(group.gpus)
        state.pool.set_unheard(silent, yes=False)  # it has these already, and keeps them as any other
        stays = bool(group.job_ids) and group.group_id not in state.groups and why_impossible(state, [group]) is None
        if stays:
            state.place(group)
            state.make_ready(group.group_id)
        state.pool.set_unheard(silent, yes=True)
        if not stays:
            return [*actions, StopGroup(found.group.group_id)]
        return actions if group == found.group else [*actions, ChangeGroup(group)]

    def _hold(self, job_id: str) -> tuple[list[Action], bool]:
        """Take the job out of its group without asking the policy: the back end must never be left to guess."""
        state = self.state
        job = state.jobs.get(job_id)
        if job is None or job_id in state.held:
            state.parked.pop(job_id, None)  # hosts that come do not release it
            return [], False
        actions: list[Action] = []
        if job.group_id is not None:
            actions = reconcile(state, [state.groups[job.group_id].group.without(job_id)])
        state.hold(job_id)
        return actions, True

    def _end_empty_groups(self) -> list[Action]:
        empty = [name for name in self.state.emptied if name in self.state.groups and not self.state.groups[name].group.job_ids]
        self.state.emptied.clear()
        for group_id in empty:
            self.state.end_group(group_id)
        return [StopGroup(group_id) for group_id in empty]


def reconcile(state: ClusterState, wanted: list[JobGroup]) -> list[Action]:
    """Enters `wanted` into the state and gives the actions that lead there: those that free GPUs or jobs come before those that take them.

    A group that is already as wanted gives none, so that asking twice is asking once.
    """
    ending: list[JobGroup] = []
    changing: list[JobGroup] = []
    opening: list[JobGroup] = []
    for group in wanted:
        known = state.groups.get(group.group_id)
        if known is None:
            if group.job_ids:
                opening.append(group)
        elif not group.job_ids:
            ending.append(group)
        elif group != known.group:
            changing.append(group)
    actions: list[Action] = []
    for group in ending:
        state.place(group)
        actions.append(StopGroup(group.group_id))
    for group in changing:
        smaller = _what_stays(state.groups[group.group_id].group, group)
        if smaller is not None and smaller != group:
            state.place(smaller)
            actions.append(ChangeGroup(smaller))
    # Groups that take a job or a GPU from one that only gives them up come after it.
    for group in sorted(changing, key=lambda group: _gains(state.groups[group.group_id].group, group)):
        state.place(group)
        actions.append(ChangeGroup(group))
    for group in opening:
        state.place(group)
        actions.append(StartGroup(group))
    return actions


def _what_stays(now: JobGroup, wanted: JobGroup) -> JobGroup | None:
    """`now` without the members and GPUs that `wanted` lacks, where it has to give up some before it can gain others.

    A group of which nothing would stay keeps what it has: it cannot run on no GPU or without a job.
    """
    weight_of = dict(zip(now.job_ids, now.weights, strict=True))
    jobs = tuple(name for name in now.job_ids if name in wanted.job_ids)
    gpus = tuple(gpu for gpu in now.gpus if gpu in wanted.gpus)
    if len(jobs) == len(now.job_ids) and len(gpus) == len(now.gpus):
        return None
    if not jobs or not gpus:
        return None
    return replace(wanted.on(gpus), job_ids=jobs, weights=tuple(weight_of[name] for name in jobs))


def _gains(now: JobGroup, wanted: JobGroup) -> bool:
    return bool(set(wanted.job_ids) - set(now.job_ids) or set(wanted.gpus) - set(now.gpus))
