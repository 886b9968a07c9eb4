"""What one connection waits for, on a real socket: bytes come, and time passes, when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from tlora.service.config import ConnectionLimits
from tlora.service.connection_protocol import ConnectionFactory, ConnectionProtocol
from tlora.service.connections import Connections

HEADER, KEPT = 1000.0, 5000.0  # seconds: only the test lets them pass
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
H2C = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"


@dataclass
class Answers:
    """An application that answers at once, reads no body, and returns when it may."""

    paths: list[str] = field(default_factory=list[str])
    may_return: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
        await self.may_return.wait()


@dataclass
class Talk:
    """One connection, from both ends."""

    app: Answers
    connections: Connections
    protocol: ConnectionProtocol
    reader: asyncio.StreamReader

    async def answer(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n") + await self.reader.readexactly(2)

    async def settle(self) -> None:
        """Until everything that can run has."""
        self.app.may_return.set()
        for _ in range(10):
            await asyncio.sleep(0)


@asynccontextmanager
async def talking() -> AsyncIterator[Talk]:
    app = Answers()
    connections = Connections(ConnectionLimits(header_seconds=HEADER, keep_alive_seconds=KEPT))
    config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None, timeout_keep_alive=int(KEPT))
    config.load()
    factory = ConnectionFactory(connections)
    made: list[ConnectionProtocol] = []

    def make() -> ConnectionProtocol:
        made.append(factory(config, ServerState(), {}))
        return made[-1]

    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        while not connections.count:
            await asyncio.sleep(0)
        yield Talk(app, connections, made[0], reader)
    finally:
        writer.close()
        server.close()
        await server.wait_closed()


def talk(body: Callable[[Talk], Awaitable[None]]) -> None:
    async def run() -> None:
        async with talking() as one:
            await body(one)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_next_header_that_begins_before_the_request_is_done_with_has_its_time() -> None:
    """The answer is whole, and the application still tidies up."""

    async def body(one: Talk) -> None:
        one.protocol.data_received(GET)
        await one.answer()
        one.protocol.data_received(GET[:9])
        await one.settle()
        one.connections.pass_time(HEADER)
        assert (await one.reader.read()).startswith(b"HTTP/1.1 408 ") and one.connections.timed_out == 1

    talk(body)


def test_a_request_whose_header_is_whole_is_answered_and_not_cut() -> None:
    """Its client would be told that it did not come, and it would run."""

    async def body(one: Talk) -> None:
        one.protocol.data_received(GET)
        one.connections.pass_time(HEADER)
        assert (await one.answer()).startswith(b"HTTP/1.1 200 ") and one.app.paths == ["/"] and not one.connections.timed_out

    talk(body)


@pytest.mark.parametrize("between", [b"", b"\r\n"], ids=["nothing", "an empty line"])
def test_a_kept_connection_is_closed_without_a_word_after_its_time(between: bytes) -> None:
    """Empty lines before a request are none of it, and gain no time."""

    async def body(one: Talk) -> None:
        one.protocol.data_received(GET)
        await one.answer()
        await one.settle()
        for _ in range(4):
            one.protocol.data_received(between)
            one.connections.pass_time(HEADER)
        one.protocol.data_received(GET)
        await one.answer()
        await one.settle()
        for _ in range(5):
            assert not one.connections.timed_out
            one.protocol.data_received(between)
            one.connections.pass_time(HEADER)
        assert await one.reader.read() == b"" and one.connections.timed_out == 1

    talk(body)


def test_pipelined_requests_are_answered_in_turn_and_the_last_half_has_its_time() -> None:
    async def body(one: Talk) -> None:
        one.app.may_return.set()
        one.protocol.data_received(GET + GET.replace(b"/ ", b"/2 ") + GET[:9])
        assert await one.answer() and await one.answer() and one.app.paths == ["/", "/2"]
        await one.settle()
        one.connections.pass_time(HEADER)
        assert (await one.reader.read()).startswith(b"HTTP/1.1 408 ")

    talk(body)


def test_a_client_that_offers_another_protocol_is_answered_in_this_one() -> None:
    async def body(one: Talk) -> None:
        one.app.may_return.set()
        for _ in range(2):
            one.protocol.data_received(H2C)
            assert (await one.answer()).startswith(b"HTTP/1.1 200 ")
            await one.settle()
        one.protocol.data_received(GET)
        assert (await one.answer()).startswith(b"HTTP/1.1 200 ")

    talk(body)
