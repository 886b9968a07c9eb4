"""Who may be a worker: real sockets, spoken to by hand."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tlora.cluster import listeners
from tlora.cluster import worker_pool as crew_room
from tlora.cluster.epochs import begin_epoch
from tlora.cluster.worker_pool import Limits, WorkerPool
from tlora.cluster.worker_process import read_records, write_record
from tlora.errors import ConfigError
from tlora.link import address
from tlora.link.address import connect, listen
from tlora.link.process_identity import identify
from tlora.link.supervisor import SupervisedProcess
from tlora.version import __version__
from tlora.worker_protocol import PROTOCOL, Envelope, Finished, HeldJob, Hello, Load, Loaded, worker_line

HELLO = Hello("mine", (0,), {"tlora": __version__}, Load("b", "o", "cpu", 0.0), True, jobs=(HeldJob("a", 7, 3, True),), epoch=1)


class Station:
    """A crew whose notes are kept, and which listens in a thread."""

    def __init__(self, directory: Path, epoch: int = 5, limits: Limits = Limits(), gpus: tuple[int, ...] = (0, 1)) -> None:  # noqa: B008
        directory.mkdir(parents=True, exist_ok=True)
        self.notes: list[str] = []
        self.worker_pool = WorkerPool(directory, epoch, lambda base: Load(base, "o", "cpu", 0.0), gpus, limits, self.notes.append)
        self._ended = threading.Event()
        self.reports: list[Any] = []
        self._calls: queue.SimpleQueue[tuple[Future[None], Callable[[], object]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self._ended.is_set():
            self.reports += self.worker_pool.listen(0.05)
            while not self._calls.empty():
                done, call = self._calls.get()
                call()
                done.set_result(None)

    def do(self, call: Callable[[], object]) -> None:
        """In the thread that listens: as a controller's, it alone speaks to workers."""
        self._calls.put((done := Future(), call))
        self.worker_pool.wake()
        done.result(60)

    def say(self, line: bytes) -> dict[str, Any]:
        """What it answers first; nothing where it ends the connection."""
        with connect(self.worker_pool.address) as connection:
            with contextlib.suppress(BrokenPipeError):  # it may be refused before it has said anything
                connection.sendall(line)
            return self.answer(connection)

    def answer(self, connection: socket.socket) -> dict[str, Any]:
        connection.settimeout(60)
        with connection.makefile("rb") as lines:
            return json.loads(lines.readline() or b"{}")

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.worker_pool.abandon()


@pytest.fixture
def station(tmp_path: Path) -> Iterator[Station]:
    made = Station(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        (worker_line(replace(HELLO, versions={"tlora": "0.0.1"})), ("tlora 0.0.1", __version__, "same version")),
        (worker_line(replace(HELLO, protocol=2)), ("protocol 2", "controller's version")),
        (b'{"kind":"hello"}\n', ("protocol None",)),
        (worker_line(replace(HELLO, gpus=(7,))), ("GPUs [7]", "[0, 1]", "start the controller with them (--gpus)")),
        (worker_line(replace(HELLO, gpus=(1, 0))), ("GPUs [1, 0]", "ascending")),
        (worker_line(replace(HELLO, gpus=())), ("of the controller's host", "end this one")),
        (worker_line(replace(HELLO, epoch=6)), ("later controller", "epoch 6")),
        (worker_line(Envelope(1, 1, Loaded())), ("must be a Hello",)),
        (b"GET / HTTP/1.1\r\n\r\n", (f"none of protocol {PROTOCOL}",)),
        (b"[" * 100_000 + b"\n", ("nested too deeply",)),
        (f'{{"kind":"hello","protocol":{PROTOCOL},"gpus":"all"}}\n'.encode(), (f"none of protocol {PROTOCOL}: ",)),
        (worker_line(HELLO) * 2, ()),
    ],
)
def test_a_hello_that_is_none_of_ours_is_refused_with_one_message(station: Station, line: bytes, facts: tuple[str, ...]) -> None:
    answer = station.say(line)
    if facts:
        assert answer["kind"] == "refusal" and all(fact in answer["reason"] for fact in facts), answer
        assert not station.worker_pool.workers
    else:  # the first of two is in order, the second ends the connection
        assert answer["kind"] == "ack" or "second Hello" in answer["reason"]
    deadline = time.monotonic() + 60
    while not station.notes:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(station.notes) == 1 and station.notes[0].startswith("refused: ")


