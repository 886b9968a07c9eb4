"""What a tenant's data takes on the disk: its files, and the tokenized sets that intake makes of them under `tokens/TENANT`.

A set is a copy of its files and can be made again. So it goes when one of these is deleted, and when the tenant's storage is full, but not
while an unfinished job needs it. Which sets there are and what they are made of is what lies on the disk; this remembers what it has seen.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection

from tlora.json_file import read_object
from tlora.service.config import Limits
from tlora.service.database import file_rows, job_rows
from tlora.service.database.writer import Writer
from tlora.service.problems import RefusedError
from tlora.service.uploads import SCRATCH

_JUMP_SECONDS = 5.0  # beyond what the system's clock is ever slewed by between two looks


class SteadyClock:
    """Unix time less all jumps ahead that the system's clock has made since this began. So nothing seems older than it is: after a jump
    back, what came before it only seems younger. Safe in several threads; a look a minute sees a jump.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._steady = wall, steady
        self._lock = threading.Lock()
        self._seen = wall(), steady()
        self._ahead = 0.0

    def now(self) -> float:
        with self._lock:
            wall, steady = self._wall(), self._steady()
            jump = (wall - self._seen[0]) - (steady - self._seen[1])
            self._seen = wall, steady
            if jump > _JUMP_SECONDS:
                self._ahead += jump
            return wall - self._ahead


_REMOVED = f"{SCRATCH}removed-"
_RECORDS = "known"  # which requests a set has answered, by file identities: intake's
_LEAVING_SECONDS = 60.0  # for a worker to hear that a job was cancelled
_SCRATCH_SECONDS = 3_600.0  # without a change: whatever was making it is dead


@dataclass(frozen=True, slots=True)
class TokenSet:
    """`files` are the SHA-256 of what it is made of, empty where its `meta.json` is damaged."""

    bytes: int
    made: float
    files: frozenset[str]


@dataclass(frozen=True, slots=True)
class Used:
    """Bytes of a tenant."""

    files: int
    tokens: int


