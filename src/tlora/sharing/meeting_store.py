"""The store by which ranks of unequal histories connect their symmetric memory.

torch exchanges a few words of each rank under `<kind of memory>/<number>/<rank>`. That number is the process's: it counts all exchanges
that it has ever had, with whatever ranks. Ranks that have not had the same ones before, as one has come later, name different keys, and
each waits for what the other never writes, in C++ code that holds the GIL.
"""

from __future__ import annotations

import re
from datetime import timedelta

from torch.distributed import Store

from tlora.sharing.peers import Peers

_NUMBERED = re.compile(r"(?P<kind>.+?)/(?P<number>[0-9]+)(?P<rest>(?:/[^/]+)?)")


class MeetingStore(Store):
    """The store of `peers` for one meeting of all of them: exchanges are numbered in the order in which this rank comes to them. torch's
    C++ calls it, so keep it as long as that may. Raises RankError for a peer that dies or does not come, as `Peers` does.
    """

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self._peers = peers
        self._numbers: dict[str, dict[int, int]] = {}  # kind of memory -> number in the process -> number here

    def _key(self, key: str) -> str:
        if (found := _NUMBERED.fullmatch(key)) is not None:
            numbers = self._numbers.setdefault(found["kind"], {})
            key = f"{found['kind']}/{numbers.setdefault(int(found['number']), len(numbers))}{found['rest']}"
        return f"memory-{self._peers.name}/{key}"

    def _wait_for(self, key: str) -> None:
        self._peers.wait_for(key, "connect memory")

    def set(self, key: str, value: str) -> None:
        self._peers.store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        self._wait_for(named := self._key(key))
        return self._peers.store.get(named)

    def add(self, key: str, value: int) -> int:
        return self._peers.store.add(self._key(key), value)

    def check(self, keys: list[str]) -> bool:
        return self._peers.store.check([self._key(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """`timeout` is torch's own: the peers' holds here."""
        for key in keys:
            self._wait_for(self._key(key))
