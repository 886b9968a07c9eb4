"""A worker whose log cannot be written, as on a full disk, trains on and ends in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.test_culprit import OneGroup
from tests.engine.conftest import save_base
from tests.engine.tiny_runs import job, run_spec, sha256, train, write_rows
from tlora.cluster.controller import run
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.cluster.reconciler import LocalJob
from tlora.live.cluster_run import submit_all
from tlora.protocol import Action, Event, GroupLost, JobFailed, JobFinished, JobProfile, JobSubmitted


@pytest.mark.slow
def test_jobs_end_and_fail_where_the_log_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is noted: that a job failed, and that one goes on from its checkpoint."""
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    base, data = save_base(tmp_path / "base"), str(write_rows(tmp_path / "rows.jsonl", 20))
    orders = [job("sound", data, max_steps=4, save_steps=2), job("impossible", data, target_modules=["none_such"])]
    train(base, tmp_path / "alone", orders[:1], deterministic=True)
    out = tmp_path / "out"
    (out / "workers").mkdir(parents=True)
    (out / "workers" / "gpu0.log").symlink_to("/dev/full")
    spec = run_spec(base, out, orders)
    for _ in range(2):  # the second time the sound job hands its adapter over once more
        told: list[Event | Action] = []
        with LocalBackend(LocalMachine((0,), "cpu", {"tiny": str(base)}, out, deterministic=True)) as backend:
            jobs = {order.name: LocalJob(order) for order in spec.jobs}
            submit_all(backend, jobs, [(0.0, JobSubmitted(name, "tiny", 1, JobProfile(100.0, 4, 30, 1000))) for name in jobs])
            run(OneGroup(list(jobs)), backend, lambda _, item, told=told: told.append(item))
        assert not any(isinstance(item, GroupLost) for item in told)
        assert [item.job_id for item in told if isinstance(item, JobFinished)] == ["sound"]
        (failed,) = [item for item in told if isinstance(item, JobFailed)]
        assert failed.job_id == "impossible" and "none_such" in failed.reason
        assert sha256(out / "jobs" / "sound") == sha256(tmp_path / "alone" / "sound")