def test_a_torn_hello_is_none(station: Station) -> None:
    with connect(station.worker_pool.address) as connection:
        connection.sendall(worker_line(HELLO)[:-5])
        connection.shutdown(socket.SHUT_WR)
        assert "before its Hello" in station.answer(connection)["reason"]
    assert not station.worker_pool.workers


def test_another_users_connection_is_refused(station: Station, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "peer_pid", lambda _: None)
    with connect(station.worker_pool.address) as connection:
        assert "another user" in station.answer(connection)["reason"]


def test_a_worker_obeys_no_other_user(station: Station, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "peer_pid", lambda _: None)
    with pytest.raises(ConfigError, match="another user listens there"):
        connect(station.worker_pool.address)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user too; the test above holds everywhere")
def test_a_worker_obeys_no_other_user_as_the_kernel_tells(tmp_path: Path) -> None:
    """The socket is this user's and private; the process that listens is another's."""
    place = Path(tempfile.mkdtemp())
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place / "controller.sock"))
    child = os.fork()
    if not child:
        os.seteuid(65534)
        listener.listen()
        while True:
            time.sleep(60)
    try:
        while True:
            try:
                connect(f"unix:{place}/controller.sock")
            except ConnectionRefusedError:  # it does not listen yet
                time.sleep(0.01)
            except ConfigError as error:
                assert "another user listens there" in str(error)
                break
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        listener.close()
        shutil.rmtree(place)


def test_a_gpu_has_one_worker(station: Station) -> None:
    """Who claims to be it, and is another process or another incarnation, is refused; a worker that was given up is too."""
    with connect(station.worker_pool.address) as connection:
        connection.sendall(worker_line(HELLO))
        assert station.answer(connection)["kind"] == "ack"
        worker = station.worker_pool.workers[0]
        assert worker.jobs["a"].attempt == 7 and worker.process.pid == os.getpid()
        assert "there is a worker already" in station.say(worker_line(replace(HELLO, incarnation="another's")))["reason"]
        assert station.say(worker_line(HELLO))["kind"] == "ack", "it may dial again"
        worker.given_up = "was stopped"
        assert "there is a worker already" in station.say(worker_line(HELLO))["reason"]


