"""Fair shares on a server: the tenant that has used less is next when something ends, also after a restart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny_runs import write_rows
from tests.service.served import Served, serving, until
from tests.service.test_real_server import Server, running
from tlora.service.config import ServerConfig
from tlora.service.usage import save_usage, saved_usage


def used(served: Served) -> dict[str, float]:
    """By tenant, as the scheduler counts it now."""
    scheduler: Any = served.opened.controller.scheduler
    return scheduler.state.tenants.used_at(served.cluster.now())


def tenant_of(served: Served, job: str) -> str:
    scheduler: Any = served.opened.controller.scheduler
    return until(lambda: scheduler.state.jobs.get(job)).spec.tenant


@pytest.mark.slow
def test_use_is_counted_kept_and_recalled(tmp_path: Path, database_url: str) -> None:
    with serving(tmp_path / "server", eager=False, database_url=database_url) as served:
        job = served.submit("alice")["id"]
        tenant = tenant_of(served, job)
        until(lambda: used(served).get(tenant, 0.0) > 0.05)
        served.cluster.finish(job)
        served.wait("alice", job, "succeeded")
        counted = used(served)
    with serving(tmp_path / "server", eager=False, database_url=database_url) as served:
        served.cluster.tick()
        assert used(served) == {tenant: pytest.approx(counted[tenant], rel=0.01)}


def test_what_is_kept_fades_while_no_server_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path / "server", eager=False) as served:
        tenant = tenant_of(served, served.submit("alice")["id"])
        served.opened.services.writer.do(lambda connection: save_usage(connection, {tenant: 1000.0, "gone": 5.0}))
        real = time.time
        for days, half_life, left in ((0, 86400.0, 1000.0), (2, 86400.0, 250.0), (2, 2 * 86400.0, 500.0)):
            monkeypatch.setattr("tlora.service.usage.time.time", lambda days=days: real() + 86400.0 * days)
            assert served.opened.services.read(lambda c, h=half_life: saved_usage(c, h)) == {tenant: pytest.approx(left, rel=1e-3)}


def test_the_half_life_is_the_operators(tmp_path: Path) -> None:
    assert ServerConfig().usage_half_life_seconds == 86400.0
    with serving(tmp_path / "server", usage_half_life_seconds=60.0) as served:
        scheduler: Any = until(lambda: served.opened.controller.scheduler)
        assert scheduler.state.tenants.half_life_seconds == 60.0


@pytest.mark.slow
def test_one_job_after_many_of_another_tenant_is_the_next_that_trains(tmp_path: Path) -> None:
    """On a real worker. Bounds of 1 keep the jobs from sharing it; that of `bob` is the longest."""
    directory = tmp_path / "server"
    directory.mkdir()
    data = write_rows(tmp_path / "data.jsonl", 40).read_bytes()
    with running(directory) as servers:
        server = Server(directory, "--gpus", "0")
        servers.append(server)
        bob = server.ask("POST", "/v1/keys", json={"tenant": "bob", "name": "test"})["key"]
        orders: dict[str, Any] = {"batch_size": 4, "r": 4, "max_slowdown": 1.0}

        def submit(name: str, steps: int, **headers: str) -> str:
            form: dict[str, Any] = {"files": {"file": ("d.jsonl", data)}, "data": {"purpose": "fine-tune"}}
            file = server.ask("POST", "/v1/files", headers=headers, **form)["id"]
            body = {"name": name, "base_model": "base", "data": {"file": file}, "max_steps": steps} | orders
            return server.ask("POST", "/v1/jobs", headers=headers, json=body)["id"]

        many = [submit(f"a{number}", 40) for number in range(4)]
        until(lambda: server.job(many[1])["status"] == "running")
        own = submit("b", 90, **{"X-API-Key": bob})
        ends = [server.ended(job) for job in many]
        one = server.ask("GET", f"/v1/jobs/{own}", headers={"X-API-Key": bob})
    assert {end["status"] for end in ends} == {"succeeded"} and one["status"] == "succeeded"
    assert sorted([*(end["started_at"] for end in ends), one["started_at"]]).index(one["started_at"]) == 2, "after those two that had begun"
