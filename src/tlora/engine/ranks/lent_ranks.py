"""The leader's end of ranks on other hosts: a port at which workers that lend their GPUs come in, and their ranks as if they were here.

A lent rank is started, spoken to and ended through its lender. It computes parts of jobs and writes nothing that lasts, so its end need
not be awaited.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tlora.engine.messages import FROM_RANK, FromRank, Sending
from tlora.engine.ranks.lending_line import LENDING, Frame, KillRank, LendingMessage, Lent, RankEnded, StartRank, framed, read_frame
from tlora.errors import RankError
from tlora.link.keyed_listener import KeyedListener
from tlora.link.lines import Buffer, Line
from tlora.link.tls import CUT_SECONDS
from tlora.link.tls_port import ADMISSION_SECONDS
from tlora.worker_protocol import Listening

Hear = Callable[[int, FromRank | Sending | None], object]


class LostLenderError(RankError):
    """A host that has lent its GPUs is lost. What is here is sound: the jobs go on from their checkpoints."""


class LentRank:
    """One rank, for `RankGroup`: its process (as `SupervisedProcess`), and the line to it."""

    pid = 0
    exit_status = None

    def __init__(self, rank: int, gpu: int) -> None:
        self.rank, self.gpu = rank, gpu
        self.line: Line | None = None  # of its lender, once that has come
        self._unsent: list[bytes] = []
        self._ended, self._how, self._lock = threading.Event(), "", threading.Lock()

    def begin(self, line: Line) -> None:
        with self._lock:
            self.line = line
            for frame in (LENDING.encode(StartRank(self.rank, self.gpu)), *self._unsent):
                line.send(frame)
            self._unsent.clear()

    def send(self, *parts: Buffer) -> None:
        """A message to the rank, with the bytes that belong to it."""
        frame = framed(self.rank, parts)
        with self._lock:
            if self.line is None:
                self._unsent.append(b"".join(frame))
            else:
                self.line.send(*frame)

    def end(self) -> None:
        """Nothing more is said to it; its lender stays."""

    def set_ended(self, how: str) -> None:
        if not self._ended.is_set():
            self._how = how
            self._ended.set()

    # -- as a process ----------------------------------------------------------------------------------------------------

    def why_lost(self) -> str:
        return self._how if self._ended.is_set() else ""

    def wait(self, timeout_seconds: float | None = None) -> bool:
        return self._ended.wait(timeout_seconds)

    def kill(self, timeout_seconds: float | None = None) -> None:
        with self._lock:
            if self.line is not None:
                self.line.send(LENDING.encode(KillRank(self.rank)))
        self.set_ended("was ended")

    def how_it_ended(self) -> str:
        return self._how if self._ended.is_set() else "has not ended"


@dataclass
class _Lender:
    line: Line
    host: str
    gpus: tuple[int, ...]
    ranks: list[LentRank] = field(default_factory=list[LentRank])


class LentRanks:
    """`hear` gets what the ranks say, and None when their line has ended, from a thread for each lender."""

    def __init__(self, address: str, directory: Path, hear: Hear) -> None:
        """As `KeyedListener`. Raises OSError where it cannot listen there."""
        self._hear = hear
        self._lenders: dict[int, _Lender] = {}  # by GPU
        self._wanted = set[int]()
        self._waiting: dict[int, LentRank] = {}  # ranks whose lender has not come, by GPU
        self._closed, self._lock = False, threading.Lock()
        self._listener = KeyedListener(address, directory, self._serve)
        self.listening = Listening(self._listener.address, self._listener.fingerprint, self._listener.key)

    def add(self, rank: int, gpu: int) -> LentRank:
        """A rank on that GPU, which begins as soon as its lender is here."""
        made = LentRank(rank, gpu)
        with self._lock:
            self._wanted.add(gpu)
            lender = self._lenders.get(gpu)
            if lender is None:
                self._waiting[gpu] = made
            else:
                lender.ranks.append(made)
                made.begin(lender.line)
        return made

    def release(self, wanted: set[int]) -> None:
        """Let the lenders go none of whose GPUs is `wanted`, once their ranks have ended."""
        with self._lock:
            self._wanted = wanted
            self._waiting = {gpu: rank for gpu, rank in self._waiting.items() if gpu in wanted}
            self._let_go()

    def _let_go(self) -> None:
        for lender in self._lenders.values():
            if self._wanted.isdisjoint(lender.gpus) and lender.ranks and all(rank.wait(0.0) for rank in lender.ranks):
                lender.line.end()

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            self._closed = True
            for lender in self._lenders.values():
                lender.line.end()

    # -- those that come -------------------------------------------------------------------------------------------------

    def _serve(self, line: Line) -> None:
        """Raises OSError, ValueError."""
        lender = self._admit(line)
        try:
            self._read(line, lender)
        finally:
            self._lose(lender)

    def _admit(self, line: Line) -> _Lender:
        """Raises ValueError for one whose GPUs another lends, and where no lender is wanted any more."""
        first = LENDING.decode(line.read_line(ADMISSION_SECONDS) or b"")
        if not isinstance(first, Lent):
            raise ValueError(f"{type(first).__name__} comes first, and not Lent")
        lender = _Lender(line, first.host, first.gpus)
        with self._lock:
            if self._closed:
                raise ValueError("the group has ended")
            if not self._lenders.keys().isdisjoint(first.gpus):
                raise ValueError(f"GPUs {first.gpus} are lent already")
            self._lenders |= dict.fromkeys(first.gpus, lender)
            for gpu in first.gpus:
                if (rank := self._waiting.pop(gpu, None)) is not None:
                    lender.ranks.append(rank)
                    rank.begin(line)
        return lender

    def _read(self, line: Line, lender: _Lender) -> None:
        """Until the line ends. Raises ValueError, and TimeoutError for a lender that is silent: its host's kernel may still answer."""
        while (received := line.read_line(CUT_SECONDS)) is not None:
            said: LendingMessage = LENDING.decode(received)
            if isinstance(said, Lent):  # it is still there
                continue
            own = {rank.rank: rank for rank in lender.ranks}
            rank = own.get(said.rank) if isinstance(said, Frame | RankEnded) else None
            if rank is None:
                raise ValueError(f"{type(said).__name__} of a rank that is not its own")
            if isinstance(said, RankEnded):
                rank.set_ended(said.how)
                self._hear(rank.rank, None)
                with self._lock:
                    self._let_go()
            elif isinstance(said, Frame):
                self._hear(rank.rank, read_frame(line, said, FROM_RANK.decode))

    def _lose(self, lender: _Lender) -> None:
        with self._lock:
            self._lenders = {gpu: other for gpu, other in self._lenders.items() if other is not lender}
        for rank in lender.ranks:
            rank.set_ended(f"host {lender.host}, which has lent its GPU, is gone or cut off")
            self._hear(rank.rank, None)
