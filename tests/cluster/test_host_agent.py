"""The agent on a host: workers that it starts end with it, and their ends are reported. No engine is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.test_listeners import TcpStation, wait_for
from tests.hosts import kill_host, network, start_worker, why_no_namespaces
from tlora.cluster import host_agent
from tlora.cluster.host_agent import HostAgent
from tlora.cluster.host_engine import WorkerOrder
from tlora.cluster.hosts import ANY_OF, STRIDE
from tlora.cluster.listeners import TlsListener
from tlora.cluster.remote_worker import Held, RemoteWorker
from tlora.link import tls
from tlora.protocol import GpusLost, NodeAdded
from tlora.worker_protocol import REFUSED, Load


def test_a_worker_that_cannot_begin_is_reported_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_agent, "PAUSE_SECONDS", (0.05, 0.05))
    agent = HostAgent("here", "", [0], WorkerOrder("tcp://127.0.0.1:9", "sha256:" + "00" * 32, "tlw-" + "a" * 43, "cpu"))
    wait_for(lambda: len(agent.report()[1]) >= 2)
    (first, how), (second, _), *_ = agent.report()[1]
    assert first != second and how == "ended with exit status 2" and agent.report()[0] == 1
    agent.drain()
    wait_for(lambda: agent.report()[0] == 0)


HOLD = """
import sys, time
from tlora.cluster.host_agent import HostAgent
from tlora.cluster.host_engine import WorkerOrder
agent = HostAgent("here", "rack", [0], WorkerOrder(*sys.argv[1:4], "cpu"))
while not agent.pids():
    time.sleep(0.01)
print(*agent.pids(), flush=True)
time.sleep(1e6)
"""


def station_of(directory: Path) -> tuple[TcpStation, tuple[str, str, str]]:
    """Without GPUs of its own, and how workers reach it."""
    station = TcpStation(directory, gpus=())
    return station, (station.listener.address, station.listener.fingerprint, station.secret)


def spares(station: TcpStation) -> dict[int, RemoteWorker]:
    """By pid, the processes that wait for GPUs."""
    return {spare.process.pid: spare for spare in list(station.worker_pool.remote_hosts.spares.values())}


def test_workers_end_with_an_agent_that_is_killed_or_drains(tmp_path: Path) -> None:
    """By saving their jobs, as after SIGTERM."""
    station, given = station_of(tmp_path)
    try:
        with subprocess.Popen([sys.executable, "-c", HOLD, *given], stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            pid = int(holder.stdout.readline())
            wait_for(lambda: spares(station).keys() == {pid})
            holder.send_signal(signal.SIGKILL)
        wait_for(lambda: not spares(station))
        agent = HostAgent("here", "rack", [1], WorkerOrder(*given, "cpu"))
        wait_for(lambda: bool(spares(station)))
        (other,) = spares(station)
        assert HostAgent("here", "", [], WorkerOrder(*given, "cpu")).report([pid, other])[1] == [(pid, "ended with its agent")]
        agent.drain()
        wait_for(lambda: agent.report()[0] == 0)
        assert agent.report()[1] == [(other, "ended with exit status 143")]
    finally:
        station.close()


def command(given: tuple[str, str, str], *options: str) -> subprocess.Popen[str]:
    address, fingerprint, token = given
    arguments = ["worker", "--connect", address, "--fingerprint", fingerprint, "--gpus", "0,1,2", *options]
    environment = {**os.environ, "TLORA_WORKER_TOKEN": token, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, "-m", "tlora", *arguments], env=environment, stderr=subprocess.PIPE, text=True)


def test_a_command_of_several_gpus_keeps_a_worker_for_each_that_can_have_any(tmp_path: Path) -> None:
    """One that is killed is started again, and says so: its job need not wait for the end of its lease."""
    station, given = station_of(tmp_path)
    try:
        with command(given, "--host", "b") as host:
            wait_for(lambda: len(spares(station)) == 3)
            pids, choice = set(spares(station)), (STRIDE, STRIDE + 1, STRIDE + 2)
            (added,) = [event for event in station.worker_pool.remote_hosts.events if isinstance(event, NodeAdded)]
            assert (added.node, added.gpus) == ("b", choice) and station.notes == ["a worker has come for GPUs 0, 1, 2 of host b"]
            bound: list[RemoteWorker] = []
            station.do(lambda: bound.append(station.worker_pool.bind(choice[1:]) or pytest.fail("none waits")))
            (worker,) = bound
            worker.jobs["a"] = Held(1)
            os.kill(worker.process.pid, signal.SIGKILL)
            wait_for(lambda: (worker, None) in station.reports)
            assert worker.process.how_it_ended() == "has ended, as its host's agent says" and len(spares(station)) == 3
            assert len(pids & spares(station).keys()) == 2 and worker.process.pid not in spares(station)
            host.terminate()
            assert host.wait(600) == 143
            wait_for(lambda: isinstance(station.worker_pool.remote_hosts.events[-1], GpusLost))
            assert station.worker_pool.remote_hosts.events[-1].gpus == choice
    finally:
        station.close()


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_namespaces()), reason=f"no namespaces: {why_no_namespaces()}")
def test_a_host_without_work_that_is_cut_off_is_lost_until_it_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes hold nothing, so that no lease has to end. Nothing ends their lines but that its kernel does not answer."""
    monkeypatch.setattr(tls, "CUT_SECONDS", 6)
    station, there = TcpStation(tmp_path, gpus=()), tmp_path / "b"
    with network() as between:
        listener = TlsListener(tmp_path, (between.here, 0))
        station.worker_pool.listen_on(listener)
        options = ["--connect", listener.address, "--fingerprint", listener.fingerprint, "--gpus", "0,1"]
        host = start_worker(options, station.secret, there, namespace=between.namespace(0))
        try:
            wait_for(lambda: len(spares(station)) == 2)
            for direction in ("in", "out"):
                between.cut(0, direction)
            events = station.worker_pool.remote_hosts.events
            wait_for(lambda: any(isinstance(event, GpusLost) for event in events))
            assert not spares(station)
            for direction in ("in", "out"):
                between.cut(0, direction, yes=False)
            wait_for(lambda: len(spares(station)) == 2)
            assert sum(isinstance(event, NodeAdded) for event in events) == 2
        finally:
            kill_host(host)
            station.close()


