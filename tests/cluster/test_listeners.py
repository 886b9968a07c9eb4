"""Who comes in over TCP: real TLS on loopback, workers that may, and all that may not, each with one message and nothing given away."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_worker_pool import HELLO, Station
from tlora.cluster import listeners, session
from tlora.cluster.credentials import CERTIFICATE, TOKENS, WorkerTokens
from tlora.cluster.hosts import STRIDE
from tlora.cluster.listeners import TlsListener
from tlora.cluster.worker_pool import Limits
from tlora.cluster.worker_process import read_records, write_record
from tlora.errors import ConfigError
from tlora.link import tls_port
from tlora.link.address import tcp_place
from tlora.link.authentication import (
    AdmissionError,
    AuthOk,
    AuthRequest,
    AuthResponse,
    Entry,
    admission_line,
    answer_path,
    prove,
    read_admission,
    read_number,
)
from tlora.link.endpoint import Endpoint, dial
from tlora.link.lines import Connection, Line
from tlora.link.process_identity import ProcessIdentity, identify
from tlora.link.tls import connect_tls
from tlora.link.versions import versions
from tlora.protocol import MemoryFound, NodeAdded
from tlora.shape import CPU_SHARE
from tlora.worker_protocol import Alive, Device, Hello, HostLabels, worker_line

OWN = identify(os.getpid())
assert OWN is not None


class TcpStation(Station):
    """One whose crew also listens on a TCP port, and a token for it."""

    def __init__(self, directory: Path, gpus: tuple[int, ...] = (0, 1), **limits: float) -> None:
        super().__init__(directory, limits=Limits(**limits), gpus=gpus)
        self.directory = directory
        self.listener = TlsListener(directory, ("127.0.0.1", 0))
        self.worker_pool.listen_on(self.listener)
        self.tokens = WorkerTokens(directory)
        self.token, self.secret = self.tokens.create(3600)

    def dial(self, secret: str | None = None) -> Line:
        return dial(Endpoint(self.listener.address, self.listener.fingerprint, secret or self.secret), 0)

    def say_hello(self, hello: Hello = HELLO, secret: str | None = None) -> tuple[Line, bytes]:
        """The line, which stays open, and the answer."""
        line = self.dial(secret)
        line.send(worker_line(hello))
        return line, line.read_line(60) or b""

    def by_hand(self) -> Line:
        """After the handshake."""
        return Line(connect_tls(tcp_place(self.listener.address), self.listener.fingerprint))

    def enter(self, line: Line, entry: Entry) -> Any:
        line.send(admission_line(entry))
        return read_admission(line, 60)

    def enter_as(self, change: dict[str, Any]) -> Line:
        """Admitted as another process; the Hello may follow."""
        line = self.by_hand()
        challenge = self.enter(line, replace(self.entry, **change))
        line.send(admission_line(prove(Path(challenge.path))))
        assert read_admission(line, 60) == AuthOk()
        return line

    @property
    def entry(self) -> Entry:
        return Entry(self.secret, OWN.pid, OWN.start_ticks, OWN.boot)

    def note(self) -> str:
        """The one that there is, once there is one."""
        wait_for(lambda: bool(self.notes))
        (note,) = self.notes
        assert self.secret not in note
        return note

    def is_empty(self) -> bool:
        """Nobody is in, and nothing is left of who tried."""
        return not self.worker_pool.workers and not list(self.directory.glob(".proof-*"))


def wait_for(fact: Callable[[], bool]) -> None:
    """A test that waits in vain ends by pytest's own limit."""
    while not fact():
        time.sleep(0.005)


@pytest.fixture
def station(tmp_path: Path) -> Iterator[TcpStation]:
    made = TcpStation(tmp_path)
    yield made
    made.close()


def test_a_worker_with_a_token_comes_in(station: TcpStation) -> None:
    line, answer = station.say_hello()
    assert (
        b'"ack"' in answer
        and station.worker_pool.workers[0].process.pid == os.getpid()
        and station.worker_pool.workers[0].jobs["a"].attempt == 7
    )
    assert not list(station.directory.glob(".proof-*")) and not station.notes
    assert (station.directory / "tcp-address").read_text() == station.listener.address + "\n"
    line.close()
    line, answer = station.say_hello()
    assert b'"ack"' in answer, "it may dial again"
    line.close()
    line, answer = station.say_hello(replace(HELLO, incarnation="another's"))
    assert b"there is a worker already" in answer
    line.close()


