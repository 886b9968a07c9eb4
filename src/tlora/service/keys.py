"""API keys: 256 random bits, shown once, stored as their hash; each belongs to a tenant and has scopes."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, select, update

from tlora import durable
from tlora.api import DEFAULT_TENANT, SCOPES, Scope
from tlora.errors import ConfigError
from tlora.job import NAME_PATTERN
from tlora.service.database.tables import keys, tenants

PREFIX = "tml-"
_LOOKUP_DIGITS = 16
_VALID = (
    select(keys.c.id, keys.c.tenant, keys.c.hash, keys.c.scopes, tenants.c.name.label("tenant_name"))
    .join(tenants, tenants.c.id == keys.c.tenant)
    .where(keys.c.revoked.is_(None))
)
_REMEMBER_SECONDS = 2.0  # a key that another process revoked is refused after so long
_MOST_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a key stands for. `is_operator`: the key is another tenant's, and acts on this one's jobs."""

    key_id: str
    tenant: str
    scopes: frozenset[str]
    is_operator: bool = False

    @property
    def words(self) -> str:
        """Who it is, for the events of a job."""
        return "an operator" if self.is_operator else "its owner"


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made. `secret` is never seen again."""

    id: str
    tenant: str
    name: str
    scopes: tuple[Scope, ...]
    created: float
    secret: str


def new_id(kind: str) -> str:
    """An opaque id: `job-3f…`, 96 random bits."""
    return f"{kind}-{secrets.token_hex(12)}"


def hash_key(secret: str) -> str:
    """SHA-256: a key has 256 random bits, so that no slow hash is needed."""
    return hashlib.sha256(secret.encode()).hexdigest()


def create_key(connection: Connection, tenant_name: str, name: str, scopes: Sequence[str]) -> NewKey:
    """A key for the tenant of that name, which is made if there is none. Raises ConfigError."""
    for text, what in ((tenant_name, "tenant"), (name, "name")):
        if not NAME_PATTERN.fullmatch(text):
            raise ConfigError(f"{what} {text!r} must match {NAME_PATTERN.pattern}: letters, digits, '.', '_' and '-', 63 at most")
    chosen: tuple[Scope, ...] = tuple(scope for scope in SCOPES if scope in scopes)
    if unknown := [scope for scope in scopes if scope not in SCOPES]:
        raise ConfigError(f"scope {unknown[0]!r}: is not one of {', '.join(SCOPES)}")
    if not chosen:
        raise ConfigError(f"scopes: none given; give at least one of {', '.join(SCOPES)}")
    now = time.time()
    tenant = connection.execute(select(tenants.c.id).where(tenants.c.name == tenant_name)).scalar()
    if tenant is None:
        tenant = new_id("tenant")
        connection.execute(tenants.insert().values(id=tenant, name=tenant_name, created=now))
    secret = PREFIX + secrets.token_urlsafe(32)
    hashed = hash_key(secret)
    made = NewKey(new_id("key"), tenant, name, chosen, now, secret)
    connection.execute(
        keys.insert().values(
            id=made.id, tenant=tenant, name=name, lookup=hashed[:_LOOKUP_DIGITS], hash=hashed, scopes=" ".join(chosen), created=now
        )
    )
    return made


def revoke_key(connection: Connection, key_id: str) -> bool:
    """Whether there was such a key that was valid until now."""
    found = connection.execute(update(keys).where(keys.c.id == key_id, keys.c.revoked.is_(None)).values(revoked=time.time()))
    return found.rowcount > 0


def write_first_key(connection: Connection, path: Path) -> NewKey | None:
    """Where there is no key at all: one with all scopes, in the file `path` (0600). None where there is one."""
    if connection.execute(select(keys.c.id).where(keys.c.revoked.is_(None)).limit(1)).first() is not None:
        return None
    made = create_key(connection, DEFAULT_TENANT, "first", SCOPES)
    write_secret(path, made.secret)
    return made


def write_secret(path: Path, secret: str) -> None:
    """A line in a file that nobody else may read, from its first byte on; durable on return."""
    path.unlink(missing_ok=True)  # one that lies there may have other rights
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())
    durable.sync(path.parent)


class KeyRing:
    """Whom a key stands for, remembered for two seconds. Safe in several threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, Caller | None]] = {}  # by the key's hash
        self._valid: dict[str, tuple[float, bool]] = {}  # by the key's id
        self._names: dict[str, str] = {}  # of tenants that were looked up, themselves or a key of theirs

    def find(self, secret: str) -> Caller | None:
        """The key's caller; None for a key that is unknown or revoked."""
        if not secret.startswith(PREFIX) or len(secret) > 128:
            return None
        hashed, now = hash_key(secret), time.monotonic()
        with self._lock:
            remembered = self._known.get(hashed)
        if remembered is not None and now < remembered[0]:
            return remembered[1]
        caller = self._look_up(hashed)
        with self._lock:
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            self._known[hashed] = (now + _REMEMBER_SECONDS, caller)
        return caller

    def find_tenant(self, name: str) -> str | None:
        """The id of the tenant of that name, if there is one. It asks the database, for a name that can be."""
        if not NAME_PATTERN.fullmatch(name):
            return None
        with self._engine.connect() as connection:
            found = connection.execute(select(tenants.c.id).where(tenants.c.name == name)).scalar()
        if found is not None:
            self._names[found] = name
        return found

    def name_of(self, tenant: str) -> str:
        """The name of a tenant that was found, itself or a key of it, as operators know it."""
        return self._names.get(tenant, tenant)

    def remembers(self, secret: str) -> bool:
        """Whether `find` answers at once, without asking the database."""
        with self._lock:
            found = self._known.get(hash_key(secret))
        return found is not None and time.monotonic() < found[0]

    def is_valid(self, key_id: str) -> bool:
        """Whether the key of this id is not revoked, as of two seconds ago at most."""
        now = time.monotonic()
        with self._lock:
            remembered = self._valid.get(key_id)
        if remembered is not None and now < remembered[0]:
            return remembered[1]
        with self._engine.connect() as connection:
            row = connection.execute(_VALID.where(keys.c.id == key_id)).first()
        with self._lock:
            self._valid[key_id] = (now + _REMEMBER_SECONDS, row is not None)
            if row is not None:
                self._names[row.tenant] = row.tenant_name
        return row is not None

    def forget(self) -> None:
        """A key has been revoked."""
        with self._lock:
            self._known.clear()
            self._valid.clear()

    def _look_up(self, hashed: str) -> Caller | None:
        found = None
        with self._engine.connect() as connection:
            for row in connection.execute(_VALID.where(keys.c.lookup == hashed[:_LOOKUP_DIGITS])):
                if hmac.compare_digest(row.hash, hashed):
                    self._names[row.tenant] = row.tenant_name
                    found = Caller(row.id, row.tenant, frozenset(row.scopes.split()))
        return found
