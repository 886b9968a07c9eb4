"""One thread that serves many connections: pieces of lines, peers that do not read, and ends, over sockets and over TLS."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tlora.cluster.credentials import open_certificate
from tlora.link import lines, reactor
from tlora.link.lines import Connection, Line
from tlora.link.reactor import Channel, Reactor
from tlora.link.tls import TlsStream, connect_tls


class Peer:
    """The far end of a connection of the reactor's, which is read and written as any thread does."""

    def __init__(self, far: Connection, near: Connection, served: Reactor) -> None:
        self.line = Line(far)
        self.heard: list[bytes] = []
        self.ends: list[ValueError | None] = []
        self.channel = Channel(Line(near), self._hear, self._end)
        served.add(self.channel)

    def _hear(self, line: bytes) -> None:
        if line == b"bad\n":
            raise ValueError("bad")
        self.heard.append(line)

    def _end(self, error: ValueError | None) -> bytes:
        self.ends.append(error)
        return b"" if error is None else f"refused: {error}\n".encode()


@pytest.fixture
def served() -> Iterator[Reactor]:
    made = Reactor()
    yield made
    made.close()


def plain(_: Path) -> tuple[Connection, Connection]:
    return socket.socketpair()


def tls(directory: Path) -> tuple[Connection, Connection]:
    context, fingerprint = open_certificate(directory)
    accepted: list[TlsStream] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            accepted.append(TlsStream(listener.accept()[0], context, server_side=True))
            accepted[0].handshake(60)

        thread = threading.Thread(target=accept)
        thread.start()
        far = connect_tls(listener.getsockname(), fingerprint)
        thread.join()
    return far, accepted[0]


Pair = Callable[[Path], tuple[Connection, Connection]]
both = pytest.mark.parametrize("pair", [plain, tls])


def until(served: Reactor, fact: Callable[[], bool]) -> None:
    """A test that waits in vain ends by pytest's own limit."""
    while not fact():
        served.turn(0.05)


@both
def test_lines_come_whole_and_in_order_however_they_are_cut(pair: Pair, tmp_path: Path, served: Reactor) -> None:
    peer = Peer(*pair(tmp_path), served)
    wanted = [b"%d" % number * (number * 997 % 30_000) + b"\n" for number in range(60)]
    sent = b"".join(wanted)

    def send() -> None:
        for place in range(0, len(sent), 7001):
            peer.line.send(sent[place : place + 7001])
        peer.line.send(b"torn")
        peer.line.end()

    thread = threading.Thread(target=send)
    thread.start()
    until(served, lambda: bool(peer.ends))
    thread.join()
    assert peer.heard == wanted and peer.ends == [None], "what has no end was cut"
    peer.line.close()


@both
def test_what_was_read_with_the_first_line_is_heard_too(pair: Pair, tmp_path: Path, served: Reactor) -> None:
    far, near = pair(tmp_path)
    Line(far).send(b"hello\nfirst\nsec")
    admitted = Line(near)
    assert admitted.read_line(60) == b"hello\n"
    heard: list[bytes] = []
    served.add(Channel(admitted, heard.append, lambda _: b""))
    until(served, lambda: bool(heard))
    Line(far).send(b"ond\n")
    until(served, lambda: len(heard) == 2)
    assert heard == [b"first\n", b"second\n"]
    far.close()


@both
def test_a_peer_that_does_not_read_delays_no_other_and_gets_all_later(pair: Pair, tmp_path: Path, served: Reactor) -> None:
    slow, quick = Peer(*pair(tmp_path), served), Peer(*plain(tmp_path), served)
    sent = [b"%d" % number + bytes([65 + number]) * 3_000_000 + b"\n" for number in range(5)]
    for line in sent:
        served.send(slow.channel, line)
    assert slow.channel.waits, "the system has no room for as much"
    served.send(quick.channel, b"now\n")
    assert quick.line.read_line(60) == b"now\n"
    quick.line.send(b"still heard\n")
    until(served, lambda: quick.heard == [b"still heard\n"])
    read: list[bytes | None] = []
    thread = threading.Thread(target=lambda: read.extend(slow.line.read_line(60) for _ in sent))
    thread.start()
    until(served, lambda: not thread.is_alive())
    assert read == sent and not slow.channel.waits
    slow.line.send(b"back\n")
    until(served, lambda: slow.heard == [b"back\n"])
    quick.line.close()
    slow.line.close()


def test_a_peer_that_never_reads_is_given_up(served: Reactor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reactor, "_MOST_UNSENT", 3)
    peer = Peer(*plain(tmp_path), served)
    for _ in range(6):
        served.send(peer.channel, b"x" * 3_000_000)
    until(served, lambda: bool(peer.ends))
    served.send(peer.channel, b"to nobody")
    peer.line.close()


@both
def test_a_wrong_line_ends_the_connection_with_a_word(pair: Pair, tmp_path: Path, served: Reactor) -> None:
    peer = Peer(*pair(tmp_path), served)
    peer.line.send(b"good\nbad\nnever heard\n")
    until(served, lambda: bool(peer.ends))
    assert peer.heard == [b"good\n"] and str(peer.ends[0]) == "bad" and len(peer.ends) == 1
    assert peer.line.read_line(60) == b"refused: bad\n" and peer.line.read_line(60) is None
    peer.line.close()


def test_a_line_without_end_is_refused(served: Reactor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LONGEST_LINE", 100_000)
    peer = Peer(*plain(tmp_path), served)
    peer.line.send(b"x" * 110_000)
    until(served, lambda: bool(peer.ends))
    assert "a line has more than 100,000 bytes" in str(peer.ends[0])
    peer.line.close()


def test_after_the_last_line_the_connection_ends(served: Reactor, tmp_path: Path) -> None:
    peer = Peer(*plain(tmp_path), served)
    served.send(peer.channel, b"go\n", is_last=True)
    assert peer.line.read_line(60) == b"go\n" and peer.line.read_line(60) is None
    until(served, lambda: peer.ends == [None])
    peer.line.close()


def test_another_thread_wakes_it_before_and_while_it_waits(served: Reactor) -> None:
    served.wake()
    served.turn(600)
    timer = threading.Timer(0.05, served.wake)
    timer.start()
    served.turn(600)
    timer.join()
