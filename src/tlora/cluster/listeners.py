"""Listeners for workers: the unix socket, where the kernel identifies the peer, and a TCP port with TLS, where a token and a proof do."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tlora import durable
from tlora.cluster.credentials import WorkerToken, WorkerTokens, open_certificate
from tlora.errors import ConfigError
from tlora.link.address import listen
from tlora.link.authentication import (
    AdmissionError,
    AuthRequest,
    AuthResponse,
    Entry,
    admission_line,
    answer_path,
    read_number,
    write_number,
)
from tlora.link.lines import Connection, Line, peer_pid
from tlora.link.process_identity import ProcessIdentity, identify
from tlora.link.tls_port import Stranger, TlsPort, close_listener, expect

TCP_ADDRESS_FILE = "tcp-address"
_BACKLOG = 128
_PROOFS = ".proof-"


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a connection: `pid` 0 and no `identity` where a unix socket does not tell. Over TCP `token` let it
    in. `is_remote`: its end cannot be seen from here, as it is of another host, container or user; `shares_store`: it reads and writes
    the store's files under their paths here. `address` is the peer's, and `reached_at` that of this host at which it has come.
    """

    pid: int
    identity: ProcessIdentity | None
    token: WorkerToken | None = None
    is_remote: bool = False
    shares_store: bool = True
    address: str = ""
    reached_at: str = ""


class UnixListener:
    """See `link/address.py`. Raises ConfigError where no socket can be made."""

    def __init__(self, directory: Path) -> None:
        self._listener, self.address = listen(directory)

    def accept(self) -> tuple[Connection, Callable[[Line], Peer], Callable[[], None]]:
        connection, _ = self._listener.accept()
        connection.settimeout(None)
        return connection, lambda _: admit_unix(connection), connection.close

    @property
    def is_closed(self) -> bool:
        return self._listener.fileno() < 0

    def close(self) -> None:
        close_listener(self._listener)


def admit_unix(connection: socket.socket) -> Peer:
    pid = peer_pid(connection)
    if pid is None:
        raise AdmissionError("a connection of another user")
    return Peer(pid, identify(pid) if pid else None)


class TlsListener:
    """A TCP port. `directory` is the store's `workers/`, which gets the certificate; `address` is where it listens, `fingerprint` the
    certificate's.
    """

    def __init__(self, directory: Path, place: tuple[str, int]) -> None:
        """`place` is host and port. Raises ConfigError, CheckpointError."""
        durable.make_directory(directory)
        self._directory, self._tokens = directory.absolute(), WorkerTokens(directory)
        context, self.fingerprint = open_certificate(directory)
        for left_behind in directory.glob(f"{_PROOFS}*"):
            left_behind.unlink(missing_ok=True)
        self._port = TlsPort(_listen(*place), context, self._check)
        self.address, self.accept, self.close = self._port.address, self._port.accept, self._port.close
        durable.write_file(directory / TCP_ADDRESS_FILE, self.address + "\n")

    @property
    def is_closed(self) -> bool:
        return self._port.is_closed

    def __enter__(self) -> TlsListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, stranger: Stranger, entry: Entry) -> Peer:
        token = self._check_token(entry.token, stranger.who)
        identity = ProcessIdentity(entry.pid, entry.start_ticks, entry.boot)
        problem = self._try_directory(stranger.line, stranger.who)
        is_here = identity.is_this_users and not problem
        return Peer(entry.pid, identity if is_here else None, token, not is_here, not problem, stranger.address, stranger.reached_at)

    def _check_token(self, secret: str, who: str) -> WorkerToken:
        try:
            token = self._tokens.find(secret)
        except ConfigError as error:
            raise ConnectionError(f"{who}: {error}") from None
        if token is None:
            raise AdmissionError(f"{who} with a token that is unknown here. `tlora worker-token` makes one for this controller's store")
        if token.revoked is not None:
            raise AdmissionError(f"{who} with {token.id}, which was revoked. `tlora worker-token` makes a new one")
        return token

    def _try_directory(self, line: Line, who: str) -> str:
        """Why the worker does not read and write the same store as this controller; "" if it does."""
        path, number = self._directory / f"{_PROOFS}{secrets.token_hex(16)}", secrets.token_hex(32)
        try:
            try:
                write_number(path, number)
            except OSError as error:
                raise ConnectionError(f"{who}: {path} cannot be written ({error.strerror}), which admitting a worker needs") from None
            line.send(admission_line(AuthRequest(str(path))))
            proof = expect(line, AuthResponse, f"{who} that ended before it had shown that it sees {self._directory}")
            return proof.problem[:200] or _disprove(number, proof, answer_path(path))
        finally:
            for file in (path, answer_path(path)):
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)


def _disprove(number: str, proof: AuthResponse, path: Path) -> str:
    """What is wrong with the worker's answer; "" if nothing is."""
    try:
        answer = read_number(path)
    except OSError as error:
        return f"its answer: {error.strerror or error}"
    same = hmac.compare_digest(number.encode(), proof.number.encode()) & hmac.compare_digest(answer.encode(), proof.answer.encode())
    return "" if same else "it read or wrote another file"


def _listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # workers dial again while connections of before linger
            listener.bind(place)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener
    except OSError as error:
        raise ConfigError(
            f"tcp://{host}:{port}: cannot listen there for workers: {error.strerror}. Choose another port, or end what listens there"
        ) from None
