"""`tlora worker --connect tcp://…` as a process: it trains over TLS, is found again by the next controller, revoked, and refused."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.test_worker import Orders
from tests.engine.test_worker_process import GROUP, PATIENCE_SECONDS, crew_of, hear, shorten_lease
from tests.engine.test_worker_process import crews as crews
from tests.engine.test_worker_process import long as long
from tests.process_hooks import run_in_each_process
from tlora.cluster.credentials import WorkerTokens
from tlora.cluster.hosts import STRIDE
from tlora.cluster.listeners import TlsListener
from tlora.cluster.remote_worker import RemoteWorker
from tlora.cluster.worker_pool import WorkerPool
from tlora.engine.worker import EXPIRED
from tlora.link.address import tcp_place
from tlora.worker_protocol import Join, Left, Stepped

Start = Callable[..., "subprocess.Popen[bytes]"]
STAND_STILL = """
import os, sys
if "worker" in sys.orig_argv:
    from tlora.link import dialer
    now, stood = dialer._now, []
    def stand_still():
        if not os.path.exists(os.environ["STANDS_STILL"]):
            return now()
        stood.append(now())
        return stood[0]
    dialer._now = stand_still
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "workers").mkdir()
    return tmp_path / "workers"


@pytest.fixture
def start() -> Iterator[Start]:
    """`tlora worker` with these options, and the token in its environment."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*options: str, token: str | None = None) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name != "TLORA_WORKER_TOKEN"}
        given = environment | ({} if token is None else {"TLORA_WORKER_TOKEN": token}) | {"CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "tlora", "worker", *options]
        started.append(subprocess.Popen(command, env=given, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def came(crew: WorkerPool, gpu: int = 0) -> RemoteWorker:
    """The worker of that GPU, when it has come."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while gpu not in crew.workers:
        assert time.monotonic() < deadline
        crew.listen(0.05)
    return crew.workers[gpu]


def where(listener: TlsListener) -> list[str]:
    return ["--connect", listener.address, "--fingerprint", listener.fingerprint]


def test_a_worker_without_work_waits_for_it(
    made: Orders, long: Join, tmp_path: Path, store: Path, crews: list[WorkerPool], start: Start
) -> None:
    """However long: to be idle is not to start without getting further."""
    load = made.load(tmp_path / "out")
    crew = crew_of(crews, store, load, starting=0.01)
    listener = TlsListener(store, ("127.0.0.1", 0))
    crew.listen_on(listener)
    start(*where(listener), token=WorkerTokens(store).create(600)[1])
    worker, deadline = came(crew), time.monotonic() + PATIENCE_SECONDS
    while worker.heartbeat is None:
        assert time.monotonic() < deadline
        crew.listen(0.05)
    for _ in range(4):
        crew.listen(0.5)  # which looks at its signs of life
    assert not worker.given_up
    worker.give(load)
    worker.want(GROUP, (long,), False)
    assert hear(crew, Stepped).steps > 0


def test_a_worker_whose_token_is_revoked_saves_its_jobs_and_ends(
    made: Orders, long: Join, tmp_path: Path, store: Path, crews: list[WorkerPool], start: Start
) -> None:
    load = made.load(tmp_path / "out")
    crew = crew_of(crews, store, load)
    listener = TlsListener(store, ("127.0.0.1", 0))
    crew.listen_on(listener)
    token, secret = WorkerTokens(store).create(600)
    process = start(*where(listener), token=secret)
    worker = came(crew)
    worker.give(load)
    worker.want(GROUP, (long,), False)
    assert hear(crew, Stepped).steps > 0
    WorkerTokens(store).revoke(token.id)
    left = hear(crew, Left)
    assert left.steps > 0 and Path(left.checkpoint).is_dir()
    assert process.wait(PATIENCE_SECONDS) == 0


def test_a_worker_that_is_not_let_in_says_why_once(
    made: Orders, tmp_path: Path, store: Path, crews: list[WorkerPool], start: Start
) -> None:
    crew = crew_of(crews, store, made.load(tmp_path / "out"))
    listener = TlsListener(store, ("127.0.0.1", 0))
    crew.listen_on(listener)
    token, secret = WorkerTokens(store).create(600)
    revoked, gone = WorkerTokens(store).create(600)
    WorkerTokens(store).revoke(revoked.id)
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    other = "sha256:" + "0" * 64
    cases = [
        (["--connect", listener.address, "--fingerprint", other], secret, "Nothing was sent"),
        (where(listener), "tlw-" + "x" * 43, "a token that is unknown here"),
        (where(listener), gone, "was revoked"),
        (where(listener), None, "needs a token"),
        (where(listener)[:2], secret, "needs --fingerprint"),
        (["--connect", nobody, "--fingerprint", other], secret, "no cluster listens at tcp://"),
    ]
    processes = [(start(*options, token=given), fact) for options, given, fact in cases]
    for process, fact in processes:
        said = process.communicate(timeout=PATIENCE_SECONDS)[1].decode()
        assert process.returncode == 2 and fact in said and len(said.splitlines()) == 1 and said.startswith("error: "), said
        assert secret not in said and gone not in said and token.hash not in said
    crew.listen(0.05)
    assert not crew.workers


