"""Why a job that waits does not run now, in words, and the setting that would let it. Decides nothing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from tlora.protocol import JobGroup
from tlora.scheduler.job import Job
from tlora.scheduler.plans import shared_plan
from tlora.scheduler.reservation import Reservation
from tlora.scheduler.state import ClusterState

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
        if state.num_free >= asked:
            kept = self._kept
            if kept is None or state.num_free - len(kept.free) >= asked:
                return ""
            wanted = kept.job.spec.gpus
            for_whom = f"a job before it that asks for {wanted} {self._names[wanted > 1]}"
            return f"what is free is kept for {for_whom}, which this one would put off"
        verb = "is" if state.num_free == 1 else "are"
        one, several = self._names
        free = f"no {one} is free" if not state.num_free else f"it asks for {asked} {several} and {state.num_free} {verb} free"
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
        room = state.memory.of(group.gpus)
        return shared_plan(state.cost, len(group.gpus), state.num_nodes(group.gpus), jobs, room_bytes=room) is not None


def _with_bound(job: Job, bound: float) -> Job:
    bounded = copy.copy(job)
    bounded.spec = replace(job.spec, max_slowdown=bound)
    bounded.need = job.spec.profile.tokens_per_step / (bound * job.alone_step_seconds)
    return bounded
