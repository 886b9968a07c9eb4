"""Queues of tensors between two ranks: a ring in the sender's memory, and words that say how far each is.

Reads are one-sided, as of all peer memory: the receiver copies out of the ring, then says so, and only then is that part of it written
anew. Both ends lay out the ring alike, as they know the size of each tensor. Where a device is behind, a thread waits for it and sets the
word: the caller goes on. Between hosts the bytes go over the line before the word (`relayed_memory.py`).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tlora.errors import RankError
from tlora.sharing.peer_memory import PeerMemory, map_file
from tlora.sharing.peers import Peers
from tlora.sharing.relayed_memory import RelayedPeers

_ALIGNMENT = 256  # bytes at which tensors begin
_EPOCH = 1 << 40  # a word is epoch times this plus a count
_SPINS, _POLL_SECONDS = 20, 0.0001
_LOOK_SECONDS = 0.5  # between two looks at a peer's process


class InterruptedWaitError(Exception):
    """What was waited for does not come: the ranks begin anew."""


class Words:
    """Integers of each rank that all ranks read. Those of a rank are set by it alone."""

    def __init__(self, ranks: Sequence[np.ndarray], rank: int, pass_on: Callable[[int, int], object] = lambda _, __: None) -> None:
        """Of rank `rank`. `pass_on` gets the first word and the number of words that were set here."""
        self._ranks, self._own, self._pass_on = ranks, ranks[rank], pass_on

    def set(self, word: int, value: int) -> None:
        self._own[word] = value
        self._pass_on(word, 1)

    def get(self, rank: int, word: int) -> int:
        return int(self._ranks[rank][word])

    def set_text(self, word: int, text: str, words: int) -> None:
        """Into so many words from `word` on, cut where they end."""
        content = text.encode(errors="replace")[: 8 * words].ljust(8 * words, b"\0")
        self._own[word : word + words] = np.frombuffer(content, np.int64)
        self._pass_on(word, words)

    def get_text(self, rank: int, word: int, words: int) -> str:
        return self._ranks[rank][word : word + words].tobytes().rstrip(b"\0").decode(errors="replace")


def open_words(count: int, peers: Peers | RelayedPeers) -> Words:
    """`count` of each rank. Raises RankError."""
    if isinstance(peers, RelayedPeers):
        relayed = peers.open(8 * count, torch.device("cpu"))
        return Words(relayed.as_integers(), peers.rank, lambda word, words: relayed.pass_on(8 * word, 8 * words))
    if not hasattr(os, "memfd_create"):
        raise RankError("ranks share words on Linux only, which this is not. Train without --gpus")
    descriptor = os.memfd_create("tlora-words")
    try:
        os.ftruncate(descriptor, 8 * count)
        found = peers.exchange("words", [os.getpid(), descriptor])
        ranks = [map_file(pid, number, 8 * count).view(torch.int64).numpy() for pid, number in found]
        peers.exchange("words mapped", True)
    finally:
        os.close(descriptor)
    return Words(ranks, peers.rank)


class Waiting(Protocol):
    """How long one waits, and for whom."""

    def until(self, ready: Callable[[], bool], peer: int) -> None:
        """Return when `ready`. Raises RankError when `peer` has ended, and InterruptedWaitError."""
        ...


class PeerWait:
    """Waits until `interrupted` says why not. Raises RankError where the peer's process has ended."""

    def __init__(
        self, peers: Peers | RelayedPeers, interrupted: Callable[[], bool] = lambda: False, idle: Callable[[], bool] = lambda: True
    ) -> None:
        """`idle`: whether the device has done all that was launched."""
        self._peers, self.interrupted, self._idle = peers, interrupted, idle
        self.seconds = 0.0

    def until(self, ready: Callable[[], bool], peer: int) -> None:
        """Of `Waiting`. `seconds` counts what it took from when the device was idle."""
        if ready():
            return
        spins, looked = 0, time.monotonic()
        idle_since: float | None = None
        try:
            while not ready():
                if self.interrupted():
                    raise InterruptedWaitError
                if idle_since is None and self._idle():
                    idle_since = time.monotonic()
                spins += 1
                if spins > _SPINS:
                    time.sleep(_POLL_SECONDS)
                if (now := time.monotonic()) - looked > _LOOK_SECONDS:
                    looked = now
                    if not self._peers.is_alive(peer) and not ready():
                        raise RankError(f"rank {peer} has ended, and this rank waits for it")
        finally:
            self.seconds += 0.0 if idle_since is None else time.monotonic() - idle_since


