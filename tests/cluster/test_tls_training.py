"""A worker that came over TLS is killed while it trains: its process is known for sure, and its job goes on elsewhere with equal bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.cluster.test_culprit import OneGroup
from tests.engine.conftest import save_base
from tests.engine.tiny_runs import job, run_spec, sha256, steps_taken, train, write_rows
from tlora.cluster.controller import run
from tlora.cluster.credentials import WorkerTokens
from tlora.cluster.event_log import EventLog
from tlora.cluster.listeners import TlsListener
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.cluster.reconciler import LocalJob
from tlora.cluster.worker_pool import Limits
from tlora.live.cluster_run import submit_all
from tlora.protocol import Action, Event, GroupLost, JobFinished, JobProfile, JobSubmitted, StepsDone


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)])
@pytest.mark.slow
def test_a_worker_over_tls_that_is_killed_or_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    base, data = save_base(tmp_path / "base"), str(write_rows(tmp_path / "rows.jsonl", 20))
    order = job("a", data, max_steps=120, save_steps=20)
    train(base, tmp_path / "alone", [order], deterministic=True)
    spec = run_spec(base, tmp_path / "out", [order]).jobs[0]
    machine = LocalMachine((0,), "cpu", {"tiny": str(base)}, tmp_path / "out", deterministic=True, limits=Limits(stopped=0.5))
    told: list[Event | Action] = []
    listener = TlsListener(tmp_path / "out" / "workers", ("127.0.0.1", 0))
    environment = os.environ | {"TLORA_WORKER_TOKEN": WorkerTokens(tmp_path / "out" / "workers").create(600)[1], "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tlora", "worker", "--connect", listener.address, "--fingerprint", listener.fingerprint]
    log = EventLog(tmp_path / "events.jsonl")
    with (
        LocalBackend(machine, listener=listener) as backend,
        closing(log),
        subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL) as process,
    ):

        def submit() -> None:
            while not backend.worker_pool.workers:
                time.sleep(0.01)
            submit_all(backend, {"a": LocalJob(spec)}, [(0.0, JobSubmitted("a", "tiny", 1, JobProfile(100.0, 120, 30, 1000)))])

        def see(seconds: float, item: Event | Action) -> None:
            told.append(item)
            log.write(seconds, item)
            if isinstance(item, StepsDone) and sum(isinstance(earlier, StepsDone) for earlier in told) == 1:
                assert backend.worker_pool.workers[0].process.pid == process.pid
                process.send_signal(number)

        threading.Thread(target=submit).start()
        run(OneGroup(["a"]), backend, see)
        assert process.wait() == -signal.SIGKILL
    assert sum(isinstance(item, JobFinished) for item in told) == 1 and sum(isinstance(item, GroupLost) for item in told) == 1
    ours = tmp_path / "out" / "jobs" / "a"
    assert sha256(ours) == sha256(tmp_path / "alone" / "a") and steps_taken(ours) == steps_taken(tmp_path / "alone" / "a")
