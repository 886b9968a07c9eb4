"""How many bytes may be planned for on each GPU, where that is known, and on which of them a job has room. GPUs may be unequal.

GPUs of one model differ by what their drivers hold, some megabytes of 80 GB. Each number of bytes by itself would cost a prediction of all
jobs, so those within `_ALIKE` of the least count as that.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tlora.protocol import JobSubmitted
from tlora.scheduler.job import Job
from tlora.shape.cost import CostModel
from tlora.shape.memory import least_gpus

_ALIKE = 0.01  # of the least, which is what a GPU leaves unused at most


@dataclass(slots=True)
class GpuMemory:
    """`room_bytes` may be planned for of a GPU, of those of which it is known; `rooms` are all such numbers, each once, rising. Of GPUs
    that are lost it stays known: they may come back.
    """

    room_bytes: dict[int, int] = field(default_factory=dict[int, int])
    rooms: list[int] = field(default_factory=list[int])
    _most: dict[int, int] = field(default_factory=dict[int, int])  # as found first
    _found: dict[int, int] = field(default_factory=dict[int, int])  # as found last, and never more than that
    _counts: Counter[int] = field(default_factory=Counter[int])  # of GPUs, by `_found`
    _alike: Counter[int] = field(default_factory=Counter[int])  # of GPUs, by `room_bytes`

    @property
    def is_uneven(self) -> bool:
        return len(self.rooms) > 1

    def find(self, gpus: Sequence[int], memory_bytes: Sequence[int]) -> bool:
        """What was found last counts, but never more than what was found first. Whether anything is another than before."""
        before = {gpu: self.room_bytes.get(gpu) for gpu in gpus}
        gone = set[int]()
        for gpu, room in zip(gpus, memory_bytes, strict=True):
            found = min(self._most.setdefault(gpu, room), room)
            if (last := self._found.get(gpu)) is not None:
                self._counts[last] -= 1
                if not self._counts[last]:
                    del self._counts[last]
                    gone.add(last)
            self._found[gpu] = found
            self._counts[found] += 1
        if gone.intersection(self.rooms) - self._counts.keys() or any(self._room_of(self._found[gpu]) is None for gpu in gpus):
            self._divide()
        else:
            for gpu in gpus:
                if (last := self.room_bytes.get(gpu)) is not None:
                    self._alike[last] -= 1
                if (room := self._room_of(self._found[gpu])) is not None:
                    self.room_bytes[gpu] = room
                    self._alike[room] += 1
        return any(self.room_bytes[gpu] != room for gpu, room in before.items())

    def _room_of(self, found: int) -> int | None:
        """Which of `rooms` so many bytes count as."""
        place = bisect_right(self.rooms, found) - 1
        return self.rooms[place] if place >= 0 and found <= self.rooms[place] * (1 + _ALIKE) else None

    def _divide(self) -> None:
        """What was found into rooms, from the least on."""
        self.rooms = []
        for found in sorted(self._counts):
            if self._room_of(found) is None:
                self.rooms.append(found)
        self.room_bytes = {gpu: room for gpu, found in self._found.items() if (room := self._room_of(found)) is not None}
        self._alike = Counter(self.room_bytes.values())

    def num_roomy(self, room: float) -> int:
        """GPUs that have at least so much."""
        return sum([count for own, count in self._alike.items() if own >= room])

    def has_room(self, gpu: int, least_room: float) -> bool:
        """An unknown GPU counts as the smallest of those that are known; where nothing is known of any, it has."""
        return self.room_bytes.get(gpu, self.rooms[0] if self.rooms else math.inf) >= least_room

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
                enough = len(self.room_bytes) < most_gpus or self.num_roomy(room) >= spec.gpus
                return (0.0 if room == self.rooms[0] else room) if enough else math.inf
        return math.inf if self.rooms else 0.0

    def holds(self, cost: CostModel, spec: JobSubmitted) -> bool:
        """Whether it could run on enough GPUs of the largest room that is known."""
        return not self.rooms or least_bytes(cost, spec, self.rooms[-1]) <= self.rooms[-1]

    def least_gpus(self, cost: CostModel, spec: JobSubmitted) -> int:
        """The fewest GPUs that hold its base in parts, and the job, where no GPU that is known does so as it is submitted: of the largest
        of which there are as many, else of the largest. As submitted where none helps.
        """
        counted = cost.memory.get(spec.base_model)
        if counted is None or self.holds(cost, spec):
            return spec.least_gpus
        wanted = 0
        for room in reversed(self.rooms):
            first, last = least_gpus(counted.bytes_by_gpus, room), len(counted.bytes_by_gpus)
            tried = range(max(first or last + 1, spec.least_gpus + 1), last + 1)
            found = next((gpus for gpus in tried if least_bytes(cost, replace(spec, least_gpus=gpus), room) <= room), 0)
            if 0 < found <= self.num_roomy(room):
                return found
            wanted = wanted or found
        return wanted or spec.least_gpus

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
            is_base = cost.least_bytes(spec.base_model, 0, 0, spec.least_gpus, most) > most
            remedy = "Train it over a smaller base, or add larger GPUs" if is_base else "Cut its samples or its rank"
            return f"{takes}, and at most {most / 2**30:.2f} GiB may be used of a GPU here. {remedy}"
        roomy = self.num_roomy(needed)
        remedy = "Train it over a smaller base, or add GPUs" if spec.gpus == spec.least_gpus > 1 else f"Ask for {roomy}"
        return f"{takes} on each of {spec.gpus} GPUs, and {roomy} of those here {'has' if roomy == 1 else 'have'} so much. {remedy}"


def least_bytes(cost: CostModel, spec: JobSubmitted, room_bytes: float) -> float:
    """What the job takes at least on each of its GPUs, which have so much room."""
    profile = spec.profile
    return cost.least_bytes(spec.base_model, profile.adapter_parameters, profile.longest_sample_tokens, spec.least_gpus, room_bytes)
