"""One connection: uvicorn's protocol of HTTP, with a place among `Connections` and the deadlines that uvicorn does not have.

TLS begins here too, so that a handshake has a place and a deadline as a header has.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from tlora.service.connections import Body, Connections, Unread, is_proxy, shared_address
from tlora.service.problems import error_body

_LOOK_SECONDS = 0.5
_TLS_END_SECONDS = 5.0  # for the client's part of the end of TLS
_UNSENT_BYTES = 128 << 10  # that the kernel takes: what a slow client reads is then seen whenever it has read half as much
_CONNECTION = "connection"


@dataclass
class ConnectionFactory:
    """Makes the protocol of each connection of a server; the `http` of uvicorn's settings. `tls` is None for plain HTTP; the connections
    of `trusted_proxies` are not limited by address.
    """

    connections: Connections
    trusted_proxies: Sequence[str] = ()
    tls: ssl.SSLContext | None = None
    _watched: bool = False

    def __call__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], _loop: asyncio.AbstractEventLoop | None = None
    ) -> ConnectionProtocol:
        loop = _loop or asyncio.get_running_loop()
        if not self._watched:
            self._watched = True
            self._watch(loop, loop.time())
        return ConnectionProtocol(HttpToolsProtocol(config, server_state, app_state, loop), self)

    def _watch(self, loop: asyncio.AbstractEventLoop, before: float) -> None:
        """Let time pass for the connections, for as long as the loop runs."""
        now = loop.time()
        self.connections.pass_time(min(now - before, 2 * _LOOK_SECONDS))
        loop.call_later(_LOOK_SECONDS, self._watch, loop, now)


class ConnectionProtocol(asyncio.Protocol):
    """What the event loop calls."""

    def __init__(self, inner: HttpToolsProtocol, factory: ConnectionFactory) -> None:
        self._inner, self._factory, self._connections = inner, factory, factory.connections
        self._app: ASGIApp = inner.app  # type: ignore[assignment] # uvicorn has types of its own for the same
        inner.app = self._serve  # type: ignore[assignment]
        self._transport: asyncio.Transport | None = None
        self._handshake: asyncio.Task[None] | None = None
        self._early = bytearray()  # what came with the end of the handshake
        self._is_open = self._is_over = False
        self._running = 0  # requests that are answered
        self._awaited: object = None  # the part of a request whose time runs
        self._unread, self._written = Unread(self._connections.limits.write_bytes_per_second), 0
        self.address: str | None = None
        self.body: Body | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # uvloop's is no subclass
        self._transport = transport
        peer = transport.get_extra_info("peername")
        host = peer[0] if isinstance(peer, tuple) else None
        self.address = None if is_proxy(host, self._factory.trusted_proxies) else shared_address(host)
        if not self._connections.admit(self):
            self._end(503, "too_many_connections", "there are as many connections as may be; try again in a second")
            return
        plain = transport.get_extra_info("socket")
        if plain.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        if self._factory.tls is None:
            self._open(transport)
        else:
            transport.pause_reading()
            self._handshake = asyncio.get_running_loop().create_task(self._begin_tls(transport, self._factory.tls))

    async def _begin_tls(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        loop, seconds = asyncio.get_running_loop(), self._connections.limits.header_seconds
        try:
            found = await loop.start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=seconds, ssl_shutdown_timeout=_TLS_END_SECONDS
            )
        except OSError:  # what came was no TLS, or the client has gone
            found = None
        if found is None or self._is_over:
            transport.abort()
            self._connections.leave(self)
            return
        self._open(found)
        if self._early:
            self.data_received(bytes(self._early))

    def _open(self, transport: asyncio.Transport) -> None:
        self._transport, self._is_open = transport, True
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        if not self._is_open:
            self._early += data
            return
        self._inner.data_received(data)
        if not self._running:
            self._wait()

    def _wait(self) -> None:
        """For what the client has to send next, as far as uvicorn's parser has come."""
        cycle = self._inner.cycle
        if cycle is None:  # a first header's time runs since the connection was made
            return
        if not cycle.response_complete:  # its header has come whole
            self._connections.serve(self)
            return
        begun = self._inner.scope if self._is_in_header() else cycle if cycle.more_body else None
        if begun is not self._awaited:
            self._awaited = begun
            self._connections.wait(self, begun=begun is not None)

    def _is_in_header(self) -> bool:
        """Whether a header has begun to come and is not whole: the parser makes a scope for each, and at its end a cycle with that."""
        scope, cycle = self._inner.scope, self._inner.cycle
        return scope is not None and (cycle is None or cycle.scope is not scope)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._is_open else None

    def pause_writing(self) -> None:
        if self._is_open:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._is_open:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)
        self._is_over = True
        if self._is_open:
            self._is_open = False
            self._inner.connection_lost(exc)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application. Its middleware finds this connection by `connection_of`."""
        self._running += 1
        self._connections.serve(self)
        scope["state"][_CONNECTION] = self

        async def count_and_send(message: Message) -> None:
            self._written += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, count_and_send)
        finally:
            self._running -= 1
            if not self._running:
                self.body = None
                self._awaited = self  # no part of a request, so that the time of what follows begins now
                self._wait()

    def unread_seconds(self, clock: float) -> float:
        waiting = self._transport.get_write_buffer_size() if self._is_open and self._transport is not None else 0
        return self._unread.look(clock, self._written, waiting)

    def unsent_seconds(self) -> float:
        return 0.0 if self.body is None else self.body.unsent_seconds()

    def time_out(self) -> None:
        if self._is_in_header():
            self._end(408, "too_slow", "the header of the request did not come in time; send it faster")
        else:
            self._end()

    def drop(self) -> None:
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()

    def _end(self, status: int = 0, code: str = "", message: str = "") -> None:
        """Close it, where `status` is given with an answer that no request is needed for."""
        self._is_over = True
        transport, is_plain = self._transport, self._factory.tls is None
        assert transport is not None
        if transport.is_closing():  # it ends when what was sent has been read
            return
        if not self._is_open and not is_plain:  # no answer can be read before the end of the handshake
            transport.abort()
            return
        if status:
            body = json.dumps(error_body(status, code, message)).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
            transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        transport.close()


def connection_of(scope: Scope) -> ConnectionProtocol | None:
    """On which a request has come; None where there is no socket."""
    found = scope.get("state", {}).get(_CONNECTION)
    return found if isinstance(found, ConnectionProtocol) else None
