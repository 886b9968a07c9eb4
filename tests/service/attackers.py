"""Clients that keep a server waiting: connections that are opened and left, or that get a byte at a time."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import httpx


@dataclass
class Attack:
    """Open sockets to one server. `answers` has what came before the server closed one."""

    sockets: list[socket.socket]
    answers: list[bytes] = field(default_factory=list[bytes])
    _open: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __post_init__(self) -> None:
        for one in self.sockets:
            one.setblocking(False)
            self._open.register(one, selectors.EVENT_READ, bytearray())

    @property
    def alive(self) -> int:
        """How many the server has not closed."""
        for key, _ in self._open.select(0):
            try:
                received = key.fileobj.recv(65_536)  # type: ignore[union-attr]
            except BlockingIOError:
                continue
            except OSError:
                received = b""
            key.data.extend(received)
            if not received:
                self._open.unregister(key.fileobj)
                self.answers.append(bytes(key.data))
        return len(self._open.get_map())

    def send(self, data: bytes) -> None:
        """To each that still takes it."""
        for one in self.sockets:
            try:
                one.send(data)
            except OSError:
                continue


@contextmanager
def attacking(
    url: str, count: int, first: bytes = b"", *, drip: float | None = None, sources: Sequence[str] = ("127.0.0.1",), room: int | None = None
) -> Iterator[Attack]:
    """`count` connections from `sources` in turns, each of which sends `first`, and with `drip` a byte after each pause of so many seconds.

    `room` is their buffer for answers, in bytes.
    """
    server = httpx.URL(url)
    ended = threading.Event()
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        for number in range(count):
            one = stack.enter_context(socket.socket())
            if room is not None:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
            one.bind((sources[number % len(sources)], 0))
            one.connect((server.host, server.port))
            sockets.append(one)
        attack = Attack(sockets)
        if first:
            attack.send(first)
        stack.callback(ended.set)
        if drip is not None:

            def run() -> None:
                while not ended.wait(drip):
                    attack.send(b"x")

            thread = threading.Thread(target=run, daemon=True)
            stack.callback(thread.join)
            stack.callback(ended.set)
            thread.start()
        yield attack


def post(path: str, key: str, length: int = 1_000_000, kind: str = "application/json") -> bytes:
    """The header of a request whose body is to follow."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {key}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
    return head.encode()


def get(path: str, key: str, *more: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: 127.0.0.1", f"X-API-Key: {key}", *more, "", ""]).encode()
