"""Memory of ranks of several hosts, which cannot read each other's: each keeps a copy of what those have written that it reads, and gets it
over the line by which it also hears that they have.

It stands for `PeerMemory` where ranks are apart. A rank's bytes are sent once the device has written them and before the note that
announces them; one line keeps that order. So what a note announces is there when the note is.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tlora.errors import RankError
from tlora.link.lines import Buffer
from tlora.sharing.host_memory import own_pages, pin

Send = Callable[[int, int, memoryview], None]
"""Takes the rank that shall get the bytes, where they begin in this rank's memory, and them; they may change once it has returned."""
_PIECE_BYTES = 1 << 20  # four processes pass a piece on, each once it has all of it


class RelayedMemory:
    """`own` lies in the host's memory, pinned where `device`, to which it is copied, is a GPU; unpinned and freed with this object. `read`
    and `own` are those of a `PeerMemory`.
    """

    def __init__(
        self, num_bytes: int, rank: int, ranks: Sequence[int], device: torch.device, send: Send, heard: Collection[int] | None = None
    ) -> None:
        """Of rank `rank` among `ranks`, whose positions are the peers' numbers. `heard`: the peers that are read here, by default all.
        Raises CapacityError where it cannot be pinned.
        """
        self._rank, self._ranks, self._send = rank, list(ranks), send
        kept = [rank, *(ranks[peer] for peer in (range(len(ranks)) if heard is None else heard))]
        self._parts = {each: own_pages(num_bytes) for each in kept}
        self.own, self.device = self._parts[rank], device
        if device.type == "cuda":
            for part in self._parts.values():
                pin(part, device, self)

    def read(self, peer: int, start: int, target: Tensor) -> None:
        target.copy_(self._parts[self._ranks[peer]][start : start + target.numel()], non_blocking=True)

    def pass_on(self, start: int, size: int, peer: int | None = None) -> None:
        """Send bytes of this rank's to that peer, or to all, where each reads all. The device has written them."""
        assert peer is not None or len(self._parts) == len(self._ranks), "some ranks have no place for what is sent to all"
        for begin, end in _pieces(start, size):
            content = self.own[begin:end].numpy().data
            for rank in self._ranks if peer is None else [self._ranks[peer]]:
                if rank != self._rank:
                    self._send(rank, begin, content)

    def as_integers(self) -> list[np.ndarray]:
        """All of it, of each peer."""
        return [self._parts[rank].view(torch.int64).numpy() for rank in self._ranks]

    def take(self, sender: int, start: int, content: Buffer) -> None:
        """What another rank has sent, which can be written, as `Line.read_bytes` gives it. Raises RankError for what has no place here."""
        part = self._parts.get(sender)
        if part is None or sender == self._rank or not 0 <= start <= start + len(content) <= len(part):
            raise RankError(f"rank {sender} sent {len(content):,} bytes for byte {start:,} of a job that has no such. Start all alike")
        # Words are read meanwhile, and each must be whole.
        kind = torch.int64 if start % 8 == len(content) % 8 == 0 else torch.uint8
        part[start : start + len(content)].view(kind).copy_(torch.frombuffer(content, dtype=kind))


class Relay:
    """The memories of one rank, by the numbers of their meetings. `take` is called by the thread that reads its line, all else by the
    group's own.
    """

    def __init__(self, rank: int, send: Callable[[int, int, int, memoryview], None]) -> None:
        """`send` takes the meeting's number, and what `Send` does."""
        self._rank, self._send = rank, send
        self._memories: dict[int, RelayedMemory] = {}
        self._early: dict[int, list[tuple[int, int, Buffer]]] = {}  # of meetings to which this rank is still on its way
        self._last = -1
        self._lock = threading.Lock()

    def open(
        self, number: int, num_bytes: int, ranks: Sequence[int], device: torch.device, heard: Collection[int] | None = None
    ) -> RelayedMemory:
        """The memory of a meeting with those ranks, of which this is one. Others may have written by now."""
        memory = RelayedMemory(num_bytes, self._rank, ranks, device, partial(self._send, number), heard)
        with self._lock:
            self._memories[number], self._last = memory, max(self._last, number)
            for sender, start, content in self._early.pop(number, []):
                memory.take(sender, start, content)
        return memory

    def close(self, number: int) -> None:
        with self._lock:
            self._memories.pop(number, None)

    def take(self, number: int, sender: int, start: int, content: Buffer) -> None:
        """Bytes of a meeting that is over are dropped."""
        with self._lock:
            memory = self._memories.get(number)
            if memory is not None:
                memory.take(sender, start, content)
            elif number > self._last:  # meetings come in one order to all
                self._early.setdefault(number, []).append((sender, start, content))


class RelayedPeers:
    """Ranks of several hosts that open the same memories in the same order, once in their lives. As `Peers`; who leads them ends all when
    one is lost.
    """

    def __init__(self, relay: Relay, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.world_size = ranks.index(rank), len(ranks)
        self._relay, self._ranks, self._numbers = relay, ranks, itertools.count()

    def open(self, num_bytes: int, device: torch.device, heard: Collection[int] | None = None) -> RelayedMemory:
        """`heard` as of `RelayedMemory`."""
        return self._relay.open(next(self._numbers), num_bytes, self._ranks, device, heard)

    def is_alive(self, peer: int) -> bool:
        return True


def _pieces(start: int, size: int) -> Iterator[tuple[int, int]]:
    for begin in range(start, start + size, _PIECE_BYTES):
        yield begin, min(begin + _PIECE_BYTES, start + size)
