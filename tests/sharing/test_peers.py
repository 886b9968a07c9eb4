"""How ranks meet and what they say when one is lost, fails or differs: real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, HashStore, TCPStore

from tests.sharing.ranks import Ranks, start_ranks, store_path
from tlora.errors import RankError
from tlora.sharing.peer_memory import open_peer_memory
from tlora.sharing.peers import Peers, Sharing

CPU = torch.device("cpu")


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Two that may die."""
    with start_ranks(2) as found:
        yield found


def meet(rank: int, store: str, timeout_seconds: float = 100.0) -> Peers:
    return Peers(Sharing(FileStore(store, 2), rank, 2, timeout_seconds=timeout_seconds))


def message_of(rank: int, store: str, what: str) -> str:
    """What rank 0 reads when rank 1 is lost, fails, differs or never comes."""
    try:
        peers = meet(rank, store, 0.2 if what == "never comes" and rank == 0 else 100.0)
        with peers.telling():
            if rank == 1 and what == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1 and what == "fails":
                raise MemoryError("no room")
            peers.agree("base", rank if what == "differs" else 0, "a base of layout")
            peers.exchange("filled", True)
    except (RankError, MemoryError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("dies", "rank 1 has died while the base was loaded"),
        pytest.param("fails", "rank 1 failed (MemoryError: no room)", marks=pytest.mark.slow),
        pytest.param("differs", "rank 1 has a base of layout 1, and rank 0 has 0. Start all ranks alike", marks=pytest.mark.slow),
    ],
)
def test_who_waits_for_a_rank_that_is_lost_hears_why(what: str, expected: str, ranks: Ranks, tmp_path: Path) -> None:
    store = store_path(tmp_path)
    for rank in range(2):
        ranks.send(rank, message_of, store, what)
    assert expected in ranks.answers()[0]


def test_a_rank_that_dies_before_it_was_looked_for_has_died() -> None:
    """It has met the others, and is gone when they look for its process."""
    store = HashStore()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    store.set("process/1", json.dumps([ended.pid, str(Path("/proc/self/ns/pid").stat().st_ino), "name"]))
    peers = Peers(Sharing(store, 0, 2))
    assert not peers.is_alive(1)
    with pytest.raises(RankError, match="rank 1 has died while the base was loaded"):
        peers.exchange("filled", True)
    peers = Peers(Sharing(store, 0, 2, occasion="the ranks that job a spans were connected"))
    with pytest.raises(RankError, match="rank 1 has died while the ranks that job a spans were connected. Look at what it said"):
        peers.exchange("filled", True)


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_was_said(tmp_path: Path) -> None:
    assert "rank 1 of 2 has not come to 'process' within 0.2 s. Start all ranks together" in message_of(
        0, store_path(tmp_path), "never comes"
    )


@pytest.mark.parametrize(
    ("rank", "slots", "expected"), [(2, 2, "rank 2 of 2 cannot be"), (-1, 2, "rank -1 of 2"), (0, 1, "slots is 1, and must be 2")]
)
def test_bad_numbers_are_refused(rank: int, slots: int, expected: str) -> None:
    with pytest.raises(RankError, match=expected):
        Sharing(HashStore(), rank, 2, slots)


def read_after_death(rank: int, store: str, num_bytes: int) -> tuple[bool, bool, bool]:
    peers = meet(rank, store)
    memory = open_peer_memory(num_bytes, peers, CPU)
    memory.own.fill_(rank + 1)
    was_alive = peers.is_alive(1)
    peers.exchange("filled", True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while peers.is_alive(1):
        pass
    target = torch.empty(num_bytes, dtype=torch.uint8)
    memory.read(1, 0, target)
    return was_alive, peers.is_alive(1), bool((target == 2).all())


def test_what_a_killed_rank_held_is_still_read_and_nobody_hangs(ranks: Ranks, tmp_path: Path) -> None:
    store = store_path(tmp_path)
    for rank in range(2):
        ranks.send(rank, read_after_death, store, 100_000)
    assert ranks.answers() == [(True, False, True), None]
    assert not list(Path("/dev/shm").glob("*tlora*"))


def open_memory(rank: int, store: str, num_bytes: int) -> str:
    try:
        open_peer_memory(num_bytes + rank, meet(rank, store), CPU)
    except RankError as error:
        return str(error)
    return "opened"


def test_memory_of_other_sizes_is_refused_by_both(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks.run(open_memory, store_path(tmp_path), 4096)
    assert all("Start all ranks alike" in line for line in said)


def test_one_rank_alone_has_all(tmp_path: Path) -> None:
    peers = Peers(Sharing(HashStore(), 0, 1))
    memory = open_peer_memory(100, peers, CPU)
    memory.own.fill_(3)
    target = torch.zeros(50, dtype=torch.uint8)
    memory.read(0, 50, target)
    assert bool((target == 3).all())


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_gpus_that_cannot_be_had_are_refused_with_both_reasons() -> None:
    with pytest.raises(RankError, match=r"symmetric memory .*: .*IPC handles .*: .*one host"):
        open_peer_memory(100, Peers(Sharing(HashStore(), 0, 1)), torch.device("cuda", 0))


def lose_the_store(rank: int, directory: str) -> str:
    """Rank 0 keeps the store, and is killed as both have met."""
    file = Path(directory) / "port"
    if rank == 0:
        store = TCPStore("localhost", 0, 2, is_master=True, wait_for_workers=False)
        file.with_suffix(".new").write_text(str(store.port))
        file.with_suffix(".new").rename(file)
    else:
        while not file.exists():
            pass
        store = TCPStore("localhost", int(file.read_text()), 2, is_master=False, wait_for_workers=False)
    peers = Peers(Sharing(store, rank, 2))
    try:
        peers.exchange("met", True)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        peers.exchange("filled", True)
    except RankError as error:
        return str(error)
    return "nothing"


def test_who_loses_the_store_says_so(ranks: Ranks, tmp_path: Path) -> None:
    for rank in range(2):
        ranks.send(rank, lose_the_store, str(tmp_path))
    _, said = ranks.answers()
    assert "the ranks' store cannot be reached any more" in said or "rank 0 has died" in said


def test_another_system_than_linux_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(RankError, match="on Linux only, which this is not"):
        open_peer_memory(100, Peers(Sharing(HashStore(), 0, 1)), CPU)


def test_memory_that_cannot_be_opened_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another container, where a process has another number."""
    peers = Peers(Sharing(HashStore(), 0, 1))
    exchange = peers.exchange
    monkeypatch.setattr(peers, "exchange", lambda key, value: [[2**22 + 1, 3]] if key == "descriptor" else exchange(key, value))
    with pytest.raises(RankError, match="memory .* one user in one container"):
        open_peer_memory(100, peers, CPU)
