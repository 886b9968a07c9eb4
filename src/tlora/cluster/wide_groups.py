"""Groups on GPUs of several hosts: which of them may span these, over how many GPUs their base is cut, and what their jobs ask for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

from tlora.cluster.hosts import by_host
from tlora.cluster.nodes import Nodes
from tlora.job import LayoutSetting
from tlora.protocol import Event, GpusAsked, GpusLost, GroupKept, JobGroup, JobSubmitted, MemoryFound, NodeAdded, NodeDraining
from tlora.scheduler.gpu_memory import GpuMemory
from tlora.shape.cost import CostModel
from tlora.wording.numbers import are, quantity

_LEAST_KEPT = 64  # jobs that are looked through for those that have ended


class _Asked(NamedTuple):
    """What a job asks for by the GPUs that there are; `is_content`: as it was submitted, and so as long as the large picture stays."""

    order: JobSubmitted
    gpus: int
    least_gpus: int
    on_one_host: bool
    is_content: bool

    @property
    def kind(self) -> object:
        """Jobs of one kind ask for the same."""
        job = self.order
        return job.base_model, job.gpus, job.least_gpus, job.profile.adapter_parameters, job.profile.longest_sample_tokens


class WideGroups:
    """`on_one_host`: of GPUs those of the host that has most of them; `worker_of`: one number for all GPUs of a host that one worker can
    have. `can_bring`: how many there can be in all where an engine brings them, else 0. `cost` has the bytes of bases.
    """

    def __init__(
        self,
        nodes: Nodes,
        on_one_host: Callable[[tuple[int, ...]], tuple[int, ...]],
        layout: LayoutSetting,
        note: Callable[[str], object],
        can_bring: Callable[[], int] = lambda: 0,
        worker_of: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self._nodes, self._on_one_host, self._layout, self._note = nodes, on_one_host, layout, note
        self._worker_of = worker_of
        self._can_bring = can_bring
        self._could_bring = 0  # when jobs were asked last
        self._restless: dict[str, _Asked] = {}  # jobs that may ask for others whenever a host comes or goes
        self._content: dict[str, _Asked] = {}
        self._most_content, self._picture = 1, object()  # GPUs that one of them asks for; as `_look` gave it last
        self._pruned_at = _LEAST_KEPT
        self._memory, self.cost = GpuMemory(), CostModel({})  # of the GPUs that are there
        self._widest: dict[int, int] = {}  # by room: the most GPUs of one host that have so much
        self._raised: dict[str, int] = {}  # by job: the most GPUs that it has asked for as the base fits on no fewer of those there
        self._raised_later: dict[str, int] = {}  # likewise, of jobs that train, when they begin again
        self._least: dict[str, int] = {}  # by base: with fewer GPUs it does not fit, as its jobs say

    def see(self, job: JobSubmitted) -> None:
        self._least[job.base_model] = job.least_gpus

    def admit(self, job: JobSubmitted, had: tuple[int, ...] = ()) -> JobSubmitted:
        """The job as it asks for GPUs that are there as it arrives, or that an engine can bring, or that it `had` before a restart: other
        replicas of it take turns.
        """
        asked = self._asked(job, had)
        self._keep(asked)
        self._raise(asked, self._raised)
        if asked.gpus < job.gpus:
            self._tell(job)
        return replace(job, gpus=asked.gpus, least_gpus=asked.least_gpus, on_one_host=asked.on_one_host)

    def see_hosts(self, told: Iterable[Event]) -> bool:
        """What there is of GPUs and their memory, as the scheduler hears of it. Whether that is another than before."""
        is_news = False
        for event in told:
            match event:
                case NodeAdded(_, gpus):
                    self._memory.take_back(gpus)
                    is_news = True
                case GpusLost(gpus):
                    self._memory.put_aside(gpus)
                    is_news = True
                case NodeDraining(name):
                    self._memory.put_aside(self._nodes.gpus_of(name))
                    is_news = True
                case MemoryFound(gpus, memory_bytes):
                    is_news |= self._memory.find(gpus, memory_bytes)
                    self._memory.put_aside([gpu for gpu in gpus if self._nodes.is_left(gpu)])
                case _:
                    pass
        if is_news:
            self._widest.clear()
        return is_news

    def ask_anew(self, told: Iterable[Event], open_jobs: Collection[str], placed: Collection[str]) -> list[Event]:
        """What jobs ask for, where one of the events `told` is that GPUs have come, have gone or have other memory, or an engine can bring
        other GPUs than it could. For those that are `placed` it holds from when they wait again.
        """
        is_news = self.see_hosts(told)
        if not (self._restless or self._content):
            return []
        could_bring, self._could_bring = self._could_bring, self._can_bring()
        if self._could_bring == could_bring and not is_news:
            return []
        self._prune(open_jobs)
        asked, picture = list(self._restless.values()), self._look()
        if picture != self._picture:
            asked += self._content.values()
        self._picture = picture
        known, changes = dict[object, _Asked](), list[Event]()
        for before in asked:
            job = before.order
            if (found := known.get(before.kind)) is None:
                found = known[before.kind] = self._asked(job)
            if found[1:] == before[1:]:
                continue
            self._keep(found := found._replace(order=job))
            if found[1:4] == before[1:4]:
                continue
            self._raise(found, self._raised_later if job.job_id in placed else self._raised)
            least = found.least_gpus if found.least_gpus != before.least_gpus else None
            changes.append(GpusAsked(job.job_id, found.gpus, least, found.on_one_host if found.on_one_host != before.on_one_host else None))
            if found.gpus < job.gpus <= before.gpus and job.job_id not in placed:
                self._tell(job)
        return changes

    def _prune(self, open_jobs: Collection[str]) -> None:
        """Forget jobs that have ended: of those that are content when they have become twice as many."""
        self._restless = {name: asked for name, asked in self._restless.items() if name in open_jobs}
        if len(self._content) > self._pruned_at:
            self._content = {name: asked for name, asked in self._content.items() if name in open_jobs}
            self._pruned_at = max(_LEAST_KEPT, 2 * len(self._content))
        for raised in (self._raised, self._raised_later):
            for name in [name for name in raised if name not in open_jobs]:
                del raised[name]

    def _keep(self, asked: _Asked) -> None:
        name = asked.order.job_id
        there, other = (self._content, self._restless) if asked.is_content else (self._restless, self._content)
        there[name] = asked
        other.pop(name, None)
        if asked.is_content and asked.gpus > self._most_content:
            self._most_content, self._picture = asked.gpus, object()

    def _raise(self, asked: _Asked, raised: dict[str, int]) -> None:
        if asked.least_gpus > asked.order.least_gpus:
            raised[asked.order.job_id] = max(asked.least_gpus, raised.get(asked.order.job_id, 0))

    def _look(self) -> object:
        """All that matters to jobs that are content: how wide hosts are, and of each room how many GPUs, up to what one asks for."""
        memory = self._memory
        return self._nodes.widest, [(room, min(memory.num_roomy(room), self._most_content)) for room in memory.rooms]

    def begin(self, group: JobGroup) -> None:
        """The group is about to begin: what its jobs asked for since they trained last holds."""
        for name in group.job_ids:
            if (least := self._raised_later.pop(name, None)) is not None:
                self._raised[name] = max(least, self._raised.get(name, 0))

    def _tell(self, job: JobSubmitted) -> None:
        there = self._nodes.num_gpus
        most, small = max(there, self._can_bring()), there - self._memory.num_with_room(self.cost, job, there)
        known = f"{quantity(most, 'GPU is', 'GPUs are')} there as it arrives"
        known += f", of which {small} {are(small)} too small for it" if small else ""
        self._note(f"{job.job_id}: some of its {job.gpus} replicas run in turn: {known}")

    def _asked(self, job: JobSubmitted, had: tuple[int, ...] = ()) -> _Asked:
        """By the memory of the GPUs that are known; a job that trained on those that it `had` fits on them."""
        fits = self._memory.with_parts(self.cost, job, self._widest_with)
        least = max(job.least_gpus, min(fits.least_gpus, len(had) or fits.least_gpus))
        on_one_host = fits.on_one_host and least > 1 and len(self._on_one_host(had) if had else ()) == len(had)
        fits = replace(job, gpus=max(job.gpus, least), least_gpus=least, on_one_host=on_one_host)
        there = self._nodes.num_gpus
        small = there - self._memory.num_with_room(self.cost, fits, there)
        gpus = self._gpus_for(fits, small, len(had))
        if on_one_host and (room := self._memory.smallest_room(self.cost, fits)) is not None:
            gpus = max(least, min(gpus, self._widest_with(room)))
        as_ordered = gpus == job.gpus <= self._nodes.widest and least == job.least_gpus and (least == 1 or self._layout == "stages")
        return _Asked(job, gpus, least, on_one_host, as_ordered and gpus <= there - small)

    def _widest_with(self, room: int) -> int:
        """The most GPUs of one host that have so much room."""
        if room not in self._widest:
            has_room = self._memory.has_room
            self._widest[room] = max([sum([has_room(gpu, room) for gpu in gpus]) for gpus in self._nodes.used], default=0)
        return self._widest[room]

    def _gpus_for(self, job: JobSubmitted, small: int, had: int) -> int:
        """GPUs that the job asks for; `small` of those there have no room for it."""
        there = self._nodes.num_gpus
        if not there:  # before the first host has come, any number may come
            return job.gpus
        small %= there  # where all are too small it waits for others, of which as many may come
        most = max(there - small, self._can_bring() - small - self._nodes.num_left, had)
        return max(job.least_gpus, min(job.gpus, most))

    def keep(self, group: JobGroup, orders: Iterable[int], before: tuple[int, ...] = ()) -> tuple[JobGroup, GroupKept | None]:
        """The group, which had the GPUs `before`: on those of one host, and of one worker, where none of its jobs, which order so many, nor
        its base needs several.
        """
        here, least = self._on_one_host(group.gpus), self._least_of(group)
        own = self._of_one_worker(here, before[0] if before else -1)
        needed, widest = max((least, *orders)), self._nodes.widest
        if len(own) < len(here) and needed <= len(own):
            here, why = own, "each of these GPUs has a worker of its own, which lend them where the base or a job of it needs several"
        elif len(here) == len(group.gpus) or len(here) < least or needed > widest:
            return group, None
        else:
            why = f"a group has GPUs of one host, unless its base or a job of it needs more than the {widest} of the widest"
        return group.on(here), GroupKept(group.group_id, here, why)

    def _of_one_worker(self, gpus: tuple[int, ...], first: int = -1) -> tuple[int, ...]:
        """Those of a host's GPUs that one worker can have: with `first`, if it is one of them, else the most."""
        parts = by_host(gpus, self._worker_of)
        return tuple(parts[self._worker_of(first)] if first in gpus else max(parts.values(), key=len))

    @property
    def cuts(self) -> bool:
        """Whether some base may be cut."""
        return self._layout == "stages" or bool(self._raised) or any(least > 1 for least in self._least.values())

    def _least_of(self, group: JobGroup) -> int:
        return max(self._least.get(group.base_model, 1), *[self._raised.get(name, 1) for name in group.job_ids], 1)

    def stages(self, group: JobGroup | None) -> int:
        """Over how many GPUs the base of a group is cut; 0: over none. It is where that is ordered, and where no worker can hold it: GPUs
        share a base within a worker alone.
        """
        if group is None or len(group.gpus) == 1:
            return 0
        here = len(self._of_one_worker(self._on_one_host(group.gpus)))
        is_wide = here < len(group.gpus) and self._least_of(group) > here
        return len(group.gpus) if is_wide or self._layout == "stages" else 0
