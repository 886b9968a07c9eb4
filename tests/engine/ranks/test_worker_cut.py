"""Where a worker cuts its base into stages: by the seconds and the memory of each rank's device, which all ranks tell each other."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.engine.ranks.test_relayed_stages import RANKS, Hosts
from tests.engine.tiny_runs import save_base
from tlora.engine.ranks import worker_stages
from tlora.engine.ranks.spanning_jobs import RankContext
from tlora.planning.memory_bound import MemoryBound
from tlora.scheduler.gpu_kinds import GpuKinds
from tlora.shape.base_parts import StageRooms
from tlora.shape.stages import LayerRange
from tlora.worker_protocol import Load

CPU, LAYERS = torch.device("cpu"), 12


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("twelve") / "base", num_hidden_layers=LAYERS)


def cut_among(
    base: Path, store: Path, monkeypatch: pytest.MonkeyPatch, devices: Mapping[int, tuple[str, float, int]], hosts: Hosts | None = None
) -> list[tuple[LayerRange, ...]]:
    """What each rank finds, by stage. `devices` of each rank: name, floating-point operations a second, bytes."""
    own = threading.local()
    monkeypatch.setattr(worker_stages, "name_of", lambda _: devices[own.rank][0])
    monkeypatch.setattr(worker_stages, "training_flops", lambda _: devices[own.rank][1])
    monkeypatch.setattr(worker_stages, "memory_limit", lambda *_: devices[own.rank][2])

    def cut(rank: int) -> tuple[LayerRange, ...]:
        own.rank = rank
        relay = None if hosts is None else hosts.relays[rank]
        context = RankContext(rank, store=str(store / "store"), stages=tuple(devices), relay=relay, apart=hosts is not None)
        found = worker_stages.cut_for(Load(str(base), "out", "cpu", 0.0), context, ())
        assert found is not None
        return found.ranges

    with ThreadPoolExecutor(len(devices)) as threads:
        return list(threads.map(cut, devices))


def layers(found: list[tuple[LayerRange, ...]]) -> list[int]:
    """Of each stage; all ranks have found them."""
    assert all(ranges == found[0] for ranges in found)
    return [each.stop - each.first for each in found[0]]


@pytest.mark.parametrize("apart", [False, True])
def test_each_stage_gets_layers_by_the_speed_of_its_device(
    apart: bool, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one host or of four. GPUs of one kind count alike, whatever each of their hosts has measured."""
    plenty = 1 << 40
    devices = {rank: ("fast", 3e14, plenty) if rank in (2, 0) else ("slow", 1e14 + rank, plenty) for rank in RANKS}
    found = layers(cut_among(base, tmp_path, monkeypatch, devices, Hosts() if apart else None))
    assert found[0] == found[2] >= 4 and found[1] <= 2 >= found[3], found
    alike = dict.fromkeys(RANKS, ("cpu", 0.0, plenty))
    (tmp_path / "alike").mkdir()
    even = layers(cut_among(base, tmp_path / "alike", monkeypatch, alike, Hosts() if apart else None))
    assert max(even) - min(even) <= 1, even


def test_a_fast_device_with_little_memory_gets_what_it_holds(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(name: str, room: int) -> list[int]:
        (tmp_path / name).mkdir()
        return layers(cut_among(base, tmp_path / name, monkeypatch, {0: ("fast", 3e14, room), 1: ("slow", 1e14, 1 << 40)}))

    first, _ = cut("roomy", 1 << 40)
    assert first > 7
    model = worker_stages.SuperModel(worker_stages.outline(str(base), "float32"))
    parts = worker_stages.count_parts(model, CPU, worker_stages.ACTIVATION_RANK)
    three = parts.stage_memory(0, 3, 0, 2)
    assert cut("small", three.base_bytes + three.activation_bytes(1024)) == [3, LAYERS - 3]


def test_a_scheduler_counts_the_bytes_of_the_workers_own_plan(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the base's parts and of each GPU its kind and memory, and cuts as the worker does."""
    model = worker_stages.SuperModel(worker_stages.outline(str(base), "float32"))
    parts = worker_stages.count_parts(model, CPU, worker_stages.ACTIVATION_RANK)
    for number, first in enumerate((2, 5)):
        room = parts.stage_memory(0, first, 0, 2)
        limits = room.base_bytes + room.activation_bytes(1024), 1 << 40
        (tmp_path / str(number)).mkdir()
        devices = {
            rank: (name, flops, limit) for rank, (name, flops, limit) in enumerate(zip(("a", "b"), (3e14, 1e14), limits, strict=True))
        }
        ranges = cut_among(base, tmp_path / str(number), monkeypatch, devices)[0]
        assert ranges[0].stop == first
        bound = MemoryBound(model, 0, CPU, limits, ranges)
        kinds = GpuKinds({0: "a", 1: "b"}, {"a": 0.6, "b": 0.2})
        for tokens in (1, 1024, 8192):
            counted = StageRooms(parts).taken((kinds.speed_of(0), kinds.speed_of(1)), limits, tokens, parts.memory.num_layers)
            assert counted == [memory.total_bytes([], tokens, memory.most_recomputed) for memory in bound._memories([])]
