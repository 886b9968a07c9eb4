"""How many bytes may be planned for of the GPUs of a group, by the job and by the form in which its base lies there.

Of stages on unequal GPUs that follows from where a worker cuts them; of all else from the smallest of the GPUs (`gpu_memory.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tlora.protocol import JobSubmitted
from tlora.scheduler.gpu_kinds import GpuKinds
from tlora.scheduler.gpu_memory import GpuMemory, least_bytes
from tlora.scheduler.gpu_pool import GpuPool
from tlora.scheduler.job import Job
from tlora.scheduler.plans import is_over_hosts
from tlora.shape.cost import CostModel


@dataclass(frozen=True, slots=True)
class Rooms:
    """Of a cluster as it is now."""

    cost: CostModel
    memory: GpuMemory
    kinds: GpuKinds
    pool: GpuPool

    def least(self, spec: JobSubmitted) -> float:
        """As `Job.least_room`. A job that fits on no GPUs of equal room may fit on as many as it asks for together, in stages that are as
        unequal: that of the smallest of these, where no others have so much.
        """
        least, memory = self.memory.least_room(self.cost, spec, self.pool.most_gpus), self.memory
        for room in memory.rooms if least == math.inf and spec.gpus > 1 else ():
            if memory.num_roomy(room) == spec.gpus:
                whole = replace(spec, least_gpus=spec.gpus)
                together = self._together([whole], memory.with_room(room))
                if least_bytes(self.cost, whole, together) <= together:
                    return 0.0 if room == memory.rooms[0] else room
        return least

    def on(self, jobs: Sequence[Job], gpus: Sequence[int]) -> float | None:
        """Bytes that may be planned for of each of `gpus`, of a group of `jobs`. None: nothing is known."""
        if len(gpus) < 2 or not self.memory.rooms or not (self.memory.is_uneven or self.kinds.are_mixed(gpus)):
            return self.memory.of(gpus)
        return self._together([job.spec for job in jobs], gpus)

    def of_any(self, jobs: Sequence[Job], gpus: int) -> float | None:
        """The same of so many GPUs that are not chosen yet."""
        room, memory = self.memory.for_jobs(jobs), self.memory
        if room is None or gpus < 2 or not memory.is_uneven or memory.num_roomy(room) != gpus:
            return room
        return self._together([job.spec for job in jobs], memory.with_room(room))

    def _together(self, specs: Sequence[JobSubmitted], gpus: Sequence[int]) -> float:
        """Of several GPUs, in whatever order they are named. Those of the first one's host have the last stages, as a worker has it."""
        gpus = sorted(gpus)
        least, nodes = self.memory.of(gpus), [self.pool.node_of.get(gpu) for gpu in gpus]
        assert least is not None, f"nothing is known of the memory of {gpus}"
        counted, widest = self.cost.memory.get(specs[0].base_model), max(map(nodes.count, nodes))
        if counted is None or not (counted.in_stages or any(is_over_hosts(spec) and spec.least_gpus > widest for spec in specs)):
            return least
        order = sorted(gpus, key=lambda gpu: (self.pool.node_of.get(gpu) == nodes[0], gpu))
        limits = tuple([self.memory.room_bytes.get(gpu, self.memory.rooms[0]) for gpu in order])
        return counted.over(hosts=True).room_on(tuple(map(self.kinds.speed_of, order)), limits)
