"""Where the flat tensors of jobs that span ranks lie in each rank's mailbox (`engine/ranks/spanning.py`). Pure, and the same on all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tlora.batching.replicas import ReplicaPlacement

_STATE_SLOTS = 3  # weights and two moments
_ALIGNMENT = 256  # bytes at which regions begin


@dataclass(frozen=True)
class Region:
    """`slots` flat tensors [P] of a job, from byte `start` of every mailbox on."""

    start: int
    slot_bytes: int
    slots: int

    def slot(self, number: int) -> int:
        """Where it begins."""
        assert 0 <= number < self.slots, (number, self)
        return self.start + number * self.slot_bytes

    @property
    def stop(self) -> int:
        """Where another may begin."""
        return self.start + -(-self.slots * self.slot_bytes // _ALIGNMENT) * _ALIGNMENT


def slots_of(most_on_a_rank: int) -> int:
    """Room for what the job begins with, and for the gradients of two steps of each replica of one rank."""
    return max(_STATE_SLOTS, 2 * most_on_a_rank)


def lay_out_regions(spans: Mapping[str, ReplicaPlacement], sizes: Mapping[str, int], element_bytes: int) -> tuple[dict[str, Region], int]:
    """A region for each job of `spans`, of so many elements, and the bytes of a mailbox. Jobs without a common rank may share bytes."""
    regions: dict[str, Region] = {}
    for job, span in sorted(spans.items()):
        overlapping = [other for name, other in regions.items() if set(span.ranks) & set(spans[name].ranks)]
        slots = slots_of(max(len(span.at(rank)) for rank in span.ranks))
        places = (Region(start, sizes[job] * element_bytes, slots) for start in sorted({0, *(other.stop for other in overlapping)}))
        regions[job] = next(each for each in places if all(each.stop <= other.start or other.stop <= each.start for other in overlapping))
    return regions, max((region.stop for region in regions.values()), default=0)
