"""How many bytes may be planned for on each GPU, where that is known, and on which of them a job has room. GPUs may be unequal.

GPUs of one model differ by what their drivers hold, some megabytes of 80 GB. Each number of bytes by itself would cost a prediction of all
jobs, so those within `_ALIKE` of the least count as that.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from tlora.protocol import JobSubmitted
from tlora.scheduler.job import Job
from tlora.scheduler.plans import is_over_hosts
from tlora.shape.cost import CostModel
from tlora.shape.memory import least_gpus, must_share
from tlora.wording.numbers import gib

_ALIKE = 0.01  # of the least, which is what a GPU leaves unused at most


@dataclass(slots=True)
class GpuMemory:
    """`room_bytes` may be planned for of a GPU, of those of which it is known; `rooms` are all such numbers, each once, rising. Of GPUs
    that are lost it stays known, as they may come back, unless they are put aside. A room that is asked for may lie within a byte above one
    of these: some of its GPUs have it, those of the lowest numbers (`kth_largest`).
    """

    room_bytes: dict[int, int] = field(default_factory=dict[int, int])
    rooms: list[int] = field(default_factory=list[int])
    _most: dict[int, int] = field(default_factory=dict[int, int])  # as found first
    _found: dict[int, int] = field(default_factory=dict[int, int])  # as found last, and never more than that
    _counts: Counter[int] = field(default_factory=Counter[int])  # of GPUs, by `_found`
    _alike: Counter[int] = field(default_factory=Counter[int])  # of GPUs, by `room_bytes`
    _places: dict[int, float] = field(default_factory=dict[int, float], compare=False)  # among GPUs of one room, within a byte above it
    _aside: dict[int, int] = field(default_factory=dict[int, int])  # of GPUs that are put aside, as found last

    @property
    def is_uneven(self) -> bool:
        return len(self.rooms) > 1

    def find(self, gpus: Sequence[int], memory_bytes: Sequence[int]) -> bool:
        """What was found last counts, but never more than what was found first. Whether anything is another than before."""
        before = {gpu: self.room_bytes.get(gpu) for gpu in gpus}
        self._places.clear()
        gone = set[int]()
        for gpu, room in zip(gpus, memory_bytes, strict=True):
            found = min(self._most.setdefault(gpu, room), room)
            self._aside.pop(gpu, None)
            gone |= self._uncount(self._found.get(gpu))
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

    def put_aside(self, gpus: Iterable[int]) -> bool:
        """They count no more until they are found or taken back. Whether one of them did."""
        there = [gpu for gpu in gpus if gpu in self._found]
        self._places.clear()
        gone = set[int]()
        for gpu in there:
            found = self._aside[gpu] = self._found.pop(gpu)
            gone |= self._uncount(found)
            self._alike[self.room_bytes.pop(gpu)] -= 1
        if gone.intersection(self.rooms):
            self._divide()
        return bool(there)

    def take_back(self, gpus: Iterable[int]) -> bool:
        """Those of them that were put aside count again. Whether one was."""
        back = {gpu: found for gpu in gpus if (found := self._aside.get(gpu)) is not None} if self._aside else {}
        if back:
            self.find(list(back), list(back.values()))
        return bool(back)

    def _uncount(self, found: int | None) -> set[int]:
        """One GPU less of which so much was found. That number, if it was the last."""
        if found is None:
            return set()
        self._counts[found] -= 1
        if self._counts[found]:
            return set()
        del self._counts[found]
        return {found}

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
        level = next((own for own in self._alike if own < room < own + 1), None)
        some = 0 if level is None else sum(own == level and self.has_room(gpu, room) for gpu, own in self.room_bytes.items())
        return some + sum([count for own, count in self._alike.items() if own >= room])

    def with_room(self, room: float) -> list[int]:
        """Those."""
        return sorted([gpu for gpu in self.room_bytes if self.has_room(gpu, room)])

    def kth_largest(self, count: int) -> float | None:
        """The room that so many GPUs have and no others: the largest, and of equals those of the lowest numbers."""
        ordered = sorted(self.room_bytes, key=lambda gpu: (-self.room_bytes[gpu], gpu))
        return self._place_of(ordered[count - 1]) if 0 < count <= len(ordered) else None

    def _place_of(self, gpu: int) -> float:
        if not self._places:
            for room in self.rooms:
                alike = sorted([other for other, own in self.room_bytes.items() if own == room])
                self._places |= {other: room + 1 - (number + 1) / (len(alike) + 1) for number, other in enumerate(alike)}
        return self._places.get(gpu, 0.0)

    def has_room(self, gpu: int, least_room: float) -> bool:
        """An unknown GPU counts as the smallest of those that are known; where nothing is known of any, it has."""
        own = self.room_bytes.get(gpu, self.rooms[0] if self.rooms else math.inf)
        return own >= least_room or (own + 1 > least_room and self._place_of(gpu) >= least_room)

    def of(self, gpus: Iterable[int]) -> int | None:
        """What each of them has at least; an unknown one no more than the smallest of those that are known. None: nothing is known."""
        return min([self.room_bytes.get(gpu, self.rooms[0]) for gpu in gpus], default=None) if self.rooms else None

    def for_jobs(self, jobs: Sequence[Job]) -> int | None:
        """What a GPU has at least that a group of `jobs` may be given: the smallest on which each of them can run. None: not known."""
        if not self.is_uneven:
            return self.rooms[0] if self.rooms else None
        least = max([job.least_room for job in jobs])
        return next((room for room in self.rooms if room + 1 > least), self.rooms[-1])

    def least_room(self, cost: CostModel, spec: JobSubmitted, most_gpus: int) -> float:
        """As `Job.least_room`: where base, adapter and a micro-batch of its longest sample fit, on as many GPUs as it asks for."""
        room = self.smallest_room(cost, spec)
        if room is None:
            return math.inf if self.rooms else 0.0
        enough = len(self.room_bytes) < most_gpus or self.num_roomy(room) >= spec.gpus
        return (0.0 if room == self.rooms[0] else room) if enough else math.inf

    def smallest_room(self, cost: CostModel, spec: JobSubmitted) -> int | None:
        """The smallest of `rooms` that has room for it, on as many GPUs as its base takes at least."""
        return next((room for room in self.rooms if least_bytes(cost, spec, room) <= room), None)

    def holds(self, cost: CostModel, spec: JobSubmitted) -> bool:
        """Whether it could run on enough GPUs like some that are known."""
        return not self.rooms or self.smallest_room(cost, spec) is not None

    def num_with_room(self, cost: CostModel, spec: JobSubmitted, there: int) -> int:
        """Of as many GPUs as are `there` those with room for the job; an unknown one counts as the smallest. All over an unknown base."""
        if not self.rooms or spec.base_model not in cost.memory or (room := self.smallest_room(cost, spec)) == self.rooms[0]:
            return there
        return 0 if room is None else self.num_roomy(room)

    def with_parts(self, cost: CostModel, spec: JobSubmitted, on_one_host: Callable[[int], int]) -> JobSubmitted:
        """The job, with the fewest GPUs that hold its base in parts where no GPU that is known holds it as it is submitted: shared by GPUs
        of one host, else streamed to one from the host's memory, else in stages over hosts. Of the largest GPUs of which there are as
        many, else of the largest; as submitted where none helps. `on_one_host`: the most GPUs of one host that have so much room.
        """
        counted = cost.memory.get(spec.base_model)
        if counted is None or not self.rooms:
            return spec
        if counted.in_stages:
            staged, like_staged = (spec, None) if self.holds(cost, spec) else self._fewest(cost, spec, self.num_roomy)
            return staged or like_staged or spec
        whole = [room for room in self.rooms if not (counted.streamed_bytes and must_share(counted.bytes_by_gpus[0], room))]
        if spec.least_gpus == 1 and any(least_bytes(cost, spec, room) <= room for room in whole):
            return spec
        shared, like_shared = self._fewest(cost, replace(spec, on_one_host=True), on_one_host)
        if shared is not None:
            return shared
        if spec.least_gpus == 1 and self.holds(cost, spec):
            return spec
        if counted.stages is None:
            return like_shared or spec
        staged, like_staged = self._fewest(cost, spec, self.num_roomy)
        return staged or like_staged or like_shared or spec

    def _fewest(
        self, cost: CostModel, spec: JobSubmitted, num_roomy: Callable[[int], int]
    ) -> tuple[JobSubmitted | None, JobSubmitted | None]:
        """The job on the fewest GPUs, several, that hold it, of the largest room of which there are so many; and of the largest room."""
        counted, wanted = cost.memory[spec.base_model].over(hosts=not spec.on_one_host), None
        for room in reversed(self.rooms):
            first, last = least_gpus(counted.bytes_by_gpus, room), len(counted.bytes_by_gpus)
            tried = [replace(spec, least_gpus=gpus) for gpus in range(max(first or last + 1, spec.least_gpus, 2), last + 1)]
            found = next((job for job in tried if least_bytes(cost, job, room) <= room), None)
            if found is not None and found.least_gpus <= num_roomy(room):
                return found, found
            wanted = wanted or found
        return None, wanted

    def why_too_large(self, cost: CostModel, spec: JobSubmitted, most_gpus: int) -> str | None:
        """Why too few GPUs have room for the job, if so."""
        if self.least_room(cost, spec, most_gpus) < math.inf:
            return None
        most, smallest = self.rooms[-1], self.smallest_room(cost, spec)
        needed = least_bytes(cost, spec, smallest or most)
        takes = (
            f"its base, adapter and a micro-batch of its longest sample of {spec.profile.longest_sample_tokens} tokens take "
            f"{gib(needed)}{_of_stages(cost, spec)}"
        )
        if smallest is None:
            is_base = cost.least_bytes(spec.base_model, 0, 0, spec.least_gpus, most, is_over_hosts(spec)) > most
            remedy = "Train it over a smaller base, or add larger GPUs" if is_base else "Cut its samples or its rank"
            return f"{takes}, and at most {gib(most)} may be used of a GPU here. {remedy}"
        roomy = self.num_roomy(smallest)
        remedy = f"Ask for {roomy}" if roomy >= spec.least_gpus else "Train it over a smaller base, or add GPUs"
        return f"{takes} on each of {spec.gpus} GPUs, and {roomy} of those here {'has' if roomy == 1 else 'have'} so much. {remedy}"


def _of_stages(cost: CostModel, spec: JobSubmitted) -> str:
    counted = cost.memory.get(spec.base_model)
    in_stages = counted is not None and counted.over(hosts=is_over_hosts(spec)).in_stages
    return f" on each of {spec.least_gpus} equal stages" if in_stages and spec.least_gpus > 1 else ""


def least_bytes(cost: CostModel, spec: JobSubmitted, room_bytes: float) -> float:
    """What the job takes at least on each of its GPUs, which have so much room."""
    profile = spec.profile
    takes = profile.adapter_parameters, profile.longest_sample_tokens, spec.least_gpus, room_bytes
    return cost.least_bytes(spec.base_model, *takes, is_over_hosts(spec))
