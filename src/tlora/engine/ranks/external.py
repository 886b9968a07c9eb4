"""Ranks of torchrun or a cluster's launcher: it runs `tlora train` once for each GPU of this host, with the rank in the environment.

Rank 0 owns the run and starts a process for its own GPU; the others find it through the launcher's rendezvous and obey.
"""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tlora.errors import ConfigError, first_line
from tlora.job import RunSpec
from tlora.link.log import note

_KEY = "tlora/owner"
_MEET_SECONDS = 300.0  # for the processes of a launcher to find each other


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


def tell_ranks(address: str, launch: Launched) -> object:
    """On rank 0: where the others find it. What is returned must be kept until they have come. Raises ConfigError where they do not."""
    store = _rendezvous(launch)
    store.set(_KEY, f"{platform.node()}|{address}")
    return store


def find_owner(launch: Launched) -> str:
    """On another rank: the address for `rank.serve`. Raises ConfigError for an owner on another host, and where none comes."""
    store = _rendezvous(launch)
    try:
        found = store.get(_KEY)
    except RuntimeError as error:
        raise _alone(launch, error) from None
    host, _, address = found.decode().partition("|")
    if host != platform.node():
        raise ConfigError(f"rank {launch.rank} is on {platform.node()}, and rank 0 on {host}: a run is on one host. Launch one for each")
    return address


def _rendezvous(launch: Launched) -> Any:
    """The store that the launcher's environment names, in which all its processes meet."""
    others, place = launch.count - 1, f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if not os.environ.get("TORCHELASTIC_RUN_ID"):  # else torchrun is there: it has started the others, and ends all when one is lost
        note(
            f"RANK={launch.rank} and WORLD_SIZE={launch.count} are set, as by a launcher: waiting up to {_MEET_SECONDS:.0f} s for "
            f"{others} other process{'es' * (others > 1)} at {place}. To run alone: unset RANK WORLD_SIZE"
        )
    from torch.distributed import rendezvous

    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_MEET_SECONDS)))
    except (RuntimeError, ValueError) as error:
        raise _alone(launch, error) from None
    return store


def _alone(launch: Launched, error: Exception) -> ConfigError:
    """Of processes that were not launched, or not all of them."""
    why = first_line(error)
    return ConfigError(
        f"RANK={launch.rank} and WORLD_SIZE={launch.count} are set, and the other processes did not come within {_MEET_SECONDS:.0f} s "
        f"({why}). Unset RANK and WORLD_SIZE to run alone, or launch all {launch.count} processes"
    )