def test_tokens_that_let_nobody_in(station: TcpStation) -> None:
    """The message tells what is wrong with the token, and neither the message nor the note tells the token."""
    revoked, secret = station.tokens.create(3600)
    assert station.tokens.revoke(revoked.id)
    with pytest.raises(AdmissionError, match=rf"{revoked.id}, which was revoked. `tlora worker-token` makes a new one"):
        station.dial(secret)
    unknown = "tlw-" + "u" * 43
    with pytest.raises(AdmissionError, match="with a token that is unknown here"):
        station.dial(unknown)
    path = station.directory / TOKENS
    path.write_text(path.read_text().replace('"purpose": "worker"', '"purpose": "something else"'))
    with pytest.raises(AdmissionError, match="with a token that is unknown here"):
        station.dial()
    wait_for(lambda: len(station.notes) == 3)
    assert all(word not in note for note in station.notes for word in (secret, unknown, station.secret)) and station.is_empty()


def test_an_expired_token_lets_in_whom_it_has_let_in_before(station: TcpStation) -> None:
    _, secret = station.tokens.create(-1)
    line, answer = station.say_hello(secret=secret)
    assert b"has expired, and was not here before" in answer and station.is_empty()
    line.close()
    write_record(station.directory, (0,), OWN)  # by this controller or an earlier one
    line, answer = station.say_hello(secret=secret)
    assert b'"ack"' in answer
    line.close()


def test_a_revoked_token_stops_its_workers(station: TcpStation) -> None:
    line, answer = station.say_hello()
    assert b'"ack"' in answer
    other = station.worker_pool.workers[0]
    station.tokens.revoke(station.token.id)
    assert b'"stop":true' in (line.read_line(60) or b"")
    assert other.stopping and f"{station.token.id} was revoked" in station.note()
    line.close()


def test_plain_text_on_the_port_is_no_worker(station: TcpStation) -> None:
    with socket.create_connection(tcp_place(station.listener.address)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + worker_line(HELLO))
        plain.settimeout(60)
        answer = b""
        try:
            while chunk := plain.recv(1000):
                answer += chunk
        except ConnectionResetError:
            pass
    assert len(answer) < 16, "an alert of TLS at most"
    note = station.note()
    assert "does not speak TLS 1.3" in note and "127.0.0.1:" in note and station.is_empty()


def test_who_dawdles_is_shown_out_and_keeps_nobody_waiting(station: TcpStation, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tcp_place(station.listener.address)
    with socket.create_connection(place) as slow:
        line, answer = station.say_hello()  # while the slow one is waited for
        assert b'"ack"' in answer
        line.close()
        monkeypatch.setattr(tls_port, "ADMISSION_SECONDS", 0.2)
        with socket.create_connection(place) as slower:
            slower.sendall(b"\x16\x03\x01")
            slower.settimeout(60)
            assert not slower.recv(100)
        slow.close()
    wait_for(lambda: len(station.notes) == 2)
    assert any("without a TLS handshake for 0.2 s" in note for note in station.notes)
    station.notes.clear()
    monkeypatch.setattr(tls_port, "ADMISSION_SECONDS", 600.0)
    monkeypatch.setattr(tls_port, "read_admission", lambda line, _: read_admission(line, 0.2))
    line = station.by_hand()
    assert line.read_line(60) is None, "it shook hands and showed no token"
    line.close()
    assert "without a token" in station.note()


def test_more_strangers_than_there_is_room_for_are_shut_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_port, "_MOST_STRANGERS", 1)
    station = TcpStation(tmp_path)
    with socket.create_connection(tcp_place(station.listener.address)) as first:
        with socket.create_connection(tcp_place(station.listener.address)) as second:
            second.settimeout(60)
            assert not second.recv(1)
        first.shutdown(socket.SHUT_RDWR)
        assert "does not speak TLS" in station.note()
    for _ in range(3):  # room is given back, by those who were let in too
        line, answer = station.say_hello()
        assert b'"ack"' in answer
        line.close()
    station.close()


@pytest.mark.parametrize("fault", [OSError("it has ended"), RuntimeError("can't start new thread")])
def test_a_connection_that_cannot_be_taken_gives_its_place_back(fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [fault]

    def make_line(connection: Connection) -> Line:
        if faults:
            raise faults.pop()
        return Line(connection)

    monkeypatch.setattr(tls_port, "_MOST_STRANGERS", 1)
    monkeypatch.setattr(session, "Line", make_line)
    station = TcpStation(tmp_path)
    with socket.create_connection(tcp_place(station.listener.address)) as first:
        first.settimeout(60)
        assert not first.recv(1) and not faults
    line, answer = station.say_hello()
    assert b'"ack"' in answer
    line.close()
    station.close()


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"kind":"entry","token":["SECRET"],"pid":1,"start_ticks":1,"boot":""}\n',
        b'{"kind":"entry","token":"SECRET","pid":"x"}\n',
        b"SECRET" * 2000,
        admission_line(AuthOk()),
        worker_line(HELLO),
    ],
)
def test_what_is_no_entry_ends_the_connection_and_is_not_repeated(station: TcpStation, content: bytes) -> None:
    line = station.by_hand()
    line.send(content)
    assert line.read_line(60) is None
    line.close()
    note = station.note()
    assert "without a token" in note and "SECRET" not in note and station.is_empty()


