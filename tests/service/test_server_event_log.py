"""A server's log of events: `tlora simulate` replays the jobs that were submitted to it; where it cannot be written the server goes on."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError
from typer.testing import CliRunner

from tests.service.fake_cluster import PROFILE
from tests.service.served import serving
from tlora.cli.commands import app
from tlora.protocol import BaseAdded, JobFinished, JobSubmitted, NodeAdded, StartGroup, StepsDone, Tick
from tlora.service.usage import Usage
from tlora.sim import sweep
from tlora.sim.scenario import Scenario, scene_of
from tlora.sim.trace import read_event_log


def orders_in(path: Path) -> list[tuple[float, JobSubmitted]]:
    return [(seconds, item) for seconds, item in read_event_log(path) if isinstance(item, JobSubmitted)]


def test_its_jobs_are_replayed_as_they_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a restart: the same jobs, arrivals, sizes and tenants."""
    monkeypatch.setattr(sweep, "num_cores", lambda: 1)
    place, jobs = tmp_path / "server", dict[str, str]()
    for tenant in ("alice", "bob"):
        with serving(place) as served:
            for number in range(2):
                found = served.submit(tenant, name=f"{tenant}{number}", max_slowdown=3.0, priority=1.5)
                jobs[found["id"]] = tenant
                served.wait(tenant, found["id"], "succeeded")
    path = place / "logs" / "events.jsonl"
    logged = orders_in(path)
    assert [order.job_id for _, order in logged] == list(jobs)
    for _, order in logged:
        assert (order.tenant, order.max_slowdown, order.priority, order.base_model) == (order.tenant, 3.0, 1.5, "base")
        assert (order.profile.tokens_per_step, order.profile.steps) == (PROFILE["tokens_per_step"], PROFILE["steps"])
    assert len({order.tenant for _, order in logged}) == 2
    kinds = {type(item) for _, item in read_event_log(path)}
    assert {NodeAdded, BaseAdded, StartGroup, JobFinished} <= kinds and not kinds & {StepsDone, Tick}

    scene = scene_of(Scenario(trace=str(path), nodes=1, gpus_per_node=2))
    assert [(job.submit_seconds, job.job) for job in scene.jobs] == logged
    assert len(scene.warnings) == 1 and scene.warnings[0].startswith("'base' (1.07 GB) has no constants on h200: it costs what ")
    options = ["--trace", str(path), "--gpus", "2", "--policy", "fifo,residual_capacity", "--json", str(tmp_path / "found.json"), "--quiet"]
    done = CliRunner().invoke(app, ["simulate", *options])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["jobs"] == len(jobs) and len(found["rows"]) == 2


@pytest.mark.parametrize("wrong", ["another file", "a directory"])
def test_a_log_that_cannot_be_written_costs_no_job(tmp_path: Path, wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "server"
    (place / "logs").mkdir(parents=True)
    path = place / "logs" / "events.jsonl"
    if wrong == "a directory":
        path.mkdir()
    else:
        path.write_text("a diary\n")
    with caplog.at_level(logging.WARNING), serving(place) as served:
        job = served.submit("alice")
        served.wait("alice", job["id"], "succeeded")
    said = [record.getMessage() for record in caplog.records if "events.jsonl cannot be written" in record.getMessage()]
    assert len(said) == 1 and "Jobs go on" in said[0]
    assert path.is_dir() or path.read_text() == "a diary\n"


def test_a_controller_that_finds_no_store_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The database went away between the server's start and the controller's."""
    recall, tries = Usage.recall, list[str]()

    def away(usage: Usage, *arguments: Any) -> None:
        tries.append("try")
        if len(tries) < 3:
            raise OperationalError("SELECT", {}, ConnectionError("the database is down"))
        recall(usage, *arguments)

    monkeypatch.setattr(Usage, "recall", away)
    monkeypatch.setattr("tlora.service.order_reader.STORE_SECONDS", 0.01)
    with caplog.at_level(logging.ERROR), serving(tmp_path / "server") as served:
        job = served.submit("alice")
        served.wait("alice", job["id"], "succeeded")
    assert len(tries) == 3
    assert sum("what tenants have used: waits for the store" in record.getMessage() for record in caplog.records) == 2
