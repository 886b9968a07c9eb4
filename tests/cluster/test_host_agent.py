"""The agent on a host: workers that it starts end with it, and their ends are reported. No engine is there."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.test_listeners import TcpStation, wait_for
from tlora.cluster import host_agent
from tlora.cluster.host_agent import HostAgent
from tlora.cluster.host_engine import WorkerOrder


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


def test_workers_end_with_an_agent_that_is_killed_or_drains(tmp_path: Path) -> None:
    """By saving their jobs, as after SIGTERM."""
    station = TcpStation(tmp_path)
    given = (station.listener.address, station.listener.fingerprint, station.secret)
    try:
        with subprocess.Popen([sys.executable, "-c", HOLD, *given], stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            pid = int(holder.stdout.readline())
            wait_for(lambda: 0 in station.worker_pool.workers)
            assert station.worker_pool.workers[0].process.pid == pid
            holder.send_signal(signal.SIGKILL)
        wait_for(lambda: [worker.process.pid for worker, report in station.reports if report is None] == [pid])
        agent = HostAgent("here", "rack", [1], WorkerOrder(*given, "cpu"))
        wait_for(lambda: 1 in station.worker_pool.workers)
        other = station.worker_pool.workers[1].process.pid
        assert HostAgent("here", "", [], WorkerOrder(*given, "cpu")).report([pid, other])[1] == [(pid, "ended with its agent")]
        agent.drain()
        wait_for(lambda: agent.report()[0] == 0)
        assert agent.report()[1] == [(station.worker_pool.workers[1].process.pid, "ended with exit status 143")]
    finally:
        station.close()
