"""Ports at which processes come: the loop that accepts, and over TCP the admission by TLS and a token, of few strangers at a time.

Who is let in, and what is said then, is the owner's.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tlora.link.address import tcp_address
from tlora.link.authentication import AuthOk, Entry, admission_line, read_admission
from tlora.link.lines import Connection, Line
from tlora.link.tls import TlsStream, set_options

ADMISSION_SECONDS = 10.0  # for each of: the handshake, the token, what follows it
_MOST_STRANGERS = 64  # connections that are being admitted at a time; more are closed
_ACCEPT_SECONDS = 0.05  # after a connection that could not be had
T = TypeVar("T")
Admitted = TypeVar("Admitted", covariant=True)


class Listener(Protocol[Admitted]):
    address: str

    def accept(self) -> tuple[Connection, Callable[[Line], Admitted], Callable[[], None]]:
        """The next connection, and what admits it, in a thread of its own: a slow peer delays no other. That raises AdmissionError, whose
        reason is sent to the peer; OSError for a connection that is closed silently. The third closes a connection that is not admitted:
        one of the two is to be called. Raises OSError.
        """
        ...

    @property
    def is_closed(self) -> bool: ...
    def close(self) -> None: ...


def accept_from(listener: Listener[T], take: Callable[[Connection, Callable[[Line], T]], object]) -> None:
    """Hand all connections that come to `take`, until the listener is closed. What it raises ends that connection alone: it may raise only
    before it admits.
    """
    while not listener.is_closed:
        try:
            connection, admit, drop = listener.accept()
        except OSError:  # closed, or too many open files for a while
            time.sleep(_ACCEPT_SECONDS)
            continue
        try:
            take(connection, admit)
        except (OSError, RuntimeError):  # it has ended by now, or there are no more threads: it will dial again
            drop()


def close_listener(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    listener.close()


@dataclass(frozen=True, slots=True)
class Stranger:
    """A connection whose token is to be looked at: `who` names it in messages; `address` is the peer's, and `reached_at` that of this host
    at which it has come.
    """

    line: Line
    who: str
    address: str
    reached_at: str


class TlsPort(Generic[T]):
    """A TCP port with TLS. `address` is where it listens."""

    def __init__(self, listener: socket.socket, context: ssl.SSLContext, check: Callable[[Stranger, Entry], T]) -> None:
        """`check`: what the owner knows of who comes with that entry; it raises as `Listener`'s admission."""
        self._listener, self._context, self._check = listener, context, check
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
        self.address = tcp_address(*listener.getsockname()[:2])

    def accept(self) -> tuple[TlsStream, Callable[[Line], T], Callable[[], None]]:
        """As `Listener`."""
        while True:
            connection, (host, port, *_) = self._listener.accept()
            if self._strangers.acquire(blocking=False):
                break
            connection.close()

        def drop() -> None:
            connection.close()
            self._strangers.release()

        try:
            set_options(connection)
            stream, reached_at = TlsStream(connection, self._context, server_side=True), connection.getsockname()[0]
        except BaseException:
            drop()
            raise
        return stream, lambda line: self._admit(stream, Stranger(line, f"a connection from {host}:{port}", host, reached_at)), drop

    @property
    def is_closed(self) -> bool:
        return self._listener.fileno() < 0

    def close(self) -> None:
        """Lets nobody in any more; lines that are there stay."""
        close_listener(self._listener)

    def _admit(self, stream: TlsStream, stranger: Stranger) -> T:
        try:
            self._shake_hands(stream, stranger.who)
            gone = f"{stranger.who} without a token; a worker that was given another fingerprint ends it so"
            admitted = self._check(stranger, expect(stranger.line, Entry, gone))
            stranger.line.send(admission_line(AuthOk()))
            return admitted
        finally:
            self._strangers.release()

    def _shake_hands(self, stream: TlsStream, who: str) -> None:
        try:
            stream.handshake(ADMISSION_SECONDS)
        except TimeoutError:
            raise ConnectionError(f"{who} without a TLS handshake for {ADMISSION_SECONDS:g} s") from None
        except OSError as error:
            why = getattr(error, "reason", None) or error.strerror or error
            raise ConnectionError(f"{who} that does not speak TLS 1.3 ({why})") from None


def expect(line: Line, kind: type[T], otherwise: str) -> T:
    """Read a message. Raises ConnectionError, whose text does not quote what was received."""
    try:
        message = read_admission(line, ADMISSION_SECONDS)
    except OSError:
        raise ConnectionError(otherwise) from None
    if not isinstance(message, kind):
        raise ConnectionError(otherwise)
    return message
