"""How fast bytes move: between the host's memory and a device, within a device, and between GPUs that read each other's memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from tlora.kernels.device import own_stream
from tlora.sharing.host_memory import HostMemory

_PROBE_BYTES = 128 << 20  # of a copy: some milliseconds
_CPU_PROBE_BYTES = 8 << 20
_PROBES = 3  # of the link where a run waits for it
_MORE_PROBES = 20  # where a machine is measured


@dataclass(frozen=True, slots=True)
class Repeated:
    """Seconds of a step that was repeated. On a device that does nothing else, and whose clock stands, the two are about equal."""

    best: float
    median: float

    @property
    def spread(self) -> float:
        """Share by which the median exceeds the best."""
        return self.median / self.best - 1


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Bytes a second between the host's pinned memory and a device; `both`: each way while they run at once. `spread`: as in `Repeated`."""

    to_device: float
    to_host: float
    both: float
    spread: float


def repeat(step: Callable[[], object], devices: Sequence[torch.device], count: int = _MORE_PROBES) -> Repeated:
    """Time `step`, which `devices` work at, `count` times. The first time, which may bring up an engine or a library, is not counted."""
    found: list[float] = []
    for _ in range(1 + count):
        _wait(devices)
        before = time.perf_counter()
        step()
        _wait(devices)
        found.append(time.perf_counter() - before)
    return Repeated(min(found[1:]), statistics.median(found[1:]))


def measure_link(device: torch.device, ordered: bool = False) -> float:
    """Bytes a second from the host's memory to `device`: the best of a few copies. Raises CapacityError as `HostMemory` does."""
    memory = HostMemory(_num_bytes(device), device, ordered)
    target = torch.empty(memory.own.numel(), dtype=torch.uint8, device=device)
    return target.numel() / repeat(lambda: memory.read(0, 0, target), [device], _PROBES).best


def measure_both_ways(device: torch.device) -> LinkSpeed:
    """The link of `device`, each way alone and both at once. Raises CapacityError as `HostMemory` does."""
    down, up = HostMemory(_num_bytes(device), device), HostMemory(_num_bytes(device), device)
    target, source = (torch.zeros(memory.own.numel(), dtype=torch.uint8, device=device) for memory in (down, up))
    streams = [own_stream(device, "link", number) for number in range(2)] if device.type == "cuda" else []

    def bring() -> None:
        down.read(0, 0, target)

    def take() -> None:
        up.own.copy_(source, non_blocking=True)

    def both() -> None:
        for number, step in enumerate((bring, take)):
            with ExitStack() as stack:
                if streams:
                    stack.enter_context(torch.cuda.stream(streams[number]))
                step()

    brought, taken, together = (repeat(step, [device]) for step in (bring, take, both))
    num_bytes = target.numel()
    return LinkSpeed(num_bytes / brought.best, num_bytes / taken.best, num_bytes / together.best, max(brought.spread, taken.spread))


def measure_copies(device: torch.device) -> float:
    """Bytes a second that `device` reads and writes as it copies its own memory."""
    source = torch.zeros(8 * _num_bytes(device), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / repeat(lambda: target.copy_(source), [device]).best


def measure_peers(devices: Sequence[torch.device]) -> float:
    """Bytes a second that each of `devices` reads of all others' memory, while all do it at once, as ranks of a shared base do."""
    count = len(devices)
    assert count > 1, devices
    num_bytes = _num_bytes(devices[0])
    held = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for device in devices]
    pairs = [(reader, peer) for reader in range(count) for peer in range(count) if peer != reader]
    into = {pair: torch.empty(num_bytes, dtype=torch.uint8, device=devices[pair[0]]) for pair in pairs}
    streams = {(reader, peer): _streams_of(devices, reader, peer) for reader, peer in pairs}

    def step() -> None:
        for pair in pairs:
            with ExitStack() as stack:
                for stream in streams[pair]:  # torch queues a copy between GPUs on a stream of either
                    stack.enter_context(torch.cuda.stream(stream))
                into[pair].copy_(held[pair[1]], non_blocking=True)

    return (count - 1) * num_bytes / repeat(step, devices).best


def _streams_of(devices: Sequence[torch.device], reader: int, peer: int) -> list[torch.cuda.Stream]:
    """One of each end, of this pair in this direction alone."""
    if devices[0].type != "cuda":
        return []
    return [own_stream(devices[reader], "reading", peer), own_stream(devices[peer], "being read", reader)]


def _num_bytes(device: torch.device) -> int:
    return _PROBE_BYTES if device.type == "cuda" else _CPU_PROBE_BYTES


def _wait(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
