"""The ranks that share a base: how they find each other and exchange a few words, and what happens when one is lost.

Ranks talk while the base is loaded. Afterwards none waits for another.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import Store

from tlora.errors import RankError, TloraError

BASE_LOADED, STAGES_CONNECTED = "the base was loaded", "the stages of the base were connected"  # occasions of `Sharing`
_POLL_SECONDS, _LOOK_EVERY = 0.01, 20  # polls between two looks at a process
_FAILED = "failed"
_NAMESPACE = Path("/proc/self/ns/pid")  # in which process numbers are valid


@dataclass(frozen=True)
class Sharing:
    """One of `world_size` ranks of a host that load the same base together, and hold each decoder layer in as many pieces.

    `store` is torch's (TCPStore, FileStore, or a PrefixStore of one), with no keys of an earlier load. `slots`: how many layers' weights a
    rank has at a time, 2 at least: one runs, the others are on their way. `timeout_seconds` bounds each wait for another rank. `occasion`:
    what was going on as they met, for messages.
    """

    store: Store
    rank: int
    world_size: int
    slots: int = 2
    timeout_seconds: float = 600.0
    occasion: str = BASE_LOADED

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise RankError(f"rank {self.rank} of {self.world_size} cannot be: ranks count from 0. Give one below world_size")
        if self.slots < 2:
            raise RankError(f"slots is {self.slots}, and must be 2 or more: one layer runs while the next is fetched. Give 2 or 3")


class Peers:
    """The ranks of a `Sharing` after they have met: each knows the others' processes. Raises RankError if one does not come in time."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing, self.store = sharing, sharing.store
        self.rank, self.world_size, self.slots = sharing.rank, sharing.world_size, sharing.slots
        self._processes: dict[int, psutil.Process | None] = {}  # of the ranks that can be seen from here; None has ended since
        namespace = str(_NAMESPACE.stat().st_ino) if _NAMESPACE.exists() else ""
        met = self.exchange("process", [os.getpid(), namespace, uuid.uuid4().hex])
        self.name: str = met[0][2]  # of this meeting, the same on all ranks
        for peer, (pid, its_namespace, _) in enumerate(met):
            if its_namespace == namespace and peer != self.rank:
                self._processes[peer] = _find_process(pid)

    def exchange(self, key: str, value: Any) -> list[Any]:
        """What each rank says under `key`, by rank; JSON. Each key once. Raises RankError for a rank that fails, dies or does not come."""
        deadline = time.monotonic() + self._sharing.timeout_seconds
        try:
            self.store.set(f"{key}/{self.rank}", json.dumps(value))
            for peer in range(self.world_size):
                self._wait_for(f"{key}/{peer}", [peer], key, deadline)
            return [json.loads(self.store.get(f"{key}/{peer}")) for peer in range(self.world_size)]
        except RuntimeError as error:  # of torch's stores: the rank that keeps it is gone
            raise RankError(f"the ranks' store cannot be reached any more: {str(error).splitlines()[0]}. Start all ranks again") from None

    def wait_for(self, key: str, what: str) -> None:
        """Return once the store has `key`, which another rank sets as it comes to `what`. Other threads run meanwhile. Raises RankError
        for a rank that fails, dies or does not come.
        """
        others = [peer for peer in range(self.world_size) if peer != self.rank]
        self._wait_for(key, others, what, time.monotonic() + self._sharing.timeout_seconds)

    def _wait_for(self, key: str, peers: Sequence[int], what: str, deadline: float) -> None:
        polls = 0
        while not self.store.check([key]):
            if self.store.check([_FAILED]):
                raise RankError(f"the base was not loaded: {self.store.get(_FAILED).decode()}. Mend that and start all ranks again")
            dead = [peer for peer in peers if not self.is_alive(peer)] if polls % _LOOK_EVERY == 0 else []
            if dead and not self.store.check([key]):  # its last word may have come since
                raise RankError(f"rank {dead[0]} has died while {self._sharing.occasion}. Look at what it said and start all ranks again")
            if time.monotonic() > deadline:
                raise RankError(
                    f"rank {' or '.join(map(str, peers))} of {self.world_size} has not come to {what!r} within "
                    f"{self._sharing.timeout_seconds:g} s. Start all ranks together, with the same world size and store"
                )
            polls += 1
            time.sleep(_POLL_SECONDS)

    def is_alive(self, peer: int) -> bool:
        """False once the process of `peer` has ended. True of one that cannot be seen from here."""
        if peer not in self._processes:
            return True
        process = self._processes[peer]
        try:
            return process is not None and process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.NoSuchProcess:
            return False

    def agree(self, key: str, value: Any, what: str) -> None:
        """Raise RankError unless all ranks have the same `value`, of `what`."""
        for peer, other in enumerate(self.exchange(key, value)):
            if other != value:
                raise RankError(f"rank {peer} has {what} {other}, and rank {self.rank} has {value}. Start all ranks alike")

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks of an error within, so that they end too instead of waiting."""
        try:
            yield
        except Exception as error:
            why = str(error) if isinstance(error, TloraError) else f"{type(error).__name__}: {error}"
            with suppress(RuntimeError):  # the store is gone, and the others notice that themselves
                if not self.store.check([_FAILED]):
                    self.store.set(_FAILED, f"rank {self.rank} failed ({why})")
            raise


def _find_process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None