def test_the_socket_is_this_users_alone(station: Station, tmp_path: Path) -> None:
    path = Path(station.worker_pool.address.removeprefix("unix:"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="Make it mode 0700"):
        connect(station.worker_pool.address)
    path.parent.chmod(0o700)


def test_a_store_with_a_long_path_has_its_socket_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next controller listens at the same place."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(prefix="tlora-test-"))
    directory = tmp_path / ("long" * 30)
    directory.mkdir()
    listener, address = listen(directory)
    listener.close()
    again, same = listen(directory)
    again.close()
    place = Path(address.removeprefix("unix:")).parent
    assert same == address and directory not in place.parents and stat.S_IMODE(place.stat().st_mode) == 0o700
    place.chmod(0o777)  # anybody could have put a socket there by now
    third, other = listen(directory)
    third.close()
    assert other != address
    shutil.rmtree(tempfile.gettempdir())


def test_a_socket_stays_for_the_next_controller_and_goes_with_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Path(tempfile.mkdtemp(prefix="tlora-test-"))
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    store = tmp_path / ("long" * 30)
    station = Station(store)
    station.close()
    (place,) = elsewhere.iterdir()
    station = Station(store)
    station.close()
    assert list(elsewhere.iterdir()) == [place]
    station.worker_pool.close(0.0)
    elsewhere.rmdir()


def test_no_place_for_a_socket_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlora.link.address._bind", lambda _: None)
    with pytest.raises(ConfigError, match="Set TMPDIR"):
        listen(tmp_path)


def test_epochs_rise_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    first, second = begin_epoch(tmp_path, continues=False), begin_epoch(tmp_path, continues=True)
    assert (first.epoch, second.epoch) == (1, 2) and second.started_unix_seconds == first.started_unix_seconds
    (tmp_path / "controller.json").write_text("{}")
    with pytest.raises(ConfigError, match="is damaged"):
        begin_epoch(tmp_path, continues=False)


def test_a_pid_that_is_another_process_by_now_is_no_worker(tmp_path: Path) -> None:
    identity = identify(os.getpid())
    assert identity is not None
    write_record(tmp_path, (0, 3), identity)
    write_record(tmp_path, (1,), replace(identity, start_ticks=identity.start_ticks - 1))
    write_record(tmp_path, (2,), replace(identity, boot="before"))
    (tmp_path / "gpu3.json").write_text("[]")
    assert read_records(tmp_path) == {(0, 3): identity}
    replace(identity, start_ticks=1).kill()  # this process lives on
    assert replace(identity, start_ticks=1).wait(None) and not identity.wait(0.0)


def test_a_worker_that_does_not_dial_again_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = os.fork()
    if not child:
        while True:
            time.sleep(60)
    identity = identify(child)
    assert identity is not None
    monkeypatch.setattr(crew_room, "_FOUND_SECONDS", 0.1)
    made = WorkerPool(tmp_path, 2, lambda base: Load(base, "o", "cpu", 0.0), (0,), Limits(), lambda _: None)
    made.find({(0,): identity})
    made.abandon()
    assert os.waitpid(child, 0)[1] == 9 and not made.workers


def test_what_a_worker_reports_while_another_is_waited_for_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two dials and says that its job has ended, and its connection ends; the second dials late."""
    monkeypatch.setattr(crew_room, "_FOUND_SECONDS", 60.0)
    own = identify(os.getpid())
    assert own is not None
    made = WorkerPool(tmp_path, 2, lambda base: Load(base, "o", "cpu", 0.0), (0, 1), Limits(), lambda _: None)
    finding = threading.Thread(target=made.find, args=({(0,): own, (1,): own},))
    finding.start()
    with connect(made.address) as first:
        first.sendall(worker_line(HELLO) + worker_line(Envelope(1, 1, Finished("a", {}, 7))))
        first.shutdown(socket.SHUT_WR)
        while not made._unheard:
            time.sleep(0.01)
        with connect(made.address) as second:
            second.sendall(worker_line(replace(HELLO, incarnation="its neighbour", gpus=(1,), jobs=())))
            finding.join()
            assert made.workers[0].jobs["a"].attempt == 7, "nothing is concluded before anybody listens"
            made.acknowledge()
            assert made.listen(0.0) == [(made.workers[0], Finished("a", {}, 7))]
    made.abandon()


def test_a_worker_may_not_have_some_of_the_gpus_of_another(station: Station) -> None:
    with connect(station.worker_pool.address) as wide, connect(station.worker_pool.address) as narrow:
        wide.sendall(worker_line(replace(HELLO, gpus=(0, 1))))
        assert station.answer(wide)["kind"] == "ack"
        narrow.sendall(worker_line(replace(HELLO, incarnation="another", gpus=(1,))))
        reason = station.answer(narrow)["reason"]
    assert reason.endswith("The controller starts workers on its own GPUs as it needs them: end this one")
    assert "comes for GPU 1, and there is a worker already that has GPUs 0, 1" in reason and station.worker_pool.workers[0].gpus == (0, 1)


def test_a_worker_of_several_gpus_has_ended_when_its_ranks_have(tmp_path: Path) -> None:
    with subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout is not None
        rank = int(leader.stdout.readline())
        worker = SupervisedProcess(identify(leader.pid), tmp_path / "log", leader, whole_session=True)
        leader.kill()
        assert not worker.wait(0.2) and leader.poll() == -signal.SIGKILL
        os.kill(rank, signal.SIGKILL)
        assert worker.wait(60.0)


def test_a_controller_without_files_for_a_while_is_dialled_again(station: Station) -> None:
    """Clients of a server may use up what it may open; workers that dial then are heard later."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    path = station.worker_pool.address.removeprefix("unix:")
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as dialling:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(first.fileno(), dialling.fileno()) + 1, hard))
        spare = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    spare.append(os.dup(0))
            first.connect(path)  # takes the file that the system has kept for it
            dialling.connect(path)
            dialling.sendall(worker_line(HELLO))
            time.sleep(0.3)  # nothing tells that it could not be accepted
        finally:
            for handle in spare:
                os.close(handle)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert station.answer(dialling)["kind"] == "ack"


def test_a_worker_that_cannot_be_started_now_is_started_later(station: Station, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(crew_room, "launch", refuse)
    assert station.worker_pool.start((0,), "b") is None and not station.worker_pool.workers
    assert station.notes == ["no worker can be started for GPU 0 now: [Errno 11] Resource temporarily unavailable"]


class Endless:
    """What comes faster than it is heard."""

    def get(self, timeout: float) -> None:
        del timeout

    def close(self) -> list[None]:
        return []


def test_what_comes_without_end_does_not_keep_the_controller_from_all_else(tmp_path: Path) -> None:
    pool = WorkerPool(tmp_path, 1, lambda base: Load(base, "o", "cpu", 0.0), (0,), Limits(), str)
    pool.inbox = Endless()  # type: ignore[assignment]
    assert pool.listen(60.0) == []
    pool.abandon()