LABELS = HostLabels("b", "rack 2", "boot b", (Device("cpu", 10**10),))
REMOTE = replace(HELLO, incarnation="of b", host=LABELS, jobs=(), load=None, versions=versions())


@pytest.mark.parametrize("change", [{"pid": 2**22 + 1}, {"start_ticks": OWN.start_ticks - 1}, {"boot": "of another host"}])
def test_a_process_that_is_not_here_is_of_another_host(station: TcpStation, change: dict[str, Any]) -> None:
    """It has shown that it reads and writes the store: its GPU gets a number and its host a node; its lease, no pid, says when it ended."""
    line = station.enter_as(change)
    line.send(worker_line(REMOTE))
    station.do(lambda: station.worker_pool.listen(3600))  # which returns when a host has come
    assert b'"ack"' in (line.read_line(60) or b"")
    (worker,) = station.worker_pool.workers.values()
    assert worker.gpus == (STRIDE,) and worker.process.identity is None and worker.display_name == "GPU 0 of host b"
    assert station.worker_pool.remote_hosts.events == [
        MemoryFound((STRIDE,), (int(CPU_SHARE * 10**10),)),
        NodeAdded("b", (STRIDE,), "rack 2"),
    ]
    line.send(worker_line(Alive(0, "waiting", 1, said_seconds=12.5)))
    assert b'"heard":12.5' in (line.read_line(60) or b"")
    assert station.note() == "a worker has come for GPU 0 of host b"
    assert not read_records(station.directory)
    line.close()


@pytest.mark.parametrize(
    ("hello", "fact"),
    [
        (replace(REMOTE, host=None), "it says nothing of its host"),
        (replace(REMOTE, host=replace(LABELS, name="local")), "calls itself 'local'"),
        (replace(REMOTE, gpus=(0, 1)), "it names 1 device for its 2 GPUs"),
        (replace(REMOTE, gpus=(-1,)), "GPUs [-1]"),
        (replace(REMOTE, gpus=(STRIDE,)), f"GPUs [{STRIDE}]"),
        (
            replace(REMOTE, host=replace(LABELS, devices=(Device("NVIDIA H100"),))),
            "has NVIDIA H100, and this cluster trains on CPUs",
        ),
        (replace(REMOTE, versions=versions() | {"torch": "1.0"}), "has torch 1.0, and this is "),
        (replace(REMOTE, versions={"tlora": "0.0.1"}), "is of tlora 0.0.1"),
        (replace(REMOTE, epoch=6), "later controller"),
    ],
)
def test_a_hello_of_another_host_that_is_refused_says_why(station: TcpStation, hello: Hello, fact: str) -> None:
    line = station.enter_as({"boot": "of another host"})
    line.send(worker_line(hello))
    answer = json.loads(line.read_line(60) or b"{}")
    line.close()
    assert answer["kind"] == "refusal" and fact in answer["reason"] and not station.worker_pool.workers, answer
    assert not station.worker_pool.remote_hosts.events


def test_a_worker_without_jobs_that_has_gone_makes_room_at_once(station: TcpStation) -> None:
    """As where it is started again; its lease would last minutes."""
    first = station.enter_as({"boot": "of another host"})
    first.send(worker_line(REMOTE))
    assert b'"ack"' in (first.read_line(60) or b"")
    first.close()
    (gone,) = station.worker_pool.workers.values()
    wait_for(lambda: not gone.connected)
    again = station.enter_as({"boot": "of another host"})
    again.send(worker_line(replace(REMOTE, incarnation="another")))
    wait_for(lambda: gone.process.wait(0.0))
    station.do(lambda: station.worker_pool.workers.pop(STRIDE, None))  # as the back end does when it hears of an end
    assert b'"ack"' in (again.read_line(60) or b"")
    again.close()


def test_two_workers_of_a_host_cannot_have_one_gpu_and_a_replayed_hello_takes_nothing(station: TcpStation) -> None:
    first = station.enter_as({"boot": "of another host"})
    first.send(worker_line(REMOTE))
    assert b'"ack"' in (first.read_line(60) or b"")
    for other in (replace(REMOTE, incarnation="another"), replace(REMOTE, incarnation="another", gpus=(0,))):
        line = station.enter_as({"boot": "of another host"})
        line.send(worker_line(other))
        refusal = line.read_line(60) or b""
        assert b"there is a worker already that has GPU 0 of host b" in refusal and b"another --host" in refusal
        line.close()
    first.close()


