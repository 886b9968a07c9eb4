"""The program is updated under a running controller: workers that it starts from then on are of another version, and it refuses them."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster.test_wide_training import Script, World, run_script
from tests.engine.conftest import save_base
from tests.engine.tiny_runs import job, train, write_rows
from tests.hosts import kill_host, start_worker
from tests.process_hooks import LET_GO_TO_SAVE, REPORT_EACH_STEP, hold, let_hold
from tlora.cluster import worker_pool
from tlora.cluster.crash_attribution import MOST_DEATHS
from tlora.cluster.credentials import WorkerTokens
from tlora.cluster.hosts import STRIDE
from tlora.cluster.limits import Limits
from tlora.cluster.listeners import TlsListener
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.link import versions
from tlora.link.address import tcp_place
from tlora.protocol import Event, GroupLost, StepsDone
from tlora.version import __version__


class KilledError(Exception):
    """The controller is gone, as after a SIGKILL: its workers train on."""


def leave(event: Event, script: Script) -> tuple[int, ...]:
    if isinstance(event, StepsDone) and event.steps >= 5:
        assert script.backend is not None
        script.backend.abandon()
        raise KilledError
    return script.gpus


def update(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program, for this process and for those that begin from now on; the next controller logs anew."""
    (root / "next").mkdir()
    (root / "next" / "sitecustomize.py").write_text('import tlora.version\ntlora.version.__version__ = "9.9.9"\n')
    monkeypatch.setenv("PYTHONPATH", f"{root / 'next'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(versions, "__version__", "9.9.9")
    (root / "out" / "events.jsonl").unlink()


def make_world(root: Path) -> World:
    """A job that writes no checkpoint by itself."""
    base, data = save_base(root / "base"), str(write_rows(root / "a.jsonl", 12, 0, high=20))
    world = World(base, [job("a", data, max_steps=60, save_steps=100_000)], root / "whole")
    train(base, world.whole, world.orders, deterministic=True)
    return world


@pytest.mark.slow
@pytest.mark.usefixtures("real_start")
def test_the_next_version_goes_on_where_old_workers_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of an old controller are refused, save their jobs and end; those of the new version go on at that step. Nothing but
    what the refusal saves could: the job writes no checkpoint by itself.
    """
    world = make_world(tmp_path)
    let_hold(monkeypatch, tmp_path, REPORT_EACH_STEP + LET_GO_TO_SAVE)
    old, new, notes = Script((0,), leave), Script((0,), lambda _, script: script.gpus), list[str]()
    with hold(20):  # however long the next version takes to start
        with pytest.raises(KilledError):
            run_script(world, tmp_path / "out", old, gpus=(0,))
        update(tmp_path, monkeypatch)
        run_script(world, tmp_path / "out", new, gpus=(0,), note=notes.append)
    assert any(f"is of tlora {__version__}, and this is 9.9.9" in note for note in notes), notes
    assert not any("it is killed" in note for note in notes), notes
    assert new.steps("a")[0] > old.steps("a")[-1] >= 5, "no step was taken twice"
    world.same_bytes(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.usefixtures("real_start")
def test_workers_of_other_hosts_save_their_jobs_before_an_update_refuses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they save arrives, though nothing is shared but the line, and no job waits for the end of a lease."""
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    world, out = make_world(tmp_path), tmp_path / "out"
    let_hold(monkeypatch, tmp_path, REPORT_EACH_STEP + LET_GO_TO_SAVE)
    notes, limits, options = list[str](), Limits(host_lease=240.0), list[str]()

    def start_host() -> subprocess.Popen[bytes]:
        return hosts.enter_context(a_host(options, token, tmp_path / "home"))

    with ExitStack() as hosts, hold(20):
        with TlsListener(out / "workers", ("127.0.0.1", 0)) as listener:
            options += ["--connect", listener.address, "--fingerprint", listener.fingerprint]
            token, old = WorkerTokens(out / "workers").create(3600)[1], Script((STRIDE,), leave)
            before = start_host()
            with pytest.raises(KilledError):
                run_script(world, out, old, gpus=(), listener=listener, limits=limits)
        update(tmp_path, monkeypatch)
        again = threading.Thread(target=lambda: (before.wait(), start_host()), daemon=True)
        again.start()
        new = Script((STRIDE,), lambda _, script: script.gpus)
        with TlsListener(out / "workers", tcp_place(listener.address)) as listener:
            run_script(world, out, new, gpus=(), note=notes.append, listener=listener, limits=limits)
    assert before.returncode == 0
    assert any(f"saves its jobs and ends: it is of tlora {__version__}, and this is 9.9.9" in note for note in notes), notes
    assert not any("lease" in note for note in notes), notes
    assert new.steps("a")[0] > old.steps("a")[-1] >= 5, "no step was taken twice"
    world.same_bytes(out)


@contextmanager
def a_host(options: list[str], token: str, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = start_worker(options, token, home, namespace=None)
    try:
        yield process
    finally:
        kill_host(process)


@pytest.mark.slow
def test_no_job_is_blamed_for_a_refused_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_base(tmp_path / "base")
    write_rows(tmp_path / "a.jsonl", 12, 0, high=20)
    world = World(base, [job("a", str(tmp_path / "a.jsonl"))], tmp_path / "whole")
    train(base, world.whole, world.orders, deterministic=True)
    monkeypatch.setattr(worker_pool, "AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(versions, "__version__", "0.0.0")

    def act(event: Event, script: Script) -> tuple[int, ...]:
        if script.count > MOST_DEATHS:
            monkeypatch.setattr(versions, "__version__", __version__)
        return script.gpus

    script, notes = Script((0,), act), list[str]()
    run_script(world, tmp_path / "out", script, gpus=(0,), note=notes.append, tick_seconds=0.5)
    lost = [event.reason for event in script.told if isinstance(event, GroupLost)]
    assert len(lost) > MOST_DEATHS and all("ended with exit status 2" in reason for reason in lost), lost
    assert any("this is 0.0.0. The program was updated" in note for note in notes), notes
    world.same_bytes(tmp_path / "out")


def test_a_worker_that_was_refused_is_not_started_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "AGAIN_SECONDS", 1e9)
    monkeypatch.setattr(versions, "__version__", "0.0.0")
    machine = LocalMachine((0,), "cpu", {"tiny": "models/none"}, tmp_path / "out")
    with LocalBackend(machine) as backend:
        worker = backend.worker_pool.start((0,), "models/none")
        assert worker is not None
        ended = list[object]()
        while (worker, None) not in ended:
            ended += backend.worker_pool.listen(1.0)
        del backend.worker_pool.workers[0]
        assert worker.doomed and backend.worker_pool.start((0,), "models/none") is None and not backend.worker_pool.workers
