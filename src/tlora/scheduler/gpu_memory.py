"""How many bytes may be planned for on each GPU, where that is known, and on which of them a job has room. GPUs may be unequal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tlora.protocol import JobSubmitted
from tlora.scheduler.job import Job
from tlora.shape.cost import CostModel


@dataclass(slots=True)
class GpuMemory:
    """`room_bytes` may be planned for of a GPU, of those of which it is known; `rooms` are all such numbers, each once, rising. Of GPUs
    that are lost it stays known: they may come back.
    """

    room_bytes: dict[int, int] = field(default_factory=dict[int, int])
    rooms: list[int] = field(default_factory=list[int])
    _most: dict[int, int] = field(default_factory=dict[int, int])  # as found first

    @property
    def is_uneven(self) -> bool:
        return len(self.rooms) > 1

    def find(self, gpus: Sequence[int], memory_bytes: Sequence[int]) -> bool:
        """What was found last counts, but never more than what was found first. Whether anything is another than before."""
        for gpu, room in zip(gpus, memory_bytes, strict=True):
            self._most.setdefault(gpu, room)
        room_by_gpu = {gpu: min(self._most[gpu], room) for gpu, room in zip(gpus, memory_bytes, strict=True)}
        if all(self.room_bytes.get(gpu) == room for gpu, room in room_by_gpu.items()):
            return False
        self.room_bytes |= room_by_gpu
        self.rooms = sorted(set(self.room_bytes.values()))
        return True

    def has_room(self, gpu: int, least_room: float) -> bool:
        """Where nothing is known of it, it has."""
        return self.room_bytes.get(gpu, math.inf) >= least_room

    def of(self, gpus: Iterable[int]) -> int | None:
        """What each of them has at least; an unknown one no more than the smallest of those that are known. None: nothing is known."""
        return min([self.room_bytes.get(gpu, self.rooms[0]) for gpu in gpus], default=None) if self.rooms else None

    def for_jobs(self, jobs: Sequence[Job]) -> int | None:
        """What a GPU has at least that a group of `jobs` may be given: the smallest on which each of them can run. None: not known."""
        if not self.is_uneven:
            return self.rooms[0] if self.rooms else None
        least = max([job.least_room for job in jobs])
        return next((room for room in self.rooms if room >= least), self.rooms[-1])

    def least_room(self, cost: CostModel, spec: JobSubmitted, most_gpus: int) -> float:
        """As `Job.least_room`: where base, adapter and a micro-batch of its longest sample fit, on as many GPUs as it asks for."""
        for room in self.rooms:
            if least_bytes(cost, spec, room) <= room:
                enough = len(self.room_bytes) < most_gpus or sum(own >= room for own in self.room_bytes.values()) >= spec.gpus
                return (0.0 if room == self.rooms[0] else room) if enough else math.inf
        return math.inf if self.rooms else 0.0

    def why_too_large(self, cost: CostModel, spec: JobSubmitted, most_gpus: int) -> str | None:
        """Why too few GPUs have room for the job, if so."""
        if self.least_room(cost, spec, most_gpus) < math.inf:
            return None
        most = self.rooms[-1]
        needed = least_bytes(cost, spec, most)
        takes = (
            f"its base, adapter and a micro-batch of its longest sample of {spec.profile.longest_sample_tokens} tokens take "
            f"{needed / 2**30:.2f} GiB"
        )
        if needed > most:
            return f"{takes}, and at most {most / 2**30:.2f} GiB may be used of a GPU here. Cut its samples or its rank"
        roomy = sum(own >= needed for own in self.room_bytes.values())
        return f"{takes} on each of {spec.gpus} GPUs, and {roomy} of those here {'has' if roomy == 1 else 'have'} so much. Ask for {roomy}"


def least_bytes(cost: CostModel, spec: JobSubmitted, room_bytes: float) -> float:
    """What the job takes at least on each of its GPUs, which have so much room."""
    profile = spec.profile
    return cost.least_bytes(spec.base_model, profile.adapter_parameters, profile.longest_sample_tokens, spec.least_gpus, room_bytes)
