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
