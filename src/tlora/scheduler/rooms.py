"""How many bytes may be planned for of the GPUs of a group, by the job and by the form in which its base lies there.

Of stages on unequal GPUs that follows from where a worker cuts them; of all else from the smallest of the GPUs (`gpu_memory.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from tlora.protocol import JobSubmitted
from tlora.scheduler.gpu_kinds import GpuKinds
from tlora.scheduler.gpu_memory import GpuMemory, least_bytes
from tlora.scheduler.gpu_pool import GpuPool
from tlora.scheduler.job import Job
from tlora.scheduler.plans import is_over_hosts
from tlora.shape.cost import CostModel
from tlora.shape.memory import BaseMemory


@dataclass(frozen=True, slots=True)
class Rooms:
    """Of a cluster as it is now."""

    cost: CostModel
    memory: GpuMemory
    kinds: GpuKinds
    pool: GpuPool

    def least(self, spec: JobSubmitted) -> float:
        """As `Job.least_room`. A job that fits on no GPUs in equal stages may fit on as many as it asks for together, in others: in those
        that a worker cuts by memory on the largest, or on all of so much room where no more have it; else on the largest that there are,
        and so on these alone.
        """
        least, memory = self.memory.least_room(self.cost, spec, self.pool.most_gpus), self.memory
        is_cut = least == math.inf and spec.gpus > 1 and self._in_stages([replace(spec, least_gpus=spec.gpus)]) is not None
        for room in (*memory.rooms, memory.kth_largest(spec.gpus)) if is_cut else ():
            if room is not None and (gpus := self._only(room, spec.gpus)) is not None:
                whole = replace(spec, least_gpus=spec.gpus)
                together = self._together([whole], gpus)
                if least_bytes(self.cost, whole, together) <= together:
                    return 0.0 if room == memory.rooms[0] else room
        return least

    def on(self, jobs: Sequence[Job], gpus: Sequence[int]) -> float | None:
        """Bytes that may be planned for of each of `gpus`, of a group of `jobs`. None: nothing is known."""
        specs = [job.spec for job in jobs]
        if len(gpus) < 2 or not self.memory.rooms or self._in_stages(specs) is None:
            return self.memory.of(gpus)
        return self._together(specs, gpus)

    def of_any(self, jobs: Sequence[Job], gpus: int) -> float | None:
        """The same of so many GPUs that are not chosen yet."""
        room, specs = self.memory.for_jobs(jobs), [job.spec for job in jobs]
        if room is None or gpus < 2 or self._in_stages(specs) is None:
            return room
        only = self._only(max([room, *[job.least_room for job in jobs if job.least_room < room + 1]]), gpus)
        return room if only is None else self._together(specs, only)

    def _only(self, room: float, count: int) -> Sequence[int] | None:
        """So many GPUs that have so much room, where all others that have it are as these, or there are none."""
        memory, kinds = self.memory, self.kinds
        more = memory.num_roomy(room) - count
        if more < 0 or (more and (room != memory.rooms[-1] or (kinds.differ and kinds.are_mixed(memory.with_room(room))))):
            return None
        return list(islice((gpu for gpu in memory.room_bytes if memory.has_room(gpu, room)), count))

    def _together(self, specs: Sequence[JobSubmitted], gpus: Sequence[int]) -> float:
        """Of several GPUs, in whatever order they are named. Those of the first one's host have the last stages, as a worker has it."""
        least, node_of = self.memory.of(gpus), self.pool.node_of
        assert least is not None, f"nothing is known of the memory of {gpus}"
        if (counted := self._in_stages(specs)) is None or not (counted.in_stages or self._takes_several_hosts(specs, gpus)):
            return least
        first = node_of.get(min(gpus))
        order = sorted(gpus, key=lambda gpu: (node_of.get(gpu) == first, gpu))
        limits = tuple([self.memory.room_bytes.get(gpu, self.memory.rooms[0]) for gpu in order])
        return counted.over(hosts=True).room_on(tuple(map(self.kinds.speed_of, order)), limits)

    def _in_stages(self, specs: Sequence[JobSubmitted]) -> BaseMemory | None:
        """What is known of the jobs' base, if several GPUs may hold it in stages."""
        counted = self.cost.memory.get(specs[0].base_model)
        if counted is None or counted.stages is None or not (counted.in_stages or any(map(is_over_hosts, specs))):
            return None
        return counted

    def _takes_several_hosts(self, specs: Sequence[JobSubmitted], gpus: Sequence[int]) -> bool:
        """Whether a base that GPUs of one host share by copies lies in stages on these."""
        on_one = Counter([self.pool.node_of.get(gpu) for gpu in gpus])
        return any(is_over_hosts(spec) and spec.least_gpus > max(on_one.values()) for spec in specs)
