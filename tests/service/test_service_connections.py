"""Which connections give way, and when: with a clock that the test moves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from starlette.types import Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from tlora.service import connections as connections_module
from tlora.service import server
from tlora.service.config import ConnectionLimits
from tlora.service.connections import STALLED_SECONDS, Body, Connections, Unread, forwarders, is_proxy, shared_address


@dataclass(eq=False)
class Client:
    """A connection without a socket."""

    address: str | None = "192.0.2.1"
    unread: float = 0.0
    unsent: float = 0.0
    ends: list[str] = field(default_factory=list[str])

    def unread_seconds(self, clock: float) -> float:
        return self.unread

    def unsent_seconds(self) -> float:
        return self.unsent

    def time_out(self) -> None:
        self.ends.append("late")

    def drop(self) -> None:
        self.ends.append("dropped")


def limits(**given: float) -> ConnectionLimits:
    return ConnectionLimits.model_validate({"most": 4, "per_address": 2, "header_seconds": 10.0} | given)


def test_the_one_that_waits_longest_gives_way_to_a_new_one_of_its_address() -> None:
    kept = Connections(limits())
    first, second, other = Client(), Client(), Client("192.0.2.2")
    assert all(kept.admit(one) for one in (first, other, second))
    third = Client()
    assert kept.admit(third) and first.ends == ["dropped"] and not other.ends and not second.ends
    assert kept.count == 3 and kept.dropped == 1


def test_a_request_that_is_answered_never_gives_way() -> None:
    kept = Connections(limits())
    busy = [Client(), Client()]
    for one in busy:
        assert kept.admit(one)
        kept.serve(one)
    kept.pass_time(1000.0)
    late = Client()
    assert not kept.admit(late) and kept.refused == 1 and not any(one.ends for one in busy)
    assert kept.admit(Client("192.0.2.2")), "another address has its own room"
    kept.wait(busy[1], begun=False)  # it has been answered: it is kept for a next request, as long as there is room
    assert kept.admit(Client()) and busy[1].ends == ["dropped"] and not busy[0].ends


def test_all_together_are_bounded_too_and_those_of_a_proxy_by_that_alone() -> None:
    kept = Connections(limits())
    clients = [Client(None) for _ in range(4)]
    assert all(kept.admit(one) for one in clients)
    assert kept.admit(Client("192.0.2.7")) and clients[0].ends == ["dropped"]
    for one in clients[1:]:
        kept.leave(one)
        kept.leave(one)
    assert kept.count == 1


def test_a_client_that_stalls_in_a_request_gives_way_the_longest_first() -> None:
    kept = Connections(limits(per_address=3))
    sending, reading, working = Client(unsent=STALLED_SECONDS), Client(unread=2.0), Client()
    for one in (sending, reading, working):
        kept.admit(one)
        kept.serve(one)
    assert not kept.admit(Client()), "who stalls is seen as time passes"
    kept.pass_time(0.5)
    newcomer = Client()
    assert kept.admit(newcomer) and reading.ends == ["dropped"]
    kept.serve(newcomer)
    sending.unsent = 0.0  # it has sent meanwhile
    assert not kept.admit(Client()) and not sending.ends and not working.ends


def test_a_header_has_its_time_and_a_kept_connection_more() -> None:
    kept = Connections(limits(per_address=4, keep_alive_seconds=100.0))
    half, idle, begun, busy = (Client() for _ in range(4))
    for one in (half, idle, begun, busy):
        kept.admit(one)
    for one in (idle, begun, busy):
        kept.serve(one)
    kept.wait(idle, begun=False)
    kept.wait(begun, begun=False)
    kept.pass_time(6.0)
    kept.wait(begun, begun=True)  # the first byte of its next request
    kept.pass_time(4.0)
    assert half.ends == ["late"] and not begun.ends
    kept.pass_time(6.0)
    assert begun.ends == ["late"] and not idle.ends and not busy.ends and kept.timed_out == 2
    kept.pass_time(84.0)
    assert half.ends == idle.ends == ["late"], "once"


def test_a_client_that_reads_nothing_is_dropped_after_its_time() -> None:
    kept = Connections(limits(write_seconds=60.0))
    slow, stuck = Client(unread=59.0), Client(unread=60.0)
    for one in (slow, stuck):
        kept.admit(one)
        kept.serve(one)
    kept.pass_time(1.0)
    assert stuck.ends == ["dropped"] and not slow.ends and kept.count == 1


def test_reading_earns_time_and_a_byte_a_second_gains_none() -> None:
    def seconds_until_cut(bytes_each_second: int, most: int = 10_000) -> int | None:
        unread = Unread(1024.0)
        for second in range(most):
            left = 10**9 - second * bytes_each_second
            if unread.look(float(second), 10**9, left) >= 60.0:
                return second
        return None

    assert seconds_until_cut(0) == 60 and seconds_until_cut(1) == 61 and seconds_until_cut(512) == 120
    assert seconds_until_cut(1024) is None and seconds_until_cut(10**5) is None
    unread, looks = Unread(1024.0), ((50.0, 100), (109.0, 100), (1000.0, 0), (1001.0, 0))
    assert [unread.look(at, 100, waiting) for at, waiting in looks] == [50.0, 109.0, 0.0, 0.0]


def test_what_is_written_meanwhile_counts_as_read_only_where_it_was() -> None:
    """A stream that goes on: the kernel takes 10 bytes a second of what the client reads, and 10 more come."""
    unread = Unread(1024.0)
    waited = [unread.look(float(second), 1000 + 10 * second, 1000) for second in range(62)]
    assert waited[61] == pytest.approx(61.0 - 61 * 10 / 1024)


def test_a_body_may_take_as_long_as_its_bytes_earn(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(connections_module.time, "monotonic", lambda: now)

    def seconds_until_cut(bytes_each_second: int, seconds: int = 10_000) -> int | None:
        nonlocal now
        body = Body(False, 30.0, 1024.0)
        for second in range(seconds):
            body.wait()
            if body.left <= 1.0:
                return second
            now += 1.0
            body.take(bytes_each_second)
        return None

    assert seconds_until_cut(1) in range(28, 31)
    assert 50 < (seconds_until_cut(512) or 0) < 70, "half the rate: twice the time"
    assert seconds_until_cut(1024) is None and seconds_until_cut(10**6) is None
    body = Body(False, 30.0, 1024.0)
    body.wait()
    body.take(10**9)
    assert body.left == 30.0, "what came fast buys no silence later"
    now += 1000.0  # the server writes to its disk
    assert body.left == 30.0 and body.unsent_seconds() == 0.0
    body.wait()
    now += 29.0
    assert body.unsent_seconds() == 29.0


@pytest.mark.parametrize(
    ("host", "shared"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:0:7:1:2:3:4", "2001:db8:0:7::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", None),
        (None, None),
        ("testclient", None),
    ],
)
def test_what_counts_as_one_address(host: str | None, shared: str | None) -> None:
    assert shared_address(host) == shared


@pytest.mark.parametrize("proxies", [["127.0.0.1"], ["10.0.0.0/8", "127.0.0.0/8"], ["192.0.2.1", "*"], ["2001:db8::/32"]])
@pytest.mark.parametrize("peer", ["127.0.0.1", "::ffff:127.0.0.1", "192.0.2.9", "::ffff:192.0.2.9", "2001:db8::7"])
def test_uvicorn_trusts_the_proxies_that_are_not_limited_by_address(proxies: list[str], peer: str) -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None: ...

    scope = {"type": "http", "scheme": "http", "client": (peer, 1), "headers": [(b"x-forwarded-for", b"198.51.100.1")]}
    asyncio.run(ProxyHeadersMiddleware(app, forwarders(proxies))(scope, receive, send))  # type: ignore[arg-type] # of the same shape
    assert (seen[0]["client"][0] == "198.51.100.1") == is_proxy(peer, proxies)


def test_trusted_proxies_are_addresses_or_networks() -> None:
    assert is_proxy("10.1.2.3", ["10.0.0.0/8"]) and is_proxy("::ffff:10.1.2.3", ["10.1.2.3"]) and is_proxy("2001:db8::1", ["*"])
    assert not is_proxy("11.1.2.3", ["10.0.0.0/8", "2001:db8::/32"]) and not is_proxy("", ["10.0.0.0/8"]) and not is_proxy("10.1.2.3", [])


@pytest.mark.parametrize(
    ("soft", "hard", "connections", "raised"),
    [
        (1024, 524_288, 4096, 9216),  # as systemd has it
        (1024, 4096, 1536, 4096),
        (65_536, 65_536, 4096, None),
        (256, 256, 64, None),
        (server.resource.RLIM_INFINITY, server.resource.RLIM_INFINITY, 4096, None),
        (1024, server.resource.RLIM_INFINITY, 4096, 9216),
    ],
)
def test_files_for_all_connections(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, connections: int, raised: int | None) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(server.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(server.resource, "setrlimit", lambda _, both: found.append(both))
    assert server.raise_file_limit(4096) == connections
    assert found == ([] if raised is None else [(raised, hard)])
