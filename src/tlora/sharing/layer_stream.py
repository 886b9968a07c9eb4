"""The slots that a shared base's layers run from: a layer's weights lie in one of a few while it runs, and the next are on their way.

Operations ask for a weight by name, in forward and again in backward. Any order is served; the usual one, forwards through the layers and
back, is fetched ahead. A slot is written anew only when all that was launched on its weights has run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tlora.kernels.device import own_stream
from tlora.sharing.layout import BaseLayout, LayerLayout, Piece


@dataclass(frozen=True)
class FetchStats:
    """Of a rank since its base was loaded: layers and bytes fetched (its own range included), and how long computing waited."""

    layers: int = 0
    bytes: int = 0
    exposed_seconds: float = 0.0


class LayerSource(Protocol):
    """Where the bytes of layers lie: other ranks' memory (`peer_memory.py`) or the host's (`host_memory.py`). `own` is what this process
    holds of them.
    """

    @property
    def own(self) -> Tensor: ...

    def read(self, peer: int, start: int, target: Tensor) -> None:
        """Copy the bytes of `peer` from `start` on into `target`, contiguous bytes on the slots' device. A GPU queues it on its current
        stream.
        """
        ...


class Fetches(Protocol):
    """How copies overlap with computation."""

    def current(self) -> torch.cuda.Stream | None:
        """The stream on which the caller computes; None where each copy is done when it is asked for."""
        ...

    def start(self, copy: Callable[[], None], after: Sequence[torch.Event]) -> torch.Event | None:
        """Queue `copy` behind `after`; gives the event of its end."""
        ...

    def wait(self, ready: torch.Event | None) -> None:
        """What is launched on the current stream from here on runs behind `ready`."""
        ...

    def exposed_seconds(self) -> float: ...


class LayerStream:
    """The weights of a shared base by name, each as it lies in a slot: good until a weight of another layer is asked for.

    Calls come from one thread at a time. What reads a layer's weights has been launched before a weight of another layer is asked for.
    """

    def __init__(self, layout: BaseLayout, memory: LayerSource, rank: int, num_slots: int, device: torch.device | None = None) -> None:
        """`device`: that of the slots, by default where the memory is."""
        self.layout, self._memory, self._rank = layout, memory, rank
        device = memory.own.device if device is None else device
        count = max(1, min(num_slots, len(layout.layers)))
        self._slots = [_Slot(torch.empty(layout.slot_bytes, dtype=torch.uint8, device=device)) for _ in range(count)]
        self._fetches: Fetches = _GpuFetches(device) if device.type == "cuda" else _HostFetches()
        self._current: _Slot | None = None
        self._before: int | None = None  # the layer before the current one
        self._num_fetched = self._bytes_fetched = 0

    @property
    def held_bytes(self) -> int:
        """Memory of this rank's device: its ranges of all layers, where they lie there, and the slots."""
        slots = [slot.bytes for slot in self._slots]
        own = self._memory.own
        return (own.numel() if own.device.type == slots[0].device.type else 0) + sum(slot.numel() for slot in slots)

    def stats(self) -> FetchStats:
        """The counts up to now; waits for all work launched before."""
        return FetchStats(self._num_fetched, self._bytes_fetched, self._fetches.exposed_seconds())

    def tensors(self, name: str) -> dict[str, Tensor]:
        """What the weight of a linear holds, flat, on the device, to be read by what is launched on the current stream."""
        number, piece = self.layout.places[name]
        return self._enter(number).tensors(piece)

    def _enter(self, number: int) -> _Slot:
        """The slot with layer `number`, ready for what is launched from here on."""
        slot = self._current
        if slot is None or slot.layer != number:
            if slot is not None:
                slot.leave()
                self._before = slot.layer
            slot = self._current = self._slot_of(number) or self._fetch(number, keep=[])
            self._slots.sort(key=lambda s: s is slot)  # the least recently used first
            ahead = upcoming(number, self._before, len(self.layout.layers), len(self._slots) - 1)
            for following in ahead:
                if self._slot_of(following) is None:
                    self._fetch(following, keep=[number, *ahead])
        slot.enter(self._fetches)
        return slot

    def _slot_of(self, number: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.layer == number), None)

    def _fetch(self, number: int, keep: list[int]) -> _Slot:
        """Begin to fetch a layer into the slot that was used the longest ago and whose layer is not to be kept."""
        slot = next(slot for slot in self._slots if slot.layer is None or slot.layer not in keep)
        layer = self.layout.layers[number]
        slot.fill(self._fetches, number, lambda: self._copy(layer, slot.bytes))
        self._num_fetched += 1
        self._bytes_fetched += layer.range_bytes * self.layout.world_size
        return slot

    def _copy(self, layer: LayerLayout, target: Tensor) -> None:
        """All ranges of `layer`, the next rank's first: the ranks then read from different ones at a time."""
        for step in range(1, self.layout.world_size + 1):
            peer = (self._rank + step) % self.layout.world_size
            first, last = layer.range_of(peer)
            self._memory.read(peer, layer.range_start, target[first:last])


