"""Groups on GPUs of several hosts: which of them may span these, over how many GPUs their base is cut, and what their jobs ask for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

from tlora.cluster.nodes import Nodes
from tlora.job import LayoutSetting
from tlora.protocol import Event, GpusAsked, GroupKept, JobGroup, JobSubmitted, MemoryFound, NodeAdded
from tlora.scheduler.draft import has_room
from tlora.scheduler.gpu_memory import GpuMemory
from tlora.shape.cost import CostModel


class _Asked(NamedTuple):
    """What a job asks for by the GPUs that there are, other than as it was submitted."""

    order: JobSubmitted
    gpus: int
    least_gpus: int


class WideGroups:
    """`on_one_host`: of GPUs those of the host that has most of them. With `hosts_may_come` there may be more than now: `can_bring` says
    how many there can be in all where an engine brings them, and 0 where they come by themselves. `cost` has the bytes of bases.
    """

    def __init__(
        self,
        nodes: Nodes,
        on_one_host: Callable[[tuple[int, ...]], tuple[int, ...]],
        layout: LayoutSetting,
        note: Callable[[str], object],
        can_bring: Callable[[], int] = lambda: 0,
        *,
        hosts_may_come: bool,
    ) -> None:
        self._nodes, self._on_one_host, self._layout, self._note = nodes, on_one_host, layout, note
        self._can_bring, self._hosts_may_come = can_bring, hosts_may_come
        self._could_bring = 0  # when jobs were asked last
        self._orders: dict[str, _Asked] = {}  # of jobs that may ask for other GPUs as hosts come
        self._memory, self.cost = GpuMemory(), CostModel({})
        self._raised: dict[str, int] = {}  # by job: the most GPUs that it has asked for as the base fits on no fewer of those there
        self._least: dict[str, int] = {}  # by base: with fewer GPUs it does not fit, as its jobs say

    def see(self, job: JobSubmitted) -> None:
        self._least[job.base_model] = job.least_gpus

    def admit(self, job: JobSubmitted, had: int = 0) -> JobSubmitted:
        """The job as it asks for GPUs that are there as it arrives, or that an engine can bring, or that it `had` before a restart: other
        replicas of it take turns.
        """
        if not self._hosts_may_come:
            return job
        asked = self._asked(job, had)
        if self._may_change(asked):
            self._remember(asked)
        if asked.gpus < job.gpus:
            self._tell(job)
        return replace(job, gpus=asked.gpus, least_gpus=asked.least_gpus)

    def find_memory(self, told: Iterable[Event]) -> bool:
        """What there is of GPUs' memory, as the scheduler hears of it. Whether that is another than before."""
        changed = [self._memory.find(event.gpus, event.memory_bytes) for event in told if isinstance(event, MemoryFound)]
        return any(changed)

    def ask_anew(self, told: Collection[Event], open_jobs: Collection[str], groups: Iterable[JobGroup]) -> list[Event]:
        """What jobs that wait ask for, where one of the events `told` is that a host has come or that GPUs have other memory, or an engine
        can bring other GPUs than it could; those of `groups` do not wait.
        """
        is_news = self.find_memory(told) or any(isinstance(event, NodeAdded) for event in told)
        if not self._orders:
            return []
        could_bring, self._could_bring = self._could_bring, self._can_bring()
        if self._could_bring == could_bring and not is_news:
            return []
        self._orders = {name: order for name, order in self._orders.items() if name in open_jobs}
        self._raised = {name: least for name, least in self._raised.items() if name in open_jobs}
        placed = {name for group in groups for name in group.job_ids}
        known, changes = dict[tuple[object, ...], _Asked](), list[Event]()
        for name, before in self._orders.items():
            if name in placed:
                continue
            job = before.order
            kind = job.base_model, job.gpus, job.least_gpus, job.profile.adapter_parameters, job.profile.longest_sample_tokens
            if (found := known.get(kind)) is None:
                found = known[kind] = self._asked(job)
            if found[1:] != before[1:]:
                self._remember(found._replace(order=job))
                changes.append(GpusAsked(name, found.gpus, found.least_gpus if found.least_gpus != before.least_gpus else None))
                if found.gpus < job.gpus <= before.gpus:
                    self._tell(job)
        self._orders = {name: asked for name, asked in self._orders.items() if self._may_change(asked)}
        return changes

    def _remember(self, asked: _Asked) -> None:
        name = asked.order.job_id
        self._orders[name] = asked
        if asked.least_gpus > asked.order.least_gpus:
            self._raised[name] = max(asked.least_gpus, self._raised.get(name, 0))

    def _may_change(self, asked: _Asked) -> bool:
        """Whether a job may ask for others: more may come for it, or larger ones, or those that it waits for do not come."""
        job, there = asked.order, self._nodes.num_gpus
        is_other = asked.gpus < job.gpus or asked.least_gpus > job.least_gpus
        return is_other or not there or asked.gpus > max(asked.least_gpus, there)

    def _tell(self, job: JobSubmitted) -> None:
        most = max(self._nodes.num_gpus, self._can_bring())
        self._note(f"{job.job_id}: some of its {job.gpus} replicas run in turn: {most} GPUs are there as it arrives")

    def _asked(self, job: JobSubmitted, had: int = 0) -> _Asked:
        """By the memory of the GPUs that are known; a job that trained on those that it `had` fits on them."""
        least = self._memory.least_gpus(self.cost, job)
        least = max(job.least_gpus, min(least, had or least))
        return _Asked(job, self._gpus_for(replace(job, gpus=max(job.gpus, least), least_gpus=least), had), least)

    def _gpus_for(self, job: JobSubmitted, had: int = 0) -> int:
        there = self._nodes.num_gpus
        if not there:  # before the first host has come, any number may come
            return job.gpus
        most = max(there, self._can_bring(), had)
        gpus = wanted = max(job.least_gpus, min(job.gpus, most))
        if wanted <= there:  # whole hosts and a part of one, as the scheduler gives them
            sizes, widest = self._nodes.sizes, self._nodes.widest
            gpus = next((count for count in range(wanted, job.least_gpus - 1, -1) if has_room(sizes, count, widest)), wanted)
        return gpus

    def keep(self, group: JobGroup, orders: Iterable[int]) -> tuple[JobGroup, GroupKept | None]:
        """The group, on one host where none of its jobs, which order so many GPUs, nor its base needs several."""
        here, least = self._on_one_host(group.gpus), self._least_of(group)
        if len(here) == len(group.gpus) or len(here) < least or max((least, *orders)) > (widest := self._nodes.widest):
            return group, None
        why = f"a group has GPUs of one host, unless its base or a job of it needs more than the {widest} of the widest"
        return group.on(here), GroupKept(group.group_id, here, why)

    @property
    def cuts(self) -> bool:
        """Whether some base may be cut."""
        return self._layout == "stages" or bool(self._raised) or any(least > 1 for least in self._least.values())

    def _least_of(self, group: JobGroup) -> int:
        return max(self._least.get(group.base_model, 1), *[self._raised.get(name, 1) for name in group.job_ids], 1)

    def stages(self, group: JobGroup | None) -> int:
        """Over how many GPUs the base of a group is cut; 0: over none. It is where that is ordered, and where one host cannot hold it."""
        if group is None or len(group.gpus) == 1:
            return 0
        here = len(self._on_one_host(group.gpus))
        is_wide = here < len(group.gpus) and self._least_of(group) > here
        return len(group.gpus) if is_wide or self._layout == "stages" else 0
