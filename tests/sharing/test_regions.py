from __future__ import annotations

from itertools import combinations

from tlora.batching.replicas import ReplicaPlacement
from tlora.sharing.regions import lay_out_regions


def test_regions_on_one_rank_do_not_overlap() -> None:
    spans = {
        "a": ReplicaPlacement(3, (0, 1)),
        "b": ReplicaPlacement(2, (1, 0)),
        "c": ReplicaPlacement(7, (2, 0)),
        "d": ReplicaPlacement(2, (3, 4)),
        "e": ReplicaPlacement(2, (4, 2)),
        "f": ReplicaPlacement(4, (1, 3)),
    }
    sizes = {"a": 1001, "b": 3, "c": 64, "d": 5000, "e": 7, "f": 500}
    regions, num_bytes = lay_out_regions(spans, sizes, 4)
    assert {job: region.slots for job, region in regions.items()} == {"a": 4, "b": 3, "c": 8, "d": 3, "e": 3, "f": 4}
    for (job, one), (name, other) in combinations(regions.items(), 2):
        apart = one.slot(one.slots - 1) + one.slot_bytes <= other.start or other.slot(other.slots - 1) + other.slot_bytes <= one.start
        assert apart or not set(spans[job].ranks) & set(spans[name].ranks), (job, name)
    assert all(region.start % 256 == 0 and region.slot(region.slots - 1) + region.slot_bytes <= num_bytes for region in regions.values())


def test_jobs_without_a_common_rank_share_bytes() -> None:
    spans = {f"job{number}": ReplicaPlacement(2, (2 * (number % 4), 2 * (number % 4) + 1)) for number in range(16)}
    regions, num_bytes = lay_out_regions(spans, dict.fromkeys(spans, 64), 4)
    assert num_bytes == 4 * 3 * 64 * 4, "four jobs on each rank, with three slots each"
    assert lay_out_regions({}, {}, 4) == ({}, 0)
    assert {region.start for region in regions.values()} == {0, 768, 1536, 2304}