def upcoming(layer: int, before: int | None, num_layers: int, count: int) -> list[int]:
    """The layers that run after `layer`, at most `count`, by the direction from the one before: forwards at first, turning at the ends.

    >>> upcoming(3, 2, 8, 2), upcoming(7, 6, 8, 2), upcoming(2, 3, 8, 2), upcoming(0, 7, 8, 1)
    ([4, 5], [6, 5], [1, 0], [1])
    """
    step = 1 if before is None or layer > before else -1
    layers, position = list[int](), layer
    for _ in range(count if num_layers > 1 else 0):
        if not 0 <= position + step < num_layers:
            step = -step
        position += step
        layers.append(position)
    return list(dict.fromkeys(n for n in layers if n != layer))


@dataclass(eq=False)
class _Slot:
    """Bytes that hold one layer: when they are there, and behind what they may be written anew."""

    bytes: Tensor
    layer: int | None = None
    _ready: torch.Event | None = None
    _readers: set[torch.cuda.Stream | None] = field(default_factory=set)
    _released: list[torch.Event] = field(default_factory=list)
    _views: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def fill(self, fetches: Fetches, number: int, copy: Callable[[], None]) -> None:
        self.layer = None  # if the copy raises, there is nothing
        self._ready = fetches.start(copy, self._released)
        self.layer, self._released = number, []

    def enter(self, fetches: Fetches) -> None:
        """Call before something is launched that reads the slot."""
        stream = fetches.current()
        if stream not in self._readers:
            fetches.wait(self._ready)
            self._readers.add(stream)

    def leave(self) -> None:
        """Call when all that reads the slot has been launched."""
        self._released += [stream.record_event() for stream in self._readers if stream is not None]
        self._readers.clear()

    def tensors(self, piece: Piece) -> dict[str, Tensor]:
        views = self._views.get(piece.name)
        if views is None:
            views = self._views[piece.name] = {part.name: self.bytes[part.start : part.stop].view(part.dtype) for part in piece.parts}
        return views


class _HostFetches:
    """Copies are done when they are asked for: all of their time is exposed."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def current(self) -> None:
        return None

    def start(self, copy: Callable[[], None], after: Sequence[torch.Event]) -> None:
        before = time.perf_counter()
        copy()
        self._seconds += time.perf_counter() - before

    def wait(self, ready: torch.Event | None) -> None:
        pass

    def exposed_seconds(self) -> float:
        return self._seconds


class _GpuFetches:
    """Copies run on a stream of their own. Waits are timed on the stream that waits, by events before and behind."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, own_stream(device, "layers")
        self._stream.wait_stream(torch.cuda.current_stream(device))  # what the slots' memory was used for before
        self._seconds = 0.0
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # that may not be over yet

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def start(self, copy: Callable[[], None], after: Sequence[torch.Event]) -> torch.Event:
        for event in after:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            copy()
        return self._stream.record_event()

    def wait(self, ready: torch.Event | None) -> None:
        assert ready is not None, "a slot on a GPU that was never filled"
        stream, before, behind = self.current(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(ready)
        behind.record(stream)
        self._waits.append((before, behind))
        while self._waits[0][1].query() and len(self._waits) > 1:
            self._count_first()

    def exposed_seconds(self) -> float:
        while self._waits:
            self._waits[0][1].synchronize()
            self._count_first()
        return self._seconds

    def _count_first(self) -> None:
        before, behind = self._waits.popleft()
        self._seconds += before.elapsed_time(behind) / 1e3
