"""A controller's address, and what a worker needs to be admitted: over a unix socket nothing, over TCP fingerprint and token."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from tlora.errors import ConfigError
from tlora.link.address import connect, is_tcp, resolve, tcp_place
from tlora.link.authentication import enter
from tlora.link.lines import Line
from tlora.link.tls import connect_tls, read_fingerprint

TOKEN = "TLORA_WORKER_TOKEN"
TOKEN_PREFIX = "tlw-"
_TOKEN = re.compile(r"tlw-[A-Za-z0-9_-]{43}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`address` is unix:… or tcp://…; only the latter has a fingerprint and a token."""

    address: str
    fingerprint: str = ""
    token: str = field(default="", repr=False)


def find_entrance(connect_to: str, fingerprint: str | None, token_file: Path | None) -> Endpoint:
    """The entrance from the options of `tlora worker`. The token is removed from the environment, so that child processes lack it.

    Raises ConfigError.
    """
    given = os.environ.pop(TOKEN, None)
    address = resolve(connect_to)
    if not is_tcp(address):
        if fingerprint is not None or token_file is not None:
            raise ConfigError(f"--connect {connect_to}: is a unix socket, which needs no --fingerprint and no --token-file. Leave them out")
        return Endpoint(address)
    tcp_place(address)
    if fingerprint is None:
        raise ConfigError(
            f"--connect {address}: needs --fingerprint, or the token could go to an impostor. `tlora worker-token` prints it, on "
            "the controller's machine"
        )
    where = f"--token-file {token_file}" if token_file is not None else f"${TOKEN}"
    token = read_private(token_file).strip() if token_file is not None else given
    if token is None:
        raise ConfigError(f"--connect {address}: needs a token. Set {TOKEN}, or give --token-file; `tlora worker-token` makes one")
    if not _TOKEN.fullmatch(token.strip()):
        raise ConfigError(f"{where}: is no worker's token; one is {TOKEN_PREFIX} and 43 characters. `tlora worker-token` makes one")
    return Endpoint(address, read_fingerprint(fingerprint), token.strip())


def dial(endpoint: Endpoint, send_seconds: int) -> Line:
    """Connect and be admitted; Hello may follow on the returned line.

    Raises OSError if nothing listens there, ConfigError for a peer that cannot be trusted, and AdmissionError, a subclass, if the
    controller refuses this worker.
    """
    if not is_tcp(endpoint.address):
        return Line(connect(endpoint.address), send_seconds)
    line = Line(connect_tls(tcp_place(endpoint.address), endpoint.fingerprint), send_seconds)
    try:
        enter(line, endpoint.token)
    except BaseException:
        line.close()
        raise
    return line


def read_private(path: Path) -> str:
    """The content of a file that only this user may read. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            found = os.fstat(file.fileno())
            mode = stat.S_IMODE(found.st_mode)
            if mode & 0o077:
                raise ConfigError(f"{path}: others may read it (mode {mode:04o}), and it holds a secret. chmod 600 {path}")
            if found.st_uid != os.geteuid():
                raise ConfigError(f"{path}: belongs to another user, and a secret of this one's is wanted. Write it again as this user")
            return file.read(10_000)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}. Give a file with the secret in it, mode 0600") from None