def test_another_users_process_is_not_this_users(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OWN.is_this_users and not replace(OWN, start_ticks=1).is_this_users and not ProcessIdentity(2**22 + 1, 1, OWN.boot).is_this_users
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not OWN.is_this_users


def _elsewhere(path: Path) -> AuthResponse:
    return AuthResponse(problem="No such file or directory")


def _guess(path: Path) -> AuthResponse:
    return replace(prove(path), number="0" * 64)


def _no_answer(path: Path) -> AuthResponse:
    return AuthResponse(read_number(path), "0" * 64)


def _other_answer(path: Path) -> AuthResponse:
    return replace(prove(path), answer="0" * 64)


def _public_answer(path: Path) -> AuthResponse:
    proof = prove(path)
    answer_path(path).chmod(0o644)
    return proof


@pytest.mark.parametrize("answer", [_elsewhere, _guess, _no_answer, _other_answer, _public_answer])
def test_a_worker_that_does_not_see_the_store_gets_its_files_by_the_line(
    station: TcpStation, answer: Callable[[Path], AuthResponse]
) -> None:
    line = station.by_hand()
    challenge = station.enter(line, station.entry)
    assert isinstance(challenge, AuthRequest) and Path(challenge.path).parent == station.directory
    line.send(admission_line(answer(Path(challenge.path))))
    assert read_admission(line, 60) == AuthOk()
    line.send(worker_line(REMOTE))
    assert b'"ack"' in (line.read_line(60) or b"")
    (worker,) = station.worker_pool.workers.values()
    assert worker.files_by_line
    line.close()
    line = station.enter_as({"boot": "of another host"})  # that it sees the store now changes nothing
    line.send(worker_line(REMOTE))
    assert b'"ack"' in (line.read_line(60) or b"") and worker.files_by_line
    line.close()


def test_a_worker_that_has_lost_sight_of_the_store_is_refused(station: TcpStation) -> None:
    first = station.enter_as({"boot": "of another host"})
    first.send(worker_line(REMOTE))
    assert b'"ack"' in (first.read_line(60) or b"")
    line = station.by_hand()
    station.enter(line, replace(station.entry, boot="of another host"))
    line.send(admission_line(AuthResponse(problem="Stale file handle")))
    assert read_admission(line, 60) == AuthOk()
    line.send(worker_line(REMOTE))
    assert f"does not see {station.directory} any more".encode() in (line.read_line(60) or b"")
    line.close()
    first.close()


def test_a_worker_that_ends_within_its_proof_leaves_nothing(station: TcpStation) -> None:
    line = station.by_hand()
    challenge = station.enter(line, station.entry)
    prove(Path(challenge.path))
    line.end()
    assert "ended before it had shown that it sees" in station.note() and station.is_empty()
    line.close()


def test_trouble_of_the_controllers_own_refuses_nobody(station: TcpStation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection ends without a refusal, which would end the worker: it dials again."""

    def full(path: Path, number: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(listeners, "write_number", full)
        with pytest.raises(ConnectionError):
            station.dial()
    assert "cannot be written (No space left on device)" in station.note()
    station.notes.clear()
    kept = (station.directory / TOKENS).read_text()
    (station.directory / TOKENS).write_text("{")
    with pytest.raises(ConnectionError):
        station.dial()
    assert "is damaged" in station.note()
    (station.directory / TOKENS).write_text(kept)
    line, answer = station.say_hello()
    assert b'"ack"' in answer
    line.close()


def test_a_port_that_cannot_be_had_is_one_error(station: TcpStation, tmp_path: Path) -> None:
    host, port = tcp_place(station.listener.address)
    with pytest.raises(ConfigError, match=f"tcp://127.0.0.1:{port}: cannot listen there for workers: Address already in use"):
        TlsListener(tmp_path, (host, port))
    with pytest.raises(ConfigError, match="cannot listen there for workers"):
        TlsListener(tmp_path, ("192.0.2.1", port))  # of no machine


def test_the_next_controller_has_the_same_port_and_certificate_and_clears_up(tmp_path: Path) -> None:
    left_behind = tmp_path / f".proof-{'a' * 32}"
    with TlsListener(tmp_path, ("127.0.0.1", 0)) as first:
        place, fingerprint = tcp_place(first.address), first.fingerprint
        left_behind.touch()
    assert first.is_closed
    with TlsListener(tmp_path, place) as second:
        assert second.fingerprint == fingerprint and not left_behind.exists()
    (tmp_path / CERTIFICATE).unlink()
    with TlsListener(tmp_path, place) as third:
        assert third.fingerprint != fingerprint
