"""Ranks that have had other exchanges before agree through the store that torch's symmetric memory gets."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store

from tests.sharing.ranks import start_ranks, store_path
from tlora.errors import RankError
from tlora.sharing.meeting_store import MeetingStore
from tlora.sharing.peer_memory import _register_group  # pyright: ignore[reportPrivateUsage]
from tlora.sharing.peers import Peers, Sharing

KIND = "CUDASymmetricMemory"


HAS_BARRIERS = pytest.mark.skipif(not hasattr(PrefixStore, "barrier"), reason="this torch's stores have no barriers")


class StoreExchange:
    """torch's of that name (`symm_mem/CUDASymmetricMemoryUtils.hpp`), of one process: one number for all that it ever exchanges. Through a
    PrefixStore, so that C++ calls the store.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def put(self, store: Store, rank: int, value: bytes) -> None:
        PrefixStore(KIND, store).set(f"{self.number}/{rank}", value)  # pyright: ignore[reportArgumentType]

    def keys(self, world_size: int) -> list[str]:
        return [f"{self.number}/{rank}" for rank in range(world_size)]

    def all_gather(self, store: Store, rank: int, world_size: int, value: bytes) -> list[bytes]:
        self.put(store, rank, value)
        found = PrefixStore(KIND, store).multi_get(self.keys(world_size))
        self.number += 1
        return found

    def barrier(self, store: Store, world_size: int) -> None:
        through: Any = PrefixStore(KIND, store)
        through.barrier(str(self.number), world_size)
        self.number += 1


def on_threads(function: Callable[[int], Any], world_size: int = 2) -> list[Any]:
    """`function` of each rank, all at a time: whoever waits with the GIL held keeps the others from what it waits for."""
    with ThreadPoolExecutor(world_size) as threads:
        return [thread.result() for thread in [threads.submit(function, rank) for rank in range(world_size)]]


@HAS_BARRIERS
def test_ranks_that_have_met_others_before_exchange_through_it_and_not_without() -> None:
    """Three ranks: 0 and 1 have met twice, then 1 and 2, then all. Bytes that are no text come through."""
    stores, exchanges = HashStore(), [StoreExchange(0), StoreExchange(0), StoreExchange(0)]

    def meet(about: str, ranks: list[int]) -> list[list[bytes]]:
        def rank_of(place: int) -> list[bytes]:
            store = MeetingStore(Peers(Sharing(PrefixStore(about, stores), place, len(ranks), timeout_seconds=60)))
            exchange = exchanges[ranks[place]]
            found = exchange.all_gather(store, place, len(ranks), b"\xff\x00" + bytes([ranks[place]]))
            found += exchange.all_gather(store, place, len(ranks), about.encode())
            exchange.barrier(store, len(ranks))
            return found

        return on_threads(rank_of, len(ranks))

    for about, ranks in (("first", [0, 1]), ("second", [1, 0]), ("third", [1, 2]), ("fourth", [0, 1, 2])):
        assert meet(about, ranks) == [[b"\xff\x00" + bytes([rank]) for rank in ranks] + [about.encode()] * len(ranks)] * len(ranks)
    assert [exchange.number for exchange in exchanges] == [9, 12, 6]
    plain = HashStore()
    for rank, exchange in enumerate(exchanges):
        exchange.put(plain, rank, b"here")
    assert not PrefixStore(KIND, plain).check(exchanges[0].keys(3))  # though all have written


def test_exchanges_of_other_meetings_in_between_and_other_keys_change_nothing() -> None:
    kept = HashStore()
    store = MeetingStore(Peers(Sharing(kept, 0, 1)))
    before = set(kept.list_keys())
    for number, value in ((7, "seven"), (9, "nine"), (7, "again")):  # 8 was in another meeting
        store.set(f"{KIND}/{number}/0", value)
    store.set("NCCLAllocation/3/0", "of another kind")
    store.set("name", "as it is")
    assert store.add("count", 2) == 2 and store.add("count", 3) == 5
    assert {key.split("/", 1)[1] for key in set(kept.list_keys()) - before} == {
        f"{KIND}/0/0",
        f"{KIND}/1/0",
        "NCCLAllocation/0/0",
        "name",
        "count",
    }
    assert [store.get(key) for key in (f"{KIND}/7/0", f"{KIND}/9/0", "name")] == [b"again", b"nine", b"as it is"]
    assert store.check([f"{KIND}/9/0", "name"]) and not store.check([f"{KIND}/7/0", f"{KIND}/7/1"])


def connect(rank: int, path: str, dies: bool) -> Any:
    """As `_connect_symmetric` does, on a process that has had as many exchanges as its rank says; rank 1 can die before its last word."""
    peers = Peers(Sharing(FileStore(path, 2), rank, 2))
    store, exchange = MeetingStore(peers), StoreExchange(5 * rank)
    group = _register_group(peers, store)
    used: Any = group.get_group_store()
    found = exchange.all_gather(used, rank, 2, f"rank {rank}".encode())
    if dies and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        exchange.barrier(used, 2)
    except RankError as error:
        return str(error)
    return found


@HAS_BARRIERS
@pytest.mark.parametrize("dies", [False, True])
def test_a_process_group_takes_it_and_a_rank_that_dies_in_the_exchange_is_noticed(dies: bool, tmp_path: Path) -> None:
    path = store_path(tmp_path)
    with start_ranks(2) as ranks:
        for rank in range(2):
            ranks.send(rank, connect, path, dies)
        said = ranks.answers()
    both = [b"rank 0", b"rank 1"]
    if dies:
        assert "rank 1 has died" in said[0] and said[1] is None
    else:
        assert said == [both, both]


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_was_said() -> None:
    kept = HashStore()
    peers = on_threads(lambda rank: Peers(Sharing(kept, rank, 3, timeout_seconds=600)), 3)
    peers[0]._sharing = replace(peers[0]._sharing, timeout_seconds=0.2)
    with pytest.raises(RankError, match="rank 1 or 2 of 3 has not come to 'connect memory' within 0.2 s"):
        StoreExchange(0).all_gather(MeetingStore(peers[0]), 0, 3, b"alone")