class Storage:
    """Any thread may ask what is used. What may remove a set is called in the writer's turn, so that no job begins to need it meanwhile."""

    def __init__(self, directory: Path, limits: Limits, clock: SteadyClock | None = None) -> None:
        self._root, self._most = directory / "tokens", limits.storage_bytes
        self.clock = clock or SteadyClock()
        self._lock = threading.RLock()
        self._sets: dict[str, dict[str, TokenSet]] = {}  # by tenant and name
        self._admitted: set[tuple[str, str]] = set()  # sets that there was room for, by tenant and name
        self._pruned: set[str] = set()  # tenants whose records name no set that is gone
        self.look()

    def look(self) -> None:
        """At the disk, for sets that came or went."""
        for place in self._tenants():
            names = [path.name for path in place.iterdir() if _is_set(path)]
            with self._lock:
                known = self._sets.setdefault(place.name, {})
                for name in known.keys() - set(names):
                    self._drop(place.name, name)
                known |= self._measure(place.name, (name for name in names if name not in known or not known[name].files))

    def used(self, connection: Connection, tenant: str) -> Used:
        with self._lock:
            tokens = sum(one.bytes for one in self._sets.get(tenant, {}).values())
        return Used(file_rows.live_bytes(connection, tenant), tokens)

    def check(self, connection: Connection, tenant: str, more: int) -> None:
        """Room for `more` bytes; sets that no unfinished job needs are removed for it, the oldest first. Raises RefusedError."""
        with self._lock:
            used = self.used(connection, tenant)
            excess = used.files + used.tokens + more - self._most
            if excess <= 0:
                return
            idle = self._idle(connection, tenant, self._sets.get(tenant, {}), self.clock.now())
            if sum(one.bytes for one in idle.values()) < excess:
                remedy = "Delete files that you do not need, or wait until jobs have ended"
                if more > self._most:
                    remedy = "That alone is more than all of it: send less, or ask the operator for a larger limit (storage_bytes)"
                raise RefusedError(
                    413,
                    "storage_full",
                    f"this tenant's files have {used.files:,} bytes and their tokenized data has {used.tokens:,}; {more:,} more would "
                    f"exceed its {self._most:,}. {remedy}",
                )
            self._make_room(tenant, idle, excess)

    def admit(self, connection: Connection, tenant: str, sets: Collection[str]) -> None:
        """The sets that intake has made for a job of the tenant's. Raises RefusedError where there is no room for them."""
        with self._lock:
            names = {Path(path).name for path in sets}
            admitted = {(tenant, name) for name in names}
            if admitted <= self._admitted:
                return
            known = self._sets.setdefault(tenant, {})
            new = self._measure(tenant, names - known.keys())
            self.check(connection, tenant, sum(one.bytes for one in new.values()))  # without new ones too: `look` may have seen them first
            known |= new
            self._admitted |= admitted

    def clear(self, connection: Connection, tenant: str, now: float) -> list[Path]:
        """Remove sets of files that are deleted, and, beyond the tenant's storage, such as no unfinished job needs. The sets of files that
        the store has no record of stay, and are returned: the store may be an old one that was put back.
        """
        with self._lock:
            sets = self._sets.get(tenant, {})
            recorded, live = file_rows.find_contents(connection, tenant, frozenset().union(*(one.files for one in sets.values())))
            ended = {name: one for name, one in sets.items() if not one.files or one.files & recorded - live}
            for name in self._idle(connection, tenant, ended, now):
                self._remove(tenant, name)
            used = self.used(connection, tenant)
            if (excess := used.files + used.tokens - self._most) > 0:
                kept = {name: one for name, one in sets.items() if one.files <= recorded}
                self._make_room(tenant, self._idle(connection, tenant, kept, now), excess)
            return [self._root / tenant / name for name, one in sets.items() if not one.files <= recorded]

    def sweep(self, writer: Writer, now: float) -> list[Path]:
        """Everything of the kind, of all tenants: see `clear`. Afterwards the bytes of what was removed are gone."""
        self.look()
        unknown: list[Path] = []
        for place in self._tenants():
            if self._sets.get(place.name):
                unknown += writer.do(lambda connection, tenant=place.name: self.clear(connection, tenant, now))
            for path in place.glob(f"{SCRATCH}*"):
                if path.name.startswith(_REMOVED) or now - _last_change(path) > _SCRATCH_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
                    if path.exists():
                        logging.getLogger(__name__).warning("%s: cannot be removed; it is tried again. Check its rights", path)
            if place.name not in self._pruned:
                self._pruned.add(place.name)
                _prune_records(place)
        return unknown

    def _idle(self, connection: Connection, tenant: str, sets: dict[str, TokenSet], now: float) -> dict[str, TokenSet]:
        """Those that no unfinished job needs: neither named by one nor, while intake reads for one, made of its files alone."""
        if not sets:
            return {}
        named, unread = job_rows.find_needed(connection, tenant, now - _LEAVING_SECONDS)
        names = {Path(path).name for path in named}
        return {name: one for name, one in sets.items() if name not in names and not any(one.files <= files for files in unread)}

    def _make_room(self, tenant: str, idle: dict[str, TokenSet], excess: int) -> None:
        for name, one in sorted(idle.items(), key=lambda item: item[1].made):
            if excess <= 0:
                return
            self._remove(tenant, name)
            excess -= one.bytes

    def _remove(self, tenant: str, name: str) -> None:
        """At once from what can be used; `sweep` deletes the bytes."""
        place = self._root / tenant
        try:
            (place / name).rename(place / f"{_REMOVED}{secrets.token_hex(8)}")
        except FileNotFoundError:
            pass
        except OSError as error:
            logging.getLogger(__name__).warning("%s: cannot be removed (%s). Check its rights", place / name, error.strerror)
            return
        self._drop(tenant, name)

    def _drop(self, tenant: str, name: str) -> None:
        self._sets[tenant].pop(name, None)
        self._admitted.discard((tenant, name))
        self._pruned.discard(tenant)

    def _measure(self, tenant: str, names: Iterable[str]) -> dict[str, TokenSet]:
        found: dict[str, TokenSet] = {}
        for name in names:
            try:
                found[name] = _read(self._root / tenant / name)
            except OSError as error:  # gone, or it cannot be looked at: then it is neither counted nor removed
                logging.getLogger(__name__).warning("%s: cannot be read (%s)", self._root / tenant / name, error.strerror)
        return found

    def _tenants(self) -> list[Path]:
        return [place for place in self._root.iterdir() if place.is_dir()] if self._root.is_dir() else []


def _is_set(path: Path) -> bool:
    return path.is_dir() and path.name != _RECORDS and not path.name.startswith(SCRATCH)


def _read(path: Path) -> TokenSet:
    """Raises OSError. A set's directory is put in place whole, so that one without a readable `meta.json` is damaged."""
    size = sum(file.stat().st_size for file in path.iterdir())
    try:
        files = frozenset(Path(str(file)).name.partition(".")[0] for file in read_object(path / "meta.json")["report"]["files"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        files = frozenset[str]()
    return TokenSet(size, path.stat().st_mtime, files)


def _last_change(scratch: Path) -> float:
    """Of a directory that is being filled, its files' too."""
    try:
        return max(path.stat().st_mtime for path in (scratch, *scratch.iterdir()))
    except OSError:  # it was put in place, or removed, meanwhile
        return math.inf


def _prune_records(place: Path) -> None:
    for record in (place / _RECORDS).glob("*.json"):
        try:
            sets = json.loads(record.read_text(encoding="utf-8")).values()
            stale = any(name is not None and not (place / str(name)).is_dir() for name in sets)
        except (OSError, ValueError, AttributeError):
            stale = True
        if stale:
            record.unlink(missing_ok=True)