class DeviceOrder:
    """Does things when the device has done what was launched before, in order; at once on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, "device-order") if device.type == "cuda" else None
        self._due: deque[Future[None]] = deque()

    def then(self, do: Callable[[], None]) -> None:
        if self._thread is None:
            do()
            return
        while self._due and self._due[0].done():
            self._due.popleft().result()  # raises what the device fails with
        event = torch.cuda.current_stream(self._device).record_event()

        def wait_and_do() -> None:
            event.synchronize()
            do()

        self._due.append(self._thread.submit(wait_and_do))


class Ring:
    """Places for tensors in a stretch of memory, one after another; the same on both ends.

    Positions count on from round to round; a tensor never lies across the end. It takes the place of what began a round earlier.
    """

    def __init__(self, start: int, num_bytes: int) -> None:
        self._start, self._size = start, num_bytes // _ALIGNMENT * _ALIGNMENT
        self.reset()

    def reset(self) -> None:
        self._end = self._count = self._replaced = 0
        self._begins: deque[tuple[int, int]] = deque()  # the number of each tensor that is not replaced yet, and its position

    def place(self, num_bytes: int) -> tuple[int, int]:
        """The byte where the next tensor begins, and how many of those before must have been read by then."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > self._size:
            raise RankError(f"a tensor of {num_bytes:,} bytes does not fit a ring of {self._size:,}")
        if self._end % self._size + size > self._size:
            self._end += self._size - self._end % self._size
        begin, self._end = self._end, self._end + size
        while self._begins and self._begins[0][1] < self._end - self._size:
            self._replaced = self._begins.popleft()[0]
        self._count += 1
        self._begins.append((self._count, begin))
        return self._start + begin % self._size, self._replaced


@dataclass(frozen=True)
class Ends:
    """Who sends and who receives through a ring, and the word in which each counts."""

    sender: int
    receiver: int
    sent: int
    taken: int


class Channel:
    """One end of a queue of tensors. Both ends make it of the same values; the sender's calls are `send`, the receiver's `receive`."""

    def __init__(self, memory: PeerMemory, ring: Ring, words: Words, ends: Ends, patience: Waiting, order: DeviceOrder) -> None:
        self._memory, self._ring, self._words, self._ends = memory, ring, words, ends
        self._patience, self._order = patience, order
        self._count = 0
        self._epoch = 0

    def begin_anew(self, epoch: int) -> None:
        """What was on its way is lost. Both ends call it before either sends or receives again."""
        self._epoch, self._count = epoch, 0
        self._ring.reset()

    def send(self, values: Tensor) -> None:
        """Queue a copy of contiguous `values`; waits where the receiver is a whole ring behind."""
        num_bytes = values.numel() * values.element_size()
        start, replaced = self._ring.place(num_bytes)
        self._patience.until(lambda: self._reached(self._ends.receiver, self._ends.taken, replaced), self._ends.receiver)
        place = self._memory.own[start : start + num_bytes]
        place.copy_(values.detach().reshape(-1).view(torch.uint8), non_blocking=True)
        self._count += 1
        self._note(self._ends.sent, start, num_bytes)

    @property
    def has_next(self) -> bool:
        """Whether `receive` would not wait."""
        return self._reached(self._ends.sender, self._ends.sent, self._count + 1)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The next tensor, which both ends know to be of this shape and dtype. Waits until it is there; a device's copy is queued."""
        values = torch.empty(tuple(shape), dtype=dtype, device=device)
        self.receive_into(values)
        return values

    def receive_into(self, values: Tensor) -> None:
        """The same into contiguous `values`."""
        flat = values.view(-1).view(torch.uint8)
        start, _ = self._ring.place(flat.numel())
        self._patience.until(lambda: self.has_next, self._ends.sender)
        self._memory.read(self._ends.sender, start, flat)
        self._count += 1
        self._note(self._ends.taken)

    def _reached(self, rank: int, word: int, count: int) -> bool:
        """Whether the rank counts so many in the present epoch. At first none has sent or taken anything."""
        return count == 0 or self._words.get(rank, word) >= self._epoch * _EPOCH + count

    def _note(self, word: int, start: int = 0, written_bytes: int = 0) -> None:
        value = self._epoch * _EPOCH + self._count

        def tell() -> None:
            if written_bytes:
                self._memory.pass_on(start, written_bytes, self._ends.receiver)
            self._words.set(word, value)

        self._order.then(tell)
