"""A decision in the making: groups as they shall become, over a `ClusterState` that stays as it is until the decision is made.

Owns which GPUs a group gets (fewest nodes, best fit, one rack if possible), not which group gets some.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from tlora.protocol import JobGroup, ParallelPlan
from tlora.scheduler.gpu_pool import GpuPool
from tlora.scheduler.job import Job
from tlora.scheduler.state import ClusterState


class Draft:
    """What a policy wants changed. `num_free` are the GPUs that are then free."""

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        self.changed: dict[str, JobGroup] = {}
        self.num_free = state.pool.num_free
        self._free: dict[str, list[int]] = {}  # of nodes that the draft has touched
        self._opened = 0

    def wanted(self) -> list[JobGroup]:
        """The groups that change; those without jobs end."""
        return list(self.changed.values())

    # -- GPUs ----------------------------------------------------------------------------------------------------------

    def free_of(self, node: str) -> list[int]:
        free = self._free.get(node)
        return self.state.pool.nodes[node].free if free is None else free

    def free_for(self, node: str, least_room: float, kind: str = "") -> list[int]:
        """Free GPUs of the node that have so much room, those with the least room first. `kind`: only such."""
        free, memory = self.free_of(node), self.state.memory
        if kind:
            free = [gpu for gpu in free if self.state.kinds.kind_of.get(gpu) == kind]
        if not memory.is_uneven:
            return free
        roomy = [gpu for gpu in free if memory.has_room(gpu, least_room)]
        return sorted(roomy, key=lambda gpu: (memory.room_bytes.get(gpu, math.inf), gpu))

    def has_changed(self, node: str) -> bool:
        """Whether GPUs of the node have been taken or given back."""
        return node in self._free

    def changed_nodes(self) -> Collection[str]:
        """Those of which GPUs have been taken or given back."""
        return self._free.keys()

    def with_free(self) -> list[int]:
        """Places of the nodes with free GPUs, rising."""
        places = self.state.pool.with_free
        changed = [(node, free) for name, free in self._free.items() if bool(free) != bool((node := self.state.pool.nodes[name]).free)]
        if not changed:
            return places
        free_places = {*places, *(node.place for node, free in changed if free)}
        return sorted(free_places.difference([node.place for node, free in changed if not free]))

    def allocate_for(self, job: Job, count: int, kind: str = "") -> tuple[int, ...] | None:
        """As `allocate`, GPUs on which the job can run."""
        if not job.spec.on_one_host:
            return self.allocate(count, job.least_room, kind)
        if count > self.num_free:
            return None
        return self._allocate_roomy(count, job.least_room, kind, on_one=True)

    def allocate(self, count: int, least_room: float = 0.0, kind: str = "") -> tuple[int, ...] | None:
        """`count` free GPUs on the fewest nodes that can hold so many, or None where there are none. They are then taken. With
        `least_room` only GPUs that have so much, with `kind` only such.

        Within a node's size that is one node, the one with the fewest GPUs free; above, whole nodes of one rack if possible. Above what
        such nodes can hold, as where nodes are of many sizes, GPUs of any nodes.
        """
        if count > self.num_free:
            return None
        if least_room or kind:
            return self._allocate_roomy(count, least_room, kind)
        size = self.state.pool.node_size
        if count <= size:
            node = self._best_fit(count)
            return None if node is None else self._take(node, count)
        if count > self.state.pool.most_together:
            return self._allocate_roomy(count, least_room)
        names = self._whole_nodes(count, size)
        if names is None:
            return None
        taken: list[int] = []
        for name in names:
            taken += self._take(name, min(count - len(taken), len(self.free_of(name))))
        return tuple(taken)

    def give_back(self, gpus: Iterable[int]) -> None:
        for gpu in gpus:
            name = self.state.pool.node_of[gpu]
            if not self.state.pool.is_left(gpu):
                self._free[name] = sorted((*self.free_of(name), gpu))
                self.num_free += 1

    def take(self, gpus: Sequence[int]) -> None:
        """These very GPUs, which are free."""
        for gpu in gpus:
            name = self.state.pool.node_of[gpu]
            free = list(self.free_of(name))
            free.remove(gpu)
            self._free[name] = free
            self.num_free -= 1

    def _take(self, node: str, count: int) -> tuple[int, ...]:
        if self.state.memory.is_uneven:
            taken = tuple(sorted(self.free_for(node, 0.0)[:count]))
            self.take(taken)
            return taken
        free = self.free_of(node)
        self._free[node] = free[count:]
        self.num_free -= count
        return tuple(free[:count])

    def _allocate_roomy(self, count: int, least_room: float, kind: str = "", *, on_one: bool = False) -> tuple[int, ...] | None:
        """By best fit on one node, or else, but for `on_one`, on the nodes that have most such GPUs."""
        free = {name: gpus for name in self.state.pool.nodes if (gpus := self.free_for(name, least_room, kind))}
        if sum(map(len, free.values())) < count:
            return None
        best = min([name for name, gpus in free.items() if len(gpus) >= count], key=lambda name: (len(free[name]), name), default=None)
        if best is None and on_one:
            return None
        names = [best] if best is not None else sorted(free, key=lambda name: (-len(free[name]), name))
        chosen = tuple(sorted([gpu for name in names for gpu in free[name]][:count]))
        self.take(chosen)
        return chosen

    def _best_fit(self, count: int) -> str | None:
        best: tuple[int, str] | None = None
        by_free = self.state.pool.nodes_by_free
        for free in range(count, self.state.pool.node_size + 1):
            for name in by_free.get(free, ()):
                if name not in self._free:
                    best = (free, name)
                    break
            if best is not None:
                break
        for name, own in self._free.items():
            if len(own) >= count and (best is None or len(own) < best[0]):
                best = (len(own), name)
        return None if best is None else best[1]

    def _whole_nodes(self, count: int, size: int) -> list[str] | None:
        """As many nodes as `count` GPUs take at least, in one rack if there are such; the last one by best fit."""
        whole, rest = divmod(count, size)
        empty = [name for name in self.state.pool.nodes_by_free.get(size, ()) if name not in self._free]
        empty += [name for name, free in self._free.items() if len(free) == size]
        racks: dict[str, list[str]] = {}
        for name in empty:
            racks.setdefault(self.state.pool.nodes[name].rack, []).append(name)
        enough = [names for names in racks.values() if len(names) >= whole + (rest > 0)]
        enough = enough or [names for names in racks.values() if len(names) >= whole]  # the rest then lies elsewhere
        chosen = min(enough, key=len) if enough else empty
        if len(chosen) < whole:
            return None
        names = chosen[:whole]
        if rest:
            before = {name: self._free.get(name) for name in names}
            for name in names:
                self._free[name] = []
            last = self._best_fit(rest)
            for name, free in before.items():
                if free is None:
                    del self._free[name]
                else:
                    self._free[name] = free
            if last is None:
                return None
            names.append(last)
        return names

    # -- groups --------------------------------------------------------------------------------------------------------

    def leaves_somebody_waiting(self) -> bool:
        """Whether a job that waits gets no group."""
        placed = {name for group in self.changed.values() for name in group.job_ids}
        return any(name not in placed for name in self.state.pending)

    def group(self, group_id: str) -> JobGroup:
        """As it shall be."""
        return self.changed.get(group_id) or self.state.groups[group_id].group

    def members(self, group_id: str) -> list[Job]:
        return [self.state.jobs[name] for name in self.group(group_id).job_ids]

    def open(self, jobs: Sequence[Job], gpus: tuple[int, ...], plan: ParallelPlan) -> JobGroup:
        """A new group on GPUs that were taken by `allocate` or `take`."""
        group_id = f"g{self.state.groups_opened + self._opened}"
        self._opened += 1
        return self._set(JobGroup(group_id, jobs[0].spec.base_model, gpus, plan, *_members(jobs)))

    def change(self, group_id: str, jobs: Sequence[Job], gpus: tuple[int, ...], plan: ParallelPlan) -> JobGroup:
        """Other members, GPUs (the caller takes and gives back the difference) or plan."""
        return self._set(JobGroup(group_id, self.group(group_id).base_model, gpus, plan, *_members(jobs)))

    def stop(self, group_id: str) -> None:
        """Its GPUs are free, its members without a group until the draft gives them one."""
        group = self.group(group_id)
        self.give_back(group.gpus)
        self.changed[group_id] = JobGroup(group_id, group.base_model, group.gpus, group.plan, (), ())

    def _set(self, group: JobGroup) -> JobGroup:
        self.changed[group.group_id] = group
        return group


def has_room(free: Collection[int], count: int, size: int) -> bool:
    """Whether `allocate` finds `count` GPUs on nodes of which each has so many free, where the largest node has `size`."""
    if count <= size:
        return max(free, default=0) >= count
    if not size:  # all GPUs are lost
        return False
    whole, rest = divmod(count, size)
    empty = sum(own == size for own in free)
    return empty > whole or (empty == whole and (not rest or any(rest <= own < size for own in free)))


def may_lie_apart(pool: GpuPool, job: Job) -> bool:
    """Whether its GPUs may lie on any nodes: where not all have room for it, or whole nodes cannot hold so many."""
    return not job.spec.on_one_host and (job.least_room > 0.0 or job.spec.gpus > pool.most_together)


def finds_room(pool: GpuPool, job: Job, free: Collection[int]) -> bool:
    """Whether `allocate_for` finds as many GPUs as the job asks for on nodes of which each has so many free with room for it."""
    count = job.spec.gpus
    if job.spec.on_one_host:
        return max(free, default=0) >= count
    return sum(free) >= count if may_lie_apart(pool, job) else has_room(free, count, pool.node_size)


def _members(jobs: Sequence[Job]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Names and weights: a flow's weight is what it needs."""
    return tuple([job.spec.job_id for job in jobs]), tuple([job.weight for job in jobs])
