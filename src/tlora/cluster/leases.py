"""Which jobs workers of other hosts may be writing, on disk before they are told: a controller that was killed could not see their end.

One file per job in the store's `workers/leases/`, written by the controller alone. Whether a job's files may be put in place is decided
by the number of its attempt (`link/job_lease.py`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tlora import durable
from tlora.json_file import read_object

DIRECTORY = "leases"


@dataclass(frozen=True, slots=True)
class HeldLease:
    """The worker process `incarnation` may hold that attempt of a job, until it says otherwise or has heard nothing for `lease_seconds`."""

    attempt: int
    incarnation: str
    lease_seconds: float


class Leases:
    """Of one store. `withheld`: jobs that workers of an earlier controller may still hold, which have not come yet."""

    def __init__(self, directory: Path) -> None:
        """`directory`: the store's `workers/`. Files are whole, as they are written durably."""
        self._directory = directory / DIRECTORY
        found = {path.stem: _read(path) for path in self._directory.glob("*.json")}
        self._known: dict[str, HeldLease] = {name: lease for name, lease in found.items() if lease is not None}
        self._of: dict[str, set[str]] = {}  # incarnation -> jobs that it was granted; of some another has the lease by now
        for name, lease in self._known.items():
            self._of.setdefault(lease.incarnation, set()).add(name)
        self.withheld: set[str] = set(self._known)

    @property
    def longest_seconds(self) -> float:
        """After which all that is withheld is free: no worker has heard of an earlier controller since this one began."""
        return max((self._known[name].lease_seconds for name in self.withheld), default=0.0)

    def arrive(self, incarnation: str) -> None:
        """The worker has come, and says itself what it holds."""
        self.withheld -= self._of.get(incarnation, set())

    def release_withheld(self) -> list[str]:
        """Their leases have ended. Returns the jobs' names."""
        names, self.withheld = sorted(self.withheld), set()
        for incarnation in {self._known[name].incarnation for name in names}:
            self.keep(incarnation, ())
        return names

    def grant(self, incarnation: str, attempts: Mapping[str, int], lease_seconds: float) -> None:
        """Write down what the worker is about to be told to have. Raises CheckpointError."""
        for name, attempt in attempts.items():
            lease = HeldLease(attempt, incarnation, lease_seconds)
            if self._known.get(name) != lease:
                durable.make_directory(self._directory)
                durable.write_file(self._directory / f"{name}.json", json.dumps(asdict(lease)) + "\n")
                self._known[name] = lease
                self._of.setdefault(incarnation, set()).add(name)

    def keep(self, incarnation: str, held: Iterable[str]) -> None:
        """Forget the jobs that the worker, which has come, does not hold any more: `held` are those that it does."""
        kept = self._of.get(incarnation, set())
        for name in kept.difference(held):
            with contextlib.suppress(OSError):
                if name in self._known and self._known[name].incarnation == incarnation:
                    (self._directory / f"{name}.json").unlink(missing_ok=True)
                    del self._known[name]
                kept.discard(name)
        if not kept:
            self._of.pop(incarnation, None)


def _read(path: Path) -> HeldLease | None:
    try:
        return HeldLease(**read_object(path))
    except (OSError, ValueError, TypeError):
        return None
