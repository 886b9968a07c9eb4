"""Ranks of torchrun or a cluster's launcher: it runs `tlora train` once for each GPU of this host, with the rank in the environment.

Rank 0 owns the run and starts a process for its own GPU; the others find it through the launcher's rendezvous and obey.
"""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from typing import Any

from tlora.errors import ConfigError
from tlora.job import RunSpec

_KEY = "tlora/owner"


@dataclass(frozen=True)
class Launched:
    """This process is rank `rank` of `count`."""

    rank: int
    count: int


def launched() -> Launched | None:
    """What the launcher has put into the environment; None without one, or with one process. Raises ConfigError for half of it."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    if len(given) < len(names):
        return None
    try:
        rank, count = int(given["RANK"]), int(given["WORLD_SIZE"])
    except ValueError:
        raise ConfigError(
            f"RANK={given['RANK']} and WORLD_SIZE={given['WORLD_SIZE']} must be whole numbers. Unset them to run alone"
        ) from None
    if not 0 <= rank < count:
        raise ConfigError(f"RANK={rank} must be from 0 to WORLD_SIZE - 1 = {count - 1}. Unset both to run alone")
    if (local := os.environ.get("LOCAL_WORLD_SIZE")) and int(local) != count:
        raise ConfigError(f"{count} ranks are launched, {local} of them on this host: a run is on one host. Launch one run for each host")
    return Launched(rank, count) if count > 1 else None


def digest_of(run: RunSpec) -> str:
    """Of the jobs file as it was read: two ranks with different ones must not train together."""
    return hashlib.sha256(run.model_dump_json().encode()).hexdigest()


def tell_ranks(address: str) -> object:
    """On rank 0: where the others find it. What is returned must be kept until they have come."""
    store = _rendezvous()
    store.set(_KEY, f"{socket.gethostname()}|{address}")
    return store


def find_owner(launch: Launched) -> str:
    """On another rank: the address for `rank.serve`. Raises ConfigError for an owner on another host."""
    host, _, address = _rendezvous().get(_KEY).decode().partition("|")
    if host != socket.gethostname():
        raise ConfigError(
            f"rank {launch.rank} is on {socket.gethostname()}, and rank 0 on {host}: a run is on one host. Launch one for each"
        )
    return address


def _rendezvous() -> Any:
    """The store that the launcher's environment names."""
    from torch.distributed import rendezvous

    store, _, _ = next(rendezvous("env://"))
    return store
