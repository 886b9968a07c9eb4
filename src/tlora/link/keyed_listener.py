"""A port of one process for those who have its key: TLS with a certificate of its own, which they know by its fingerprint.

Workers of several hosts meet so; the controller tells address, fingerprint and key to those that shall. What is said then is theirs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tlora import durable
from tlora.errors import ConfigError
from tlora.link.address import tcp_address, tcp_place
from tlora.link.authentication import AuthOk, Entry, admission_line, read_admission
from tlora.link.lines import Connection, Line
from tlora.link.tls import TlsStream, connect_tls, make_certificate, server_context
from tlora.worker_protocol import Refusal

CUT_SECONDS = 30  # without an answer of the other host's kernel, after which the line has ended
ADMIT_SECONDS = 10.0  # for each of: the handshake, the key, the first message
_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 10, 5, 4
_ACCEPT_SECONDS = 0.05
_MOST_STRANGERS = 16  # connections that are being admitted at a time; more are closed


class KeyedListener:
    """`serve` gets the line of each that comes with the key, in a thread of its own; the line is closed when it returns. What it raises as
    OSError or ValueError ends that line alone.
    """

    def __init__(self, address: str, directory: Path, serve: Callable[[Line], object]) -> None:
        """`address` is one of this host; `directory`, this user's alone, gets the certificate. Raises OSError."""
        text, self.fingerprint = make_certificate("tlora worker")
        certificate = directory / "listener.pem"
        durable.write_file(certificate, text, mode=0o600)
        self._context, self._serve, self.key = server_context(certificate), serve, secrets.token_hex(32)
        self._listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.address = tcp_address(*self._listener.getsockname()[:2])
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
        threading.Thread(target=self._accept, name="keyed-listener", daemon=True).start()

    def close(self) -> None:
        """Lets nobody in any more; lines that are there stay."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or too many open files for a while
                time.sleep(_ACCEPT_SECONDS)
                continue
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._meet, args=(connection,), name="keyed-line", daemon=True).start()
            else:
                connection.close()

    def _meet(self, connection: socket.socket) -> None:
        line = None
        with contextlib.suppress(OSError, ValueError):  # a stranger, a host that is gone, or a message that cannot be read
            try:
                stream = TlsStream(connection, self._context, server_side=True)
                line = Line(stream, CUT_SECONDS)
                is_known = self._admit(stream, line)
            finally:
                self._strangers.release()
            if is_known:
                self._serve(line)
        if line is not None:
            line.end()
            line.close()

    def _admit(self, stream: TlsStream, line: Line) -> bool:
        stream.handshake(ADMIT_SECONDS)
        entry = read_admission(line, ADMIT_SECONDS)
        if not isinstance(entry, Entry) or not secrets.compare_digest(entry.token.encode(), self.key.encode()):
            line.send(admission_line(Refusal("it comes with another key")))
            return False
        _keep_watch(stream)
        line.send(admission_line(AuthOk()))
        return True


def dial_keyed(address: str, fingerprint: str, key: str) -> Line:
    """A line to a `KeyedListener`. Raises ConfigError, which says why not."""
    try:
        stream = connect_tls(tcp_place(address), fingerprint)
        line = Line(stream, CUT_SECONDS)
        line.send(admission_line(Entry(key, os.getpid(), 0, "")))
        try:
            if not isinstance(read_admission(line, ADMIT_SECONDS), AuthOk):
                raise ConnectionRefusedError("it lets this worker in no more")
        except OSError:
            line.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"{address}: the worker that leads this group is not reached from this host ({error.strerror or error}). Workers of all hosts "
            "must reach each other: open TCP between them, or start that one with --address and one that is reached"
        ) from None
    _keep_watch(stream)
    return line


def _keep_watch(connection: Connection) -> None:
    """Have the kernel end the connection when the other host does not answer for `CUT_SECONDS`, also while nothing is sent."""
    options = [(socket.SOL_SOCKET, "SO_KEEPALIVE", 1), (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 1000 * CUT_SECONDS)]
    options += [(socket.IPPROTO_TCP, "TCP_KEEPIDLE", _IDLE_SECONDS), (socket.IPPROTO_TCP, "TCP_KEEPINTVL", _PROBE_SECONDS)]
    for level, name, value in [*options, (socket.IPPROTO_TCP, "TCP_KEEPCNT", _PROBES)]:
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(level, getattr(socket, name), struct.pack("i", value))
