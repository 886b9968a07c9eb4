"""Clients that keep a server waiting, on real sockets: others are served, and the attackers are closed.

The small cases have limits of their own. The soak tests attack `tlora serve` as it is installed.
"""

from __future__ import annotations

import resource
import ssl
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.service.attackers import attacking, get, post
from tests.service.served import ROW, Served, listening, until
from tests.service.test_real_server import Server, running
from tlora.cluster.credentials import open_certificate
from tlora.service.database import job_rows
from tlora.service.server import raise_file_limit

NEVER = 3600.0  # no deadline helps: what is tested is who gives way
HALF_A_HEADER = b"GET /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-"
NO_CHECK = ssl.create_default_context()
NO_CHECK.check_hostname, NO_CHECK.verify_mode = False, ssl.CERT_NONE


def ask(url: str, key: str) -> int:
    """The status of a new connection's request; 0 where there was no answer."""
    try:
        return httpx.get(f"{url}/v1/jobs", headers={"X-API-Key": key}, timeout=60, verify=NO_CHECK).status_code
    except httpx.TransportError:
        return 0


def connections_of(served: Served) -> int:
    return served.opened.services.connections.count


def nothing(_: str) -> bytes:
    return b""


def half_a_header(_: str) -> bytes:
    return HALF_A_HEADER


def a_body(key: str) -> bytes:
    return post("/v1/jobs", key)


def an_upload(key: str) -> bytes:
    form = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    return post("/v1/files", key, 1 << 30, "multipart/form-data; boundary=B") + form


def test_neither_a_next_header_nor_the_rest_of_a_body_that_is_not_needed_comes_a_byte_at_a_time(tmp_path: Path) -> None:
    with listening(tmp_path / "server", connections={"header_seconds": 1.0, "keep_alive_seconds": NEVER}) as (served, url):

        def answered_and_cut(first: bytes) -> bool:
            """On a busy machine the first header may be late too."""
            with attacking(url, 3, first, drip=0.05) as attack:
                until(lambda: not attack.alive)
                return all(answer.startswith(b"HTTP/1.1 200 ") for answer in attack.answers)

        for more in (get("/healthz", "x") + HALF_A_HEADER, get("/healthz", "x", "Content-Length: 100000")):
            until(lambda: answered_and_cut(more))  # noqa: B023 (it is called at once)
        with attacking(url, 3, get("/healthz", "x")) as attack:  # it is kept for a next request
            headers = {"X-API-Key": served.key("alice")}
            stream = httpx.stream("GET", f"{url}/v1/events/stream", headers=headers, timeout=60)
            with stream as events:  # which has no deadline either
                assert events.status_code == 200
                until(lambda: served.opened.services.connections.clock > 5.0)
                assert attack.alive == 3
                served.submit("alice")
                assert any(line.startswith("event: created") for line in events.iter_lines())
    assert served.opened.services.connections.timed_out >= 6


