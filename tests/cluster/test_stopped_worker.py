"""A worker that is stopped just before any of its renames is noticed, killed for good, and its job goes on elsewhere with equal bytes."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.cluster.test_culprit import OneGroup
from tests.engine.conftest import save_base
from tests.engine.tiny_runs import job, run_spec, sha256, steps_taken, train, write_rows
from tlora.cluster.controller import run
from tlora.cluster.event_log import EventLog
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.cluster.reconciler import LocalJob
from tlora.cluster.worker_pool import Limits
from tlora.live.cluster_run import submit_all
from tlora.protocol import Action, Event, GroupLost, JobFinished, JobProfile, JobSubmitted

# Runs in each rank's process before anything else does. The first worker that comes to its nth rename below jobs/ stops itself there.
HOOK = """
import os, pathlib, signal, sys
if "tlora.engine.ranks.rank" in sys.orig_argv:
    seen = []
    def stopping(real):
        def call(path, target):
            if "/jobs/" in str(path):
                seen.append(str(target))
                if len(seen) == int(os.environ["STOP_AT"]):
                    try:
                        mark = os.open(os.environ["STOP_MARK"], os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                    except FileExistsError:
                        pass
                    else:
                        os.write(mark, f"{os.getpid()} {target}".encode())
                        os.close(mark)
                        os.kill(os.getppid(), signal.SIGSTOP)  # the worker too
                        os.kill(os.getpid(), signal.SIGSTOP)
            return real(path, target)
        return call
    pathlib.Path.rename, pathlib.Path.replace = stopping(pathlib.Path.rename), stopping(pathlib.Path.replace)
"""
IN_EVERY_RUN, LAST = 7, 12  # it is stopped at each up to the last; beyond, a run may have fewer renames
RENAMES = 22  # of a job of this length, and some more


@pytest.mark.slow
@pytest.mark.parametrize("at", [pytest.param(at, marks=[] if at == IN_EVERY_RUN else pytest.mark.soak) for at in range(1, RENAMES)])
def test_a_worker_stopped_before_a_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    base, data = save_base(tmp_path / "base"), str(write_rows(tmp_path / "rows.jsonl", 20))
    order = job("a", data, max_steps=8, save_steps=2)
    train(base, tmp_path / "alone", [order], deterministic=True)
    spec = run_spec(base, tmp_path / "out", [order]).jobs[0]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hook"))
    monkeypatch.setenv("STOP_AT", str(at))
    monkeypatch.setenv("STOP_MARK", str(tmp_path / "mark"))
    notes: list[str] = []
    machine = LocalMachine((0,), "cpu", {"tiny": str(base)}, tmp_path / "out", deterministic=True, limits=Limits(stopped=0.5))
    told: list[Event | Action] = []
    with LocalBackend(machine, notes.append) as backend, closing(EventLog(tmp_path / "events.jsonl")) as log:
        submit_all(backend, {"a": LocalJob(spec)}, [(0.0, JobSubmitted("a", "tiny", 1, JobProfile(100.0, 8, 30, 1000)))])
        run(OneGroup(["a"]), backend, lambda seconds, item: (told.append(item), log.write(seconds, item)))
    ours = tmp_path / "out" / "jobs" / "a"
    assert sum(isinstance(item, JobFinished) for item in told) == 1
    assert sha256(ours) == sha256(tmp_path / "alone" / "a") and steps_taken(ours) == list(range(1, 9))
    if not (tmp_path / "mark").exists():
        assert at > LAST, "it was never stopped"
        return
    (lost,) = [item for item in told if isinstance(item, GroupLost)]
    assert "was stopped for" in lost.reason and "killed by signal 9" in lost.reason
    assert any("it is killed" in note for note in notes)
    pid = int((tmp_path / "mark").read_text().split()[0])
    while psutil.pid_exists(pid):  # the rank ends with its worker, by the system's hand, and is gone when its parent has seen it
        time.sleep(0.01)