@pytest.mark.slow
def test_a_worker_whose_controller_is_another_now_trains_on_and_says_so(
    made: Orders, long: Join, tmp_path: Path, store: Path, crews: list[WorkerPool], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever listens on the port next has another certificate: it hears nothing. The lease ends the worker, with its jobs saved; its clock
    stands still until it has dialled.
    """
    run_in_each_process(monkeypatch, tmp_path, STAND_STILL)
    monkeypatch.setenv("STANDS_STILL", str(tmp_path / "stands-still"))
    load = made.load(tmp_path / "out")
    crew = crew_of(crews, store, load)
    listener = TlsListener(store, ("127.0.0.1", 0))
    crew.listen_on(listener)
    process = start(*where(listener), token=WorkerTokens(store).create(600)[1])
    worker = came(crew)
    worker.give(load)
    worker.want(GROUP, (long,), False)
    assert hear(crew, Stepped).steps > 0
    (tmp_path / "stands-still").touch()
    shorten_lease(crew, worker, 2.0)
    crew.abandon()
    crew.workers.clear()
    (tmp_path / "other").mkdir()
    stranger = crew_of(crews, tmp_path / "other", load)
    stranger.listen_on(TlsListener(tmp_path / "other", tcp_place(listener.address)))
    assert process.stderr is not None
    lines = list[bytes]()
    while not lines or b"Nothing was sent" not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    (tmp_path / "stands-still").unlink()
    said = (b"".join(lines) + process.communicate(timeout=PATIENCE_SECONDS)[1]).decode()
    assert process.returncode == EXPIRED and said.count("trains on, and dials again") == 1 and "Nothing was sent" in said, said
    assert "the lease is 2 s" in said and not stranger.workers
    assert list((tmp_path / "out" / "long").glob("checkpoint-*"))


def _can_unshare() -> bool:
    command = ["unshare", "--mount", "--pid", "--fork", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(
    not _can_unshare(), reason="needs rights to make namespaces; tests/cluster/test_listeners.py says the same by hand"
)


@pytest.mark.slow  # the hosts of `test_remote_store` have such a namespace, too
@needs_namespaces
def test_a_worker_of_another_pid_namespace_trains_under_a_lease(
    made: Orders, long: Join, tmp_path: Path, store: Path, crews: list[WorkerPool]
) -> None:
    """As in a container with the store mounted: no pid of it means anything here. Ended by its controller, it hands its job back."""
    load = made.load(tmp_path / "out")
    crew = crew_of(crews, store, load)
    listener = TlsListener(store, ("127.0.0.1", 0))
    crew.listen_on(listener)
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "tlora", "worker", *where(listener), "--host", "b"]
    environment = os.environ | {"TLORA_WORKER_TOKEN": WorkerTokens(store).create(600)[1], "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL) as process:
        try:
            worker = came(crew, STRIDE)
            worker.give(load)
            worker.want(replace(GROUP, gpus=(STRIDE,)), (long,), False)
            assert hear(crew, Stepped).steps > 0 and worker.display_name == "GPU 0 of host b"
            worker.stop()
            left = hear(crew, Left)
            assert left.steps > 0 and Path(left.checkpoint).is_dir()
            hear(crew, None)
            assert worker.process.how_it_ended() == "has ended by itself" and process.wait(PATIENCE_SECONDS) == 0
        finally:
            process.kill()


@needs_namespaces
@pytest.mark.parametrize("before", ["mount -t tmpfs none STORE", "mount --bind STORE STORE && mount -o remount,ro,bind STORE"])
def test_a_worker_that_sees_another_store_gets_its_files_by_the_line(
    made: Orders, tmp_path: Path, store: Path, crews: list[WorkerPool], before: str
) -> None:
    """It sees another directory at the store's path, or may not write there: the same path means nothing."""
    crew = crew_of(crews, store, made.load(tmp_path / "out"))
    listener = TlsListener(store, ("127.0.0.1", 0))
    crew.listen_on(listener)
    script = f'{before.replace("STORE", str(store))} && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-m", "tlora", "worker", *where(listener)]
    environment = os.environ | {"TLORA_WORKER_TOKEN": WorkerTokens(store).create(600)[1], "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL) as process:
        try:
            worker = came(crew, STRIDE)
            assert worker.files_by_line
            while worker.heartbeat is None:  # it has been answered; before, it has nobody to say goodbye to
                crew.listen(0.05)
            process.terminate()
            hear(crew, None)
            assert process.wait(PATIENCE_SECONDS) == 143 and worker.process.how_it_ended() == "has ended by itself"
        finally:
            process.kill()