def test_what_clients_get_wrong_fills_no_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """uvicorn has lines for each, one of which names packages to install that would change nothing."""
    upgrade = get("/healthz", "x", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    with (
        listening(tmp_path / "server") as (_, url),
        attacking(url, 2, upgrade) as upgrading,
        attacking(url, 2, b"\x16\x03\x01\r\n") as garbage,
    ):
        until(lambda: not garbage.alive)
        assert all(answer.startswith(b"HTTP/1.1 400 ") for answer in garbage.answers)
        upgrading.send(get("/nothing", "x", "Connection: close"))
        until(lambda: not upgrading.alive)
        assert all(answer.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 401 " in answer for answer in upgrading.answers)
    assert "request" not in capfd.readouterr().err


@pytest.mark.parametrize("path", [pytest.param("/v1/jobs", marks=pytest.mark.slow), "/v1/files"])
def test_a_body_that_comes_a_byte_at_a_time_is_cut(tmp_path: Path, path: str) -> None:
    """With a message, and nothing of it is kept."""
    limits = {"body_seconds": 0.5, "body_bytes_per_second": 1000.0}
    with listening(tmp_path / "server", limits=limits) as (served, url):
        key = served.key("alice")
        with attacking(url, 10, an_upload(key) if path == "/v1/files" else a_body(key), drip=0.05) as attack:
            until(lambda: not attack.alive)
            for answer in attack.answers:
                assert answer.startswith(b"HTTP/1.1 408 ") and b"less than 1000 bytes a second" in answer
        assert not list((tmp_path / "server" / "files").rglob("tmp-*"))
        assert ask(url, served.key("alice")) == 200


@pytest.mark.parametrize("path", ["file", "stream"])
def test_a_client_that_reads_a_little_at_a_time_is_dropped_and_its_place_is_free(tmp_path: Path, path: str) -> None:
    """Whatever it reads: at most 256 bytes each 5 ms, where a million a second are due."""
    limits = {"write_seconds": 0.5, "write_bytes_per_second": 1e6}
    with listening(tmp_path / "server", connections=limits) as (served, url):
        file = served.upload("alice", ROW * 400_000)
        tenant = next((tmp_path / "server" / "files").iterdir()).name
        told = [(tenant, None, "note", "x" * 1000)] * 3000  # more than the kernel's buffers take
        served.opened.services.writer.do(lambda connection: job_rows.add_events(connection, told))
        wanted = f"/v1/files/{file}/content" if path == "file" else "/v1/events/stream?after=0"
        with attacking(url, 1, get(wanted, served.key("alice")), room=4096) as attack:

            def read_and_look() -> bool:
                with suppress(OSError):
                    attack.sockets[0].recv(256)
                return served.opened.services.connections.timed_out == 1

            until(read_and_look)
        until(lambda: not sum(served.opened.services.streams.values()))


def test_behind_a_trusted_proxy_the_forwarded_address_counts_and_from_others_it_does_not(tmp_path: Path) -> None:
    def forwarded(address: str) -> list[str]:
        return [f"X-Forwarded-For: {address}"]

    settings = {"trusted_proxies": ["127.0.0.1"], "connections": {"per_address": 3}}
    with listening(tmp_path / "server", **settings) as (served, url):
        key = served.key("alice")

        def status(address: str) -> int:
            return httpx.get(f"{url}/v1/jobs", headers={"X-API-Key": key, "X-Forwarded-For": address}).status_code

        with attacking(url, 3, get("/v1/events/stream", key, *forwarded("192.0.2.7"))) as attack:
            until(lambda: sum(served.opened.services.streams.values()) == 3)
            refused = httpx.get(f"{url}/v1/jobs", headers={"X-API-Key": key, "X-Forwarded-For": "192.0.2.7"})
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert "3 requests of 192.0.2.7" in refused.json()["error"]["message"]
            assert status("192.0.2.8") == 200 and attack.alive == 3
        until(lambda: status("192.0.2.7") == 200)
        claims = [get("/v1/events/stream", key, *forwarded(f"192.0.2.{number}")) for number in range(4)]
        with attacking(url, 4, claims[0], sources=["127.0.0.9"]) as attack:  # which is no proxy
            until(lambda: attack.alive == 3)
            assert attack.answers[0].startswith(b"HTTP/1.1 503 ") or not attack.answers[0]


def test_tls_handshakes_have_a_place_and_a_deadline(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    tls, _ = open_certificate(tmp_path)
    limits = {"per_address": 10, "header_seconds": NEVER}
    with listening(tmp_path / "server", tls=tls, connections=limits) as (served, url):
        key = served.key("alice")
        with attacking(url, 20, b"\x16\x03\x01") as attack:
            assert [ask(url, key) for _ in range(3)] == [200] * 3
            until(lambda: attack.alive <= 10)
        assert served.upload("alice", ROW * 100_000) and served.submit("alice")
        with attacking(url, 2, b"GET / HTTP/1.1\r\n\r\n") as attack:
            until(lambda: not attack.alive)
    with listening(tmp_path / "other", tls=tls, connections={"header_seconds": 0.5}) as (served, url):
        with attacking(url, 10, b"\x16\x03\x01") as attack:
            until(lambda: not attack.alive)
        until(lambda: ask(url, served.key("alice")) == 200)
        served.client.close()
        until(lambda: not connections_of(served))


@pytest.mark.soak
@pytest.mark.parametrize("first", [nothing, half_a_header, a_body, an_upload])
@pytest.mark.parametrize("addresses", [1, 50])
def test_a_thousand_connections_shut_nobody_out(tmp_path: Path, first: Callable[[str], bytes], addresses: int) -> None:
    """`tlora serve` with its own limits, as a shell starts it: with 1,024 files at first. The numbers are the promise's."""
    raise_file_limit(2000)
    sources = [f"127.0.8.{number}" for number in range(1, addresses)] + ["127.0.0.1"]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with running(tmp_path / "server") as servers:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        try:
            servers.append(Server(tmp_path / "server"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        url, key = str(servers[0].client.base_url), servers[0].client.headers["X-API-Key"]
        with attacking(url, 1000, first(key), drip=1.0 if first is not nothing else None, sources=sources) as attack:
            until(lambda: ask(url, key) == 200)
            taken: list[float] = []
            for _ in range(40):
                began = time.monotonic()
                assert ask(url, key) == 200
                taken.append(time.monotonic() - began)
            assert statistics.median(taken) <= 1.0, taken
            until(lambda: not attack.alive)
        assert ask(url, key) == 200
