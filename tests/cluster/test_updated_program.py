"""The program is updated under a running controller: workers that it starts from then on are of another version, and it refuses them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster.test_wide_training import Script, World, run_script
from tests.engine.conftest import save_base
from tests.engine.tiny_runs import job, train, write_rows
from tlora.cluster import worker_pool
from tlora.cluster.crash_attribution import MOST_DEATHS
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.protocol import Event, GroupLost, JobFinished, StepsDone
from tlora.version import __version__


class KilledError(Exception):
    """The controller is gone, as after a SIGKILL: its workers train on."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("real_start")
def test_the_next_version_goes_on_where_old_workers_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of an old controller are refused, save their jobs and end; those of the new version go on at that step. Nothing but
    what the refusal saves could: the job writes no checkpoint by itself.
    """
    base = save_base(tmp_path / "base")
    write_rows(tmp_path / "a.jsonl", 12, 0, high=20)
    world = World(base, [job("a", str(tmp_path / "a.jsonl"), max_steps=400, save_steps=100_000)], tmp_path / "whole")
    train(base, world.whole, world.orders, deterministic=True)

    def leave(event: Event, script: Script) -> tuple[int, ...]:
        if isinstance(event, StepsDone) and event.steps >= 20:
            assert script.backend is not None
            script.backend.abandon()
            raise KilledError
        return script.gpus

    old, new, notes = Script((0,), leave), Script((0,), lambda _, script: script.gpus), list[str]()
    with pytest.raises(KilledError):
        run_script(world, tmp_path / "out", old, gpus=(0,))
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / "sitecustomize.py").write_text('import tlora.version\ntlora.version.__version__ = "9.9.9"\n')
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'next'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(worker_pool, "__version__", "9.9.9")
    (tmp_path / "out" / "events.jsonl").unlink()
    run_script(world, tmp_path / "out", new, gpus=(0,), note=notes.append)
    assert any(f"is of tlora {__version__}, and this is 9.9.9" in note for note in notes), notes
    assert not any("it is killed" in note for note in notes), notes
    assert new.steps("a")[0] > old.steps("a")[-1] >= 20, "no step was taken twice"
    world.same_bytes(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_job_is_blamed_for_a_refused_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_base(tmp_path / "base")
    write_rows(tmp_path / "a.jsonl", 12, 0, high=20)
    world = World(base, [job("a", str(tmp_path / "a.jsonl"))], tmp_path / "whole")
    train(base, world.whole, world.orders, deterministic=True)
    monkeypatch.setattr(worker_pool, "AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(worker_pool, "__version__", "0.0.0")

    def act(event: Event, script: Script) -> tuple[int, ...]:
        if script.count > MOST_DEATHS:
            monkeypatch.setattr(worker_pool, "__version__", __version__)
        return script.gpus

    script, notes = Script((0,), act), list[str]()
    run_script(world, tmp_path / "out", script, gpus=(0,), note=notes.append, tick_seconds=0.5)
    lost = [event.reason for event in script.told if isinstance(event, GroupLost)]
    assert len(lost) > MOST_DEATHS and all("ended with exit status 2" in reason for reason in lost), lost
    assert any("this is 0.0.0. The program was updated" in note for note in notes), notes
    assert isinstance(script.told[-1], JobFinished)
    world.same_bytes(tmp_path / "out")


def test_a_worker_that_was_refused_is_not_started_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "AGAIN_SECONDS", 1e9)
    monkeypatch.setattr(worker_pool, "__version__", "0.0.0")
    machine = LocalMachine((0,), "cpu", {"tiny": "models/none"}, tmp_path / "out")
    with LocalBackend(machine) as backend:
        worker = backend.worker_pool.start((0,), "models/none")
        assert worker is not None
        ended = list[object]()
        while (worker, None) not in ended:
            ended += backend.worker_pool.listen(1.0)
        del backend.worker_pool.workers[0]
        assert worker.doomed and backend.worker_pool.start((0,), "models/none") is None and not backend.worker_pool.workers
