"""Large tensors between a GPU and pageable memory, by several threads, each with a pinned buffer and a stream beside the training's.

One thread that copies from a mapped file, or into memory that the system has still to find, moves 1 to 5 GB/s, and a copy on the stream of
the training would hold it up.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from tlora.kernels.device import own_stream

_LANES, _LANE_BYTES = 8, 32 << 20


class _Lane:
    """A pinned buffer, of which one thread at a time has the use, and the stream of this lane's `number`."""

    def __init__(self, device: torch.device, after: torch.Event, number: int) -> None:
        self._device, self._stream = device, own_stream(device, "transfer", number)
        self._stream.wait_event(after)
        self._buffer = torch.empty(_LANE_BYTES, dtype=torch.uint8, pin_memory=True)

    def upload(self, source: Tensor) -> Tensor:
        """A copy of `source` on the device, complete when this returns."""
        source = source.contiguous()
        target = torch.empty_like(source, device=self._device)
        here, there = (t.view(-1).view(torch.uint8) for t in (source, target))
        with torch.cuda.stream(self._stream):
            for start in range(0, here.numel(), _LANE_BYTES):
                piece = here[start : start + _LANE_BYTES]
                self._buffer[: piece.numel()].copy_(piece)
                there[start : start + _LANE_BYTES].copy_(self._buffer[: piece.numel()], non_blocking=True)
                self._stream.synchronize()
        return target

    def download(self, source: Tensor) -> Tensor:
        """A copy of `source` in the host's memory, complete when this returns."""
        source = source.contiguous()
        target = torch.empty_like(source, device="cpu")
        there, here = (t.view(-1).view(torch.uint8) for t in (source, target))
        with torch.cuda.stream(self._stream):
            for start in range(0, here.numel(), _LANE_BYTES):
                piece = here[start : start + _LANE_BYTES]
                self._buffer[: piece.numel()].copy_(there[start : start + _LANE_BYTES], non_blocking=True)
                self._stream.synchronize()
                piece.copy_(self._buffer[: piece.numel()])
        return target


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Future[Tensor]]:
    """Copies of CPU tensors on `device`, a GPU, in their order: this returns at once."""
    return _by_lanes(_Lane.upload, tensors, device, torch.cuda.current_stream(device).record_event())


def download(tensors: Sequence[Tensor], device: torch.device, after: torch.Event) -> list[Future[Tensor]]:
    """Copies of tensors on `device`, a GPU, in the host's memory. What `after` waits for is done before."""
    return _by_lanes(_Lane.download, tensors, device, after)


def _by_lanes(
    copy: Callable[[_Lane, Tensor], Tensor], tensors: Sequence[Tensor], device: torch.device, after: torch.Event
) -> list[Future[Tensor]]:
    lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
    count = max(1, min(_LANES, len(tensors)))
    for number in range(count):
        lanes.put(_Lane(device, after, number))

    def work(source: Tensor) -> Tensor:
        lane = lanes.get()
        try:
            return copy(lane, source)
        finally:
            lanes.put(lane)

    pool = ThreadPoolExecutor(count)
    futures = [pool.submit(work, tensor) for tensor in tensors]
    pool.shutdown(wait=False)
    return futures
