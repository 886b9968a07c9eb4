"""Cursors of pages: opaque, and good for the tenant and the list that they were made for."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from pathlib import Path

from tlora.errors import ConfigError
from tlora.service.keys import write_secret
from tlora.service.problems import RefusedError

_MAC_BYTES = 16
_SECRET_BYTES = 32


class Cursors:
    """Signed with a secret that lies in the server's directory, so that they outlive a restart."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def make(self, tenant: str, kind: str, serial: int) -> str:
        body = serial.to_bytes(8, "big")
        return base64.urlsafe_b64encode(body + self._mac(tenant, kind, body)).decode().rstrip("=")

    def read(self, tenant: str, kind: str, cursor: str | None) -> int | None:
        """The serial number; None without a cursor. Raises RefusedError 400 for one of another tenant or list."""
        if cursor is None:
            return None
        try:
            found = base64.b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        except (ValueError, binascii.Error):
            found = b""
        body, mac = found[:8], found[8:]
        if len(found) != 8 + _MAC_BYTES or not hmac.compare_digest(mac, self._mac(tenant, kind, body)):
            raise RefusedError(400, "wrong_cursor", f"cursor {cursor[:80]!a} is not one of this list. Begin without a cursor", "cursor")
        return int.from_bytes(body, "big")

    def _mac(self, tenant: str, kind: str, body: bytes) -> bytes:
        return hmac.new(self._secret, f"{tenant}\0{kind}\0".encode() + body, hashlib.sha256).digest()[:_MAC_BYTES]


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
