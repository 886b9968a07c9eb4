"""TLS on loopback: real sockets, real handshakes, and other ends that are not what they should be."""

from __future__ import annotations

import http.server
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tlora.cluster.credentials import open_certificate
from tlora.errors import ConfigError
from tlora.link import tls
from tlora.link.lines import Connection, Line
from tlora.link.tls import TlsStream, connect_tls, read_fingerprint


@contextmanager
def listening() -> Iterator[tuple[socket.socket, tuple[str, int]]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener, listener.getsockname()


@contextmanager
def pair(directory: Path) -> Iterator[tuple[TlsStream, TlsStream]]:
    """A worker's end and a controller's, after the handshake."""
    context, fingerprint = open_certificate(directory)
    with listening() as (listener, place):
        accepted: list[TlsStream] = []

        def accept() -> None:
            accepted.append(TlsStream(listener.accept()[0], context, server_side=True))
            accepted[0].handshake(60)

        thread = threading.Thread(target=accept)
        thread.start()
        ours = connect_tls(place, fingerprint)
        thread.join()
        try:
            yield ours, accepted[0]
        finally:
            ours.close()
            accepted[0].close()


@pytest.fixture(params=["unix", "tls"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Connection, Connection]]:
    if request.param == "tls":
        with pair(tmp_path) as streams:
            yield streams
    else:
        sockets = socket.socketpair()
        yield sockets
        for each in sockets:
            each.close()


def test_bytes_that_are_awaited_for_some_time_do_not_end_what_is_sent_meanwhile(ends: tuple[Connection, Connection]) -> None:
    """Each end's timeout is set and taken away hundreds of times while its other thread sends."""
    lines, count, content = [Line(end) for end in ends], 200, b"x" * (1 << 20)
    received = [0, 0]

    def send(side: int) -> None:
        for _ in range(count):
            lines[side].send(b"some bytes\n" + content)

    def receive(side: int) -> None:
        while received[side] < count and lines[side].read_line() == b"some bytes\n" and lines[side].read_bytes(1 << 20, 600.0) == content:
            received[side] += 1

    threads = [threading.Thread(target=work, args=(side,), daemon=True) for side in (0, 1) for work in (send, receive)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert received == [count, count]
    with pytest.raises(TimeoutError):
        lines[0].read_line(0.01)
    with pytest.raises(TimeoutError):
        lines[0].read_bytes(1, 0.01)
    lines[1].send(b"it goes on\n")
    assert lines[0].read_line() == b"it goes on\n"


def test_what_follows_a_line_comes_whole_and_then_the_end(ends: tuple[Connection, Connection]) -> None:
    """In parts, of which some come with the line that announces them, many records of TLS at a time; a torn rest is no content."""
    lines, content = [Line(end) for end in ends], bytes(range(256)) * 3000
    sender = threading.Thread(target=lambda: (lines[0].send(b"parts\n", memoryview(content), bytearray(b"rest\n")), lines[0].end()))
    sender.start()
    assert lines[1].read_line() == b"parts\n"
    assert lines[1].read_bytes(len(content), 600.0) == content
    with pytest.raises(OSError):
        lines[1].read_bytes(6, 600.0)
    sender.join()


def test_both_ends_send_much_at_once(tmp_path: Path) -> None:
    """More than all buffers hold, by one thread of each end while another reads: nobody waits for the other for ever, no byte is lost."""
    with pair(tmp_path) as ends:
        lines = [Line(end) for end in ends]
        sent = [[bytes([65 + side]) * (100_000 * number + 1) + b"\n" for number in range(20)] for side in (0, 1)]
        received: list[list[bytes | None]] = [[], []]

        def send(side: int) -> None:
            for line in sent[side]:
                lines[side].send(line)

        def read(side: int) -> None:
            received[side] = [lines[side].read_line() for _ in sent[1 - side]]

        threads = [threading.Thread(target=act, args=(side,)) for act in (send, read) for side in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert received == [sent[1], sent[0]]
        lines[0].end()
        assert lines[1].read_line() is None


def test_bytes_on_the_wire_are_not_what_was_said(tmp_path: Path) -> None:
    context, fingerprint = open_certificate(tmp_path)
    wire = bytearray()
    with listening() as (outer, outer_place), listening() as (inner, inner_place):
        accepted: list[bytes] = []

        def serve() -> None:
            stream = TlsStream(inner.accept()[0], context, server_side=True)
            stream.handshake(60)
            accepted.append(stream.recv(100))
            stream.close()

        def pass_on(source: socket.socket, sink: socket.socket) -> None:
            while chunk := source.recv(1 << 16):
                wire.extend(chunk)
                sink.sendall(chunk)

        def tap() -> None:
            with outer.accept()[0] as left, socket.create_connection(inner_place) as right:
                back = threading.Thread(target=pass_on, args=(right, left))
                back.start()
                pass_on(left, right)
                back.join()

        threads = [threading.Thread(target=target) for target in (serve, tap)]
        for thread in threads:
            thread.start()
        ours = connect_tls(outer_place, fingerprint)
        ours.sendall(b"a token that is secret")
        assert ours._tls.version() == "TLSv1.3"
        threads[0].join()
        ours.close()
        threads[1].join()
    assert accepted == [b"a token that is secret"] and len(wire) > 500 and b"secret" not in wire


def test_another_certificate_is_noticed_before_anything_is_said(tmp_path: Path) -> None:
    context, fingerprint = open_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    wrong = open_certificate(tmp_path / "other")[1]
    heard: list[bytes | type] = []
    with listening() as (listener, place):

        def accept() -> None:
            stream = TlsStream(listener.accept()[0], context, server_side=True)
            stream.handshake(60)
            try:
                heard.append(stream.recv(100))
            except OSError as error:
                heard.append(type(error))
            stream.close()

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(ConfigError, match="Nothing was sent") as told:
            connect_tls(place, wrong)
        thread.join()
    assert fingerprint in str(told.value) and wrong in str(told.value) and "worker-token" in str(told.value)
    assert heard == [ssl.SSLEOFError]


class Plain(http.server.BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_plain_port_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprint = "sha256:" + "0" * 64
    with http.server.HTTPServer(("127.0.0.1", 0), Plain) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(ConfigError, match=r"does not speak TLS 1.3 \(.*is no controller's address"):
            connect_tls(server.server_address[:2], fingerprint)  # type: ignore[arg-type]
        thread.join()
    monkeypatch.setattr(tls, "HANDSHAKE_SECONDS", 0.2)
    with listening() as (_, place), pytest.raises(ConfigError, match=r"no handshake within 0.2 s"):
        connect_tls(place, fingerprint)
    with pytest.raises(ConnectionRefusedError):
        connect_tls(place, fingerprint)


def test_a_handshake_that_drips_ends_in_time(tmp_path: Path) -> None:
    """A byte now and then does not prolong it."""
    context, _ = open_certificate(tmp_path)
    with listening() as (listener, place), socket.create_connection(place) as slow:
        stream = TlsStream(listener.accept()[0], context, server_side=True)
        ended = threading.Event()

        def drip() -> None:
            slow.sendall(b"\x16\x03\x01\x40\x00")  # a record of 16 KiB begins
            while not ended.wait(0.01):
                slow.sendall(b"\x01")

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(TimeoutError):
            stream.handshake(0.3)
        ended.set()
        thread.join()
        stream.close()


def test_a_line_that_drips_ends_in_time() -> None:
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.01):
            theirs.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    line = Line(ours)
    with pytest.raises(TimeoutError):
        line.read_line(0.3)
    ended.set()
    thread.join()
    theirs.sendall(b"y" * 100)
    with pytest.raises(ValueError, match="more than 50 bytes"):
        line.read_line(60, 50)
    line.close()
    theirs.close()


@pytest.mark.parametrize("text", ["", "sha256:", "sha256:12", "md5:" + "a" * 64, "a" * 64, "sha256:" + "g" * 64])
def test_what_is_no_fingerprint(text: str) -> None:
    with pytest.raises(ConfigError, match="must be sha256: and 64 hexadecimal digits"):
        read_fingerprint(text)


def test_openssls_way_to_write_a_fingerprint_is_taken() -> None:
    assert read_fingerprint("SHA256:" + ":".join(["AB"] * 32)) == "sha256:" + "ab" * 32
