"""Groups on GPUs of several hosts: which of them may span these, over how many GPUs their base is cut, and what their jobs ask for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from tlora.cluster.nodes import Nodes
from tlora.job import LayoutSetting
from tlora.protocol import Event, GpusAsked, GroupKept, JobGroup, JobSubmitted, NodeAdded
from tlora.scheduler.draft import has_room


class WideGroups:
    """`on_one_host`: of GPUs those of the host that has most of them. With `hosts_may_come` there may be more than now: `can_bring` says
    how many there can be in all where an engine brings them, and 0 where they come by themselves.
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
        self._orders: dict[str, tuple[JobSubmitted, int]] = {}  # jobs that may ask for other GPUs as hosts come, and for how many they do
        self._least: dict[str, int] = {}  # by base: with fewer GPUs it does not fit, as its jobs say

    def see(self, job: JobSubmitted) -> None:
        self._least[job.base_model] = job.least_gpus

    def admit(self, job: JobSubmitted, had: int = 0) -> JobSubmitted:
        """The job as it asks for GPUs that are there as it arrives, or that an engine can bring, or that it `had` before a restart: other
        replicas of it take turns.
        """
        if not self._hosts_may_come:
            return job
        gpus = self._gpus_for(job, had)
        if self._may_change(job, gpus):
            self._orders[job.job_id] = job, gpus
        if gpus < job.gpus:
            self._tell(job)
        return replace(job, gpus=gpus)

    def ask_anew(self, told: Iterable[Event], open_jobs: Collection[str], groups: Iterable[JobGroup]) -> list[Event]:
        """What jobs that wait ask for, where one of the events `told` is that a host has come, or an engine can bring other GPUs than it
        could; those of `groups` do not wait.
        """
        if not self._orders:
            return []
        could_bring, self._could_bring = self._could_bring, self._can_bring()
        if self._could_bring == could_bring and not any(isinstance(event, NodeAdded) for event in told):
            return []
        self._orders = {name: order for name, order in self._orders.items() if name in open_jobs}
        placed = {name for group in groups for name in group.job_ids}
        known, asked = dict[tuple[int, int], int](), list[Event]()
        for name, (job, before) in self._orders.items():
            if name in placed:
                continue
            kind = job.gpus, job.least_gpus
            if (gpus := known.get(kind)) is None:
                gpus = known[kind] = self._gpus_for(job)
            if gpus != before:
                self._orders[name] = job, gpus
                asked.append(GpusAsked(name, gpus))
                if before == job.gpus:
                    self._tell(job)
        self._orders = {name: (job, gpus) for name, (job, gpus) in self._orders.items() if self._may_change(job, gpus)}
        return asked

    def _may_change(self, job: JobSubmitted, gpus: int) -> bool:
        """Whether a job that asks for `gpus` may ask for others: more may come for it, or those that it waits for do not come."""
        return gpus < job.gpus or gpus > max(job.least_gpus, self._nodes.num_gpus)

    def _tell(self, job: JobSubmitted) -> None:
        most = max(self._nodes.num_gpus, self._can_bring())
        self._note(f"{job.job_id}: some of its {job.gpus} replicas run in turn: {most} GPUs are there as it arrives")

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
        here, least = self._on_one_host(group.gpus), self._least.get(group.base_model, 1)
        if len(here) == len(group.gpus) or len(here) < least or max((least, *orders)) > (widest := self._nodes.widest):
            return group, None
        why = f"a group has GPUs of one host, unless its base or a job of it needs more than the {widest} of the widest"
        return group.on(here), GroupKept(group.group_id, here, why)

    @property
    def cuts(self) -> bool:
        """Whether some base may be cut."""
        return self._layout == "stages" or any(least > 1 for least in self._least.values())

    def stages(self, group: JobGroup | None) -> int:
        """Over how many GPUs the base of a group is cut; 0: over none. It is where that is ordered, and where one host cannot hold it."""
        if group is None or len(group.gpus) == 1:
            return 0
        here = len(self._on_one_host(group.gpus))
        is_wide = here < len(group.gpus) and self._least.get(group.base_model, 1) > here
        return len(group.gpus) if is_wide or self._layout == "stages" else 0