def test_a_command_whose_workers_are_refused_says_it_once(tmp_path: Path) -> None:
    station, (address, fingerprint, _) = station_of(tmp_path)
    try:
        with command((address, fingerprint, "tlw-" + "a" * 43)) as host:
            assert host.wait(600) == REFUSED and host.stderr is not None
            assert host.stderr.read().count("error: ") == 1
    finally:
        station.close()


SHOW = """
import os
from tlora.engine import worker
def show(_, load, gpus, store):
    print(gpus, os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    return False
worker._compute = show
from tlora.cli.tethered_worker import main
import sys
sys.argv[1:1] = ["worker"]
main()
"""


def test_a_process_makes_all_gpus_of_its_agent_visible_its_own_first(tmp_path: Path) -> None:
    """Ranks on those that its group gets later see them too. It says what it has been given, and not what it may have."""
    station, (address, fingerprint, token) = station_of(tmp_path)
    shown = {"CUDA_VISIBLE_DEVICES": "0,1,2", ANY_OF: "0,1,2", "PATH": "/nowhere"}  # no driver is asked
    arguments = [sys.executable, "-c", SHOW, "--connect", address, "--fingerprint", fingerprint, "--host", "b"]
    try:
        with subprocess.Popen(
            arguments, env={**os.environ, **shown, "TLORA_WORKER_TOKEN": token}, stdout=subprocess.PIPE, text=True
        ) as process:
            wait_for(lambda: bool(spares(station)))

            def begin() -> None:
                worker = station.worker_pool.bind((STRIDE + 1, STRIDE + 2))
                assert worker is not None
                worker.give(Load("b", "o", "cuda", 0.0))
                worker.want(None, (), False)

            station.do(begin)
            assert process.stdout is not None and process.stdout.readline() == "(1, 2) 1,2,0\n"
    finally:
        station.close()
