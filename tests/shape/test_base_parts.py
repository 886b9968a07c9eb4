"""Where a base is cut into stages by the memory of unequal GPUs: what jobs are known to need, else what schedulers count on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tlora.shape.base_parts import BaseParts, highest, with_stages
from tlora.shape.memory import ADAPTER_BYTES, MOST_GPUS, MemoryModel, Phase, adapter_bytes, base_memory

MB = 10**6
LAYERS, PLENTY = 8, 1 << 50
PARTS = BaseParts(
    memory=MemoryModel(100 * LAYERS * MB, (Phase(10 * MB, 20_000.0, 2_000.0, 2_500.0),), LAYERS, 2, 4),
    layers=tuple(f"layers.{number}" for number in range(LAYERS)),
    layer_bytes=(100 * MB,) * LAYERS,
    layer_weights=(50 * MB,) * LAYERS,
    layer_features=(1,) * LAYERS,
    embedding_bytes=0,
    head_bytes=0,
    head_weights=0,
    head_features=0,
    hidden_size=64,
    in_8_bits=False,
    shared_bytes=(),
    streamed=None,
    precision_bytes={},
)
ADAPTER = 8 * MB


def needed(first: int, end: int, stage: int, tokens: int, adapter: int = 0) -> int:
    """Bytes of one of two stages, with all layers recomputed."""
    memory, own = PARTS.stage_memory(first, end, stage, 2), adapter * (end - first) // LAYERS
    return memory.base_bytes + memory.activation_bytes(tokens, memory.most_recomputed) + adapter_bytes(own, own, 2, 4)


def test_a_fast_gpu_has_so_many_layers_that_the_largest_job_fits_beside_them() -> None:
    """By speed it would have six of eight."""
    assert PARTS.cut([3.0, 1.0], [PLENTY] * 2, ADAPTER, 4096) == ((0, 6), (6, 8))
    limit = needed(0, 5, 0, 4096, ADAPTER)
    assert PARTS.cut([3.0, 1.0], [limit, PLENTY], ADAPTER, 4096) == ((0, 5), (5, 8))
    assert PARTS.cut([3.0, 1.0], [limit - 1, PLENTY], ADAPTER, 4096) == ((0, 4), (4, 8))


@pytest.mark.parametrize("speeds", [(3.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize("larger", [1.0, 1.4])
def test_where_the_largest_job_fits_in_no_cut_stages_hold_what_equal_ones_would(speeds: tuple[float, float], larger: float) -> None:
    """What a scheduler counts on, which knows of equal stages on the smallest GPU, is there whatever the speeds."""
    for tokens in (1024, 2048, 16384):
        equal = max(needed(0, 4, 0, tokens), needed(4, 8, 1, tokens))
        for small in (equal, equal + 50 * MB, equal + 150 * MB):
            limits = [small, int(larger * small)]
            cuts = PARTS.cut(speeds, limits, 10**9, 10**6)
            for stage, cut in enumerate(cuts):
                for adapter in (0, (small - equal) // 20):
                    counted = equal + adapter_bytes(adapter, adapter, 2, 4)
                    assert counted > small or needed(*cut, stage, tokens, adapter) <= limits[stage], (cuts, limits, tokens)


def test_a_gpu_that_is_too_small_for_an_equal_stage_gets_fewer_layers() -> None:
    limit = needed(0, 2, 0, 1024)
    assert PARTS.cut([1.0, 1.0], [limit, PLENTY], 10**9, 10**6) == ((0, 2), (2, 8)), "with the least micro-batch"
    tight = [PARTS.stage_bytes(0, 2), PARTS.stage_bytes(2, 8)]
    assert PARTS.cut([1.0, 1.0], tight, 10**9, 10**6) == ((0, 2), (2, 8)), "or with none"
    assert PARTS.cut([1.0, 1.0], [1, 1], 0, 1) == ((0, 4), (4, 8)), "no cut fits: memory counts for nothing"


@pytest.mark.parametrize("seed", range(60))
def test_what_a_scheduler_plans_for_on_unequal_gpus_fits_in_the_cut_of_a_worker(seed: int) -> None:
    """Also before it has chosen GPUs, when it counts equal stages on the smallest. A fast GPU's stage left less than that, as long as it
    held the largest adapter of a worker, and a worker refused what a scheduler had placed.
    """
    chance = random.Random(seed)
    phases = Phase(30 * MB, 8_000.0, 300.0, 400.0, at_head=True), Phase(10 * MB, 20_000.0, 2_000.0, 2_500.0)
    beside = {"embedding_bytes": 150 * MB, "head_bytes": 150 * MB, "head_weights": chance.choice((0, 75 * MB))}
    memory = MemoryModel(1100 * MB, phases[chance.randrange(2) :], LAYERS, 2, 4)
    parts = replace(PARTS, memory=memory, layer_features=(chance.choice((1, 12_000)),) * LAYERS, **beside)
    counted = with_stages(base_memory(memory, [memory.base_bytes] * MOST_GPUS, 0), parts, ordered=True)
    recompute = chance.choice(("auto", "all", "none", 2))
    counted, deepest = counted.recomputing(recompute), {"none": 0, 2: 2}.get(recompute, LAYERS)
    stages = chance.choice((2, 2, 3, 4))
    speeds = tuple(chance.choice((1.0, 1.0, 3.0)) for _ in range(stages))
    limits = tuple(int(chance.choice((400, 600, 900, 1500)) * chance.uniform(0.8, 1.2)) * MB for _ in range(stages))
    room, smallest = counted.room_on(speeds, limits), min(limits)
    if counted.bytes_on(stages, 1024, smallest, recomputed=True) <= smallest:
        assert room >= smallest - 1
    cuts = parts.cut_for_any(speeds, limits, recompute)
    for tokens in (1, 512, 1024, *(chance.randint(1, 16384) for _ in range(40)), 16384):
        adapter = (room - counted.bytes_on(stages, tokens, room, recomputed=True)) / ADAPTER_BYTES
        for stage, (first, end) in enumerate(cuts if adapter >= 0 else ()):
            memory = parts.stage_memory(first, end, stage, stages)
            taken = memory.base_bytes + memory.activation_bytes(tokens, deepest)
            assert taken + ADAPTER_BYTES * adapter * (end - first) / LAYERS <= limits[stage] + 1, (stage, cuts, tokens)


def test_the_highest_lines_are_those_of_the_maximum() -> None:
    chance = random.Random(0)
    for count in range(1, 30):
        lines = [(chance.choice((0.0, 5.0, chance.uniform(0, 99))), chance.choice((0.0, 1.0, chance.uniform(0, 9)))) for _ in range(count)]
        found = highest(lines)
        assert [since for since, _, _ in found] == sorted(since for since, _, _ in found) and {line[1:] for line in found} <= set(lines)
        for tokens in (0.0, *(chance.uniform(0, 60) for _ in range(20))):
            here = [line for line in found if line[0] <= tokens][-1]
            assert here[1] + tokens * here[2] == pytest.approx(max(fixed + tokens * each for fixed, each in lines))
