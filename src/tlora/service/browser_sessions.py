"""How a browser gets in: a link that works once, and then a cookie. Either stands for a key, and falls with it; both can only read."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import threading
import time

from sqlalchemy import Connection, Engine, select

from tlora.service.database.tables import keys
from tlora.service.keys import SCOPES, Caller, KeyRing

LINK_SECONDS = 600
COOKIE_SECONDS = 30 * 86400
_MOST_LINKS = 1000
_MAC_BYTES = 32


class BrowserSessions:
    """Links are remembered here until they are used, cookies are signed with the server's secret: they outlive a restart. Thread-safe."""

    def __init__(self, secret: bytes, ring: KeyRing) -> None:
        self._secret, self._ring = secret, ring
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
        return base64.urlsafe_b64encode(body + self._mac(body)).decode().rstrip("=")

    def find(self, header: str) -> Caller | None:
        """Whom a Cookie header stands for, with the scope to read; None for a cookie that is forged, too old, or of a revoked key."""
        pairs = (part.strip().partition("=") for part in header.split(";"))
        cookie = next((value for name, _, value in pairs if name == self.cookie_name), "")
        try:
            found = base64.b64decode(cookie.encode("ascii") + b"=" * (-len(cookie) % 4), altchars=b"-_", validate=True)
        except (ValueError, binascii.Error):
            return None
        body, mac = found[:-_MAC_BYTES], found[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            return None
        key_id, tenant, end = body.decode().split(" ")
        if int(end) < time.time() or not self._ring.is_valid(key_id):
            return None
        return Caller(key_id, tenant, frozenset({"read"}))

    def _mac(self, body: bytes) -> bytes:
        return hmac.new(self._secret, b"cookie\0" + body, hashlib.sha256).digest()


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
