"""The credentials for workers over TCP in a store: the controller's certificate with its key, and workers' tokens as hashes.

Both files are 0600. A token is 256 random bits, shown once, for workers only, and may be revoked. `tlora worker-token` writes them while a
controller runs, which reads them anew at each use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import ssl
import time
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tlora import durable
from tlora.errors import ConfigError
from tlora.json_file import read_object
from tlora.link.endpoint import TOKEN_PREFIX, read_private
from tlora.link.tls import fingerprint_of, make_certificate, server_context

CERTIFICATE, TOKENS = "worker-tls.pem", "worker-tokens.json"
PURPOSE = "worker"
_END = "-----END CERTIFICATE-----\n"


@dataclass(frozen=True, slots=True)
class WorkerToken:
    """`hash` is SHA-256: a token has 256 random bits, so no slow hash is needed. A worker must come for the first time before `expires`;
    times are Unix seconds.
    """

    id: str
    hash: str
    created: float
    expires: float
    revoked: float | None = None
    purpose: str = PURPOSE

    @property
    def has_expired(self) -> bool:
        return time.time() >= self.expires


class WorkerTokens:
    """Of the store whose `workers/` is `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._path = directory, directory / TOKENS

    def create(self, valid_seconds: float) -> tuple[WorkerToken, str]:
        """A new token and its secret, which is not stored. Raises ConfigError, CheckpointError."""
        secret, now = TOKEN_PREFIX + secrets.token_urlsafe(32), time.time()
        made = WorkerToken(f"token-{secrets.token_hex(6)}", _hash(secret), now, now + valid_seconds)
        with _locked(self._directory):
            self._write([*self.all(), made])
        return made, secret

    def revoke(self, token_id: str) -> bool:
        """Revoke a token. Returns whether there was a valid one."""
        with _locked(self._directory):
            known = self.all()
            kept = [replace(t, revoked=time.time()) if t.id == token_id and t.revoked is None else t for t in known]
            if kept == known:
                return False
            self._write(kept)
        return True

    def all(self) -> list[WorkerToken]:
        """All tokens. Raises ConfigError if the file is damaged."""
        if not self._path.exists():
            return []
        read_private(self._path)  # for its permissions
        try:
            return [WorkerToken(**found) for found in read_object(self._path)["tokens"]]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self._path} is damaged ({error}). Remove it, and make new tokens with `tlora worker-token`") from None

    def find(self, secret: str) -> WorkerToken | None:
        """The token of this secret, if it is for workers; it may be revoked, or have expired. Raises ConfigError."""
        hashed = _hash(secret)
        found = [token for token in self.all() if hmac.compare_digest(token.hash, hashed)]
        return found[0] if found and found[0].purpose == PURPOSE else None

    def revoked(self, token_ids: Iterable[str]) -> set[str]:
        """Those of tokens that were valid which have been revoked or removed since. An unreadable file revokes nothing."""
        try:
            return set(token_ids) - {token.id for token in self.all() if token.revoked is None}
        except ConfigError:
            return set()

    def _write(self, tokens: list[WorkerToken]) -> None:
        durable.write_file(self._path, json.dumps({"tokens": [asdict(token) for token in tokens]}, indent=1) + "\n", mode=0o600)


def open_certificate(directory: Path) -> tuple[ssl.SSLContext, str]:
    """A controller's side of TLS, and the certificate's fingerprint; the certificate is made when it is first asked for.

    Raises ConfigError where it is damaged, or others may read its key; CheckpointError where it cannot be written.
    """
    path = directory / CERTIFICATE
    with _locked(directory):
        if not path.exists():
            durable.write_file(path, make_certificate("tlora controller")[0], mode=0o600)
    text = read_private(path)
    try:
        certificate = ssl.PEM_cert_to_DER_cert(text[: text.index(_END) + len(_END)])
        return server_context(path), fingerprint_of(certificate)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is damaged ({error}). Remove it: a new one is made, and workers need its new fingerprint from `tlora worker-token`"
        ) from None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


@contextlib.contextmanager
def _locked(directory: Path) -> Generator[None]:
    """Allow one writer at a time, of all commands and controllers."""
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
