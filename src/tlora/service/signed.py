"""What a server signs with a secret in its directory, and so outlives a restart: cookies of browsers, and cursors of pages.

A browser gets in by a link that works once, and then by a cookie. Either stands for a key, and falls with it; both can only read. A cursor
is opaque, and good for the tenant and the list that it was made for.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, select

from tlora.errors import ConfigError
from tlora.service.database.tables import keys
from tlora.service.keys import SCOPES, Caller, KeyRing, write_secret
from tlora.service.problems import RefusedError

LINK_SECONDS = 600
COOKIE_SECONDS = 30 * 86400
_COOKIE = b"cookie\0"
_MOST_LINKS = 1000
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Signer:
    """Text of urlsafe base64: a body, then `mac_bytes` of its HMAC."""

    secret: bytes
    mac_bytes: int

    def sign(self, context: bytes, body: bytes) -> str:
        """`context` says what the text is good for, and is not part of it."""
        return base64.urlsafe_b64encode(body + self._mac(context, body)).decode().rstrip("=")

    def read(self, context: bytes, text: str) -> bytes | None:
        """The body; None for a text that was not signed for `context`."""
        try:
            found = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (ValueError, binascii.Error):
            return None
        body, mac = found[: -self.mac_bytes], found[-self.mac_bytes :]
        return body if hmac.compare_digest(mac, self._mac(context, body)) else None

    def _mac(self, context: bytes, body: bytes) -> bytes:
        return hmac.new(self.secret, context + body, hashlib.sha256).digest()[: self.mac_bytes]


class BrowserSessions:
    """Links are remembered here until they are used, cookies are signed with the server's secret: they outlive a restart. Thread-safe."""

    def __init__(self, secret: bytes, ring: KeyRing) -> None:
        self._cookies, self._ring = Signer(secret, 32), ring
        # browsers keep cookies by host, not by port: two servers of one machine need two names
        self.cookie_name = f"tlora-{hashlib.sha256(b'name' + secret).hexdigest()[:8]}"
        self._lock = threading.Lock()
        self._links: dict[str, tuple[float, str, str]] = {}  # hash -> end, key's id, tenant

    def make_link(self, key_id: str, tenant: str) -> str:
        """The path of a link. Its token stands behind the `#`, so that it enters no log and no look-ahead of a browser uses it up."""
        token, now = secrets.token_urlsafe(32), time.monotonic()
        with self._lock:
            self._links = {name: link for name, link in self._links.items() if link[0] > now}
            while len(self._links) >= _MOST_LINKS:
                self._links.pop(next(iter(self._links)))
            self._links[_hash(token)] = (now + LINK_SECONDS, key_id, tenant)
        return f"/login#{token}"

    def use_link(self, token: str) -> str | None:
        """A cookie; None for a token that is unknown, used, too old, or of a key that was revoked."""
        with self._lock:
            found = self._links.pop(_hash(token), None)
        if found is None or found[0] < time.monotonic() or not self._ring.is_valid(found[1]):
            return None
        body = f"{found[1]} {found[2]} {int(time.time()) + COOKIE_SECONDS}".encode()
        return self._cookies.sign(_COOKIE, body)

    def find(self, header: str) -> Caller | None:
        """Whom a Cookie header stands for, with the scope to read; None for a cookie that is forged, too old, or of a revoked key."""
        pairs = (part.strip().partition("=") for part in header.split(";"))
        cookie = next((value for name, _, value in pairs if name == self.cookie_name), "")
        if (body := self._cookies.read(_COOKIE, cookie)) is None:
            return None
        key_id, tenant, end = body.decode().split(" ")
        if int(end) < time.time() or not self._ring.is_valid(key_id):
            return None
        return Caller(key_id, tenant, frozenset({"read"}))


def oldest_key(engine: Engine) -> tuple[str, str] | None:
    """Id and tenant of the first key that may do everything: whoever starts the server sees its page as that tenant."""
    query = select(keys.c.id, keys.c.tenant).where(keys.c.revoked.is_(None), keys.c.scopes == " ".join(SCOPES)).order_by(keys.c.created)

    def look(connection: Connection) -> tuple[str, str] | None:
        row = connection.execute(query.limit(1)).first()
        return (row.id, row.tenant) if row is not None else None

    with engine.connect() as connection:
        return look(connection)


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class Cursors:
    """Of serial numbers."""

    def __init__(self, secret: bytes) -> None:
        self._signer = Signer(secret, 16)

    def make(self, tenant: str, kind: str, serial: int) -> str:
        return self._signer.sign(f"{tenant}\0{kind}\0".encode(), serial.to_bytes(8, "big"))

    def read(self, tenant: str, kind: str, cursor: str | None) -> int | None:
        """The serial number; None without a cursor. Raises RefusedError 400 for one of another tenant or list."""
        if cursor is None:
            return None
        body = self._signer.read(f"{tenant}\0{kind}\0".encode(), cursor)
        if body is None or len(body) != 8:
            raise RefusedError(400, "wrong_cursor", f"cursor {cursor[:80]!a} is not one of this list. Begin without a cursor", "cursor")
        return int.from_bytes(body, "big")


def open_secret(directory: Path) -> bytes:
    """The server's own secret, made at its first start (0600). Raises ConfigError for a file that holds none: it is never replaced."""
    path = directory / "secret"
    if not path.exists():
        write_secret(path, secrets.token_hex(_SECRET_BYTES))
    try:
        found = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        found = b""
    if len(found) != _SECRET_BYTES:
        raise ConfigError(
            f"{path}: does not hold {2 * _SECRET_BYTES} hexadecimal digits; it was cut or cannot be read. Put it back from a backup, or "
            "remove it for a new one: browsers then have to log in again, and cursors of pages begin anew. Keys and jobs are not concerned"
        )
    return found
