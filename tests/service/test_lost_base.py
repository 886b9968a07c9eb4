"""A server that is started again without a base that its jobs were accepted for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.service.served import serving, until


@pytest.mark.parametrize("is_read", [True, False])
def test_jobs_whose_base_is_not_served_any_more_say_so_and_go_on_once_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_read: bool
) -> None:
    with serving(tmp_path / "s", eager=False, held=not is_read) as before:
        job = before.submit("alice")["id"]
        if is_read:
            until(lambda: job in before.cluster.placed)
    with caplog.at_level(logging.WARNING), serving(tmp_path / "s", base_models={}) as after:
        waits = until(lambda: (found := after.ask("alice", "GET", f"/v1/jobs/{job}"))["waiting_for"] != "the server to begin" and found)
        assert waits["status"] == ("queued" if is_read else "preparing")
        assert waits["waiting_for"] == "its base model base, which is not served any more: its operator must add it"
        assert "1 job waits for base model base, which is not served any more: `tlora bases add base=...`, or start with it" in caplog.text
        admin = {"Authorization": f"Bearer {after.key('operator', 'admin')}"}
        after.ask("operator", "POST", "/v1/bases", 201, json={"name": "base", "path": "models/base"}, headers=admin)
        after.wait("alice", job, "succeeded")


def test_one_that_is_cancelled_meanwhile_does_not_go_on(tmp_path: Path) -> None:
    with serving(tmp_path, eager=False, held=True) as before:
        jobs = [before.submit("alice")["id"] for _ in range(2)]
    with serving(tmp_path, base_models={}) as after:
        assert after.ask("alice", "POST", f"/v1/jobs/{jobs[0]}/cancel", 200)["status"] == "cancelled"
        admin = {"Authorization": f"Bearer {after.key('operator', 'admin')}"}
        after.ask("operator", "POST", "/v1/bases", 201, json={"name": "base", "path": "models/base"}, headers=admin)
        after.wait("alice", jobs[1], "succeeded")
        assert after.ask("alice", "GET", f"/v1/jobs/{jobs[0]}")["status"] == "cancelled"
        assert jobs[0] not in after.cluster.placed


def test_a_base_that_cannot_be_trained_over_is_given_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the right path, or the same once something lies there. It kept its first path and its fault for ever."""
    with serving(tmp_path) as served:
        admin = {"Authorization": f"Bearer {served.key('operator', 'admin', 'read')}"}

        def add(path: str, status: int) -> None:
            served.ask("operator", "POST", "/v1/bases", status, json={"name": "new", "path": path}, headers=admin)

        def becomes(status: str) -> None:
            until(lambda: (status, "new") in {(base["status"], base["name"]) for base in served.ask("alice", "GET", "/v1/bases")["data"]})

        for path in ("models/nwe", "models/new", "models/new"):
            add(path, 201)
            becomes("ready")
            add("models/other", 409)
            served.intakes[0].tell({"key": "base:new", "problem": "no such directory"})
            becomes("failed")
        add("models/new", 201)
        becomes("ready")
        served.wait("alice", served.submit("alice", base_model="new")["id"], "succeeded")
    given = {"base": "models/base", "new": "models/nwe"}
    with caplog.at_level(logging.WARNING), serving(tmp_path, base_models=given) as served:
        assert served.opened.services.bases["new"] == "models/new"
        assert "base model new: models/new is used, as `tlora bases add` has stored it, and not models/nwe of the settings" in caplog.text
