"""Files and keys from a terminal, and what is said of deadlines: the commands and pages against a server on a socket."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.service.desk import Desk
from tests.service.served import ROW, until


@pytest.mark.parametrize("given", ["read,submit", "read submit", "Read", ""])
def test_a_scope_that_is_none_says_how_several_are_given(job_controller: Desk, given: str) -> None:
    for place in ((), ("--local",)):
        found = job_controller("keys", "create", "ci", "--scope", given, *place, tenant="operator", status=2)
        assert (
            f"--scope {given!r}: is not one of read, submit, admin. Give --scope once for each: --scope read --scope submit" in found.output
        )


def test_files_are_listed_and_deleted_by_name_or_id(slow_desk: Desk, place: Path) -> None:
    assert "no files" in slow_desk("files", "list").output
    (place / "other.jsonl").write_bytes(ROW * 9)
    (place / "jobs.yaml").write_text("base_model: base\njobs: [{name: a, data: data.jsonl}, {name: b, data: other.jsonl}]\n")
    slow_desk("submit", "jobs.yaml")
    ids = {file["filename"]: file["id"] for file in slow_desk.asked("/v1/files")["data"]}
    shown = slow_desk("files", "list").output
    assert all(name in shown and ids[name] in shown for name in ("data.jsonl", "other.jsonl")) and "fine-tune" in shown
    assert re.search(r"files [\d.]+ (bytes|KiB), tokenized data [\d.]+ (bytes|KiB), of 200 GiB", shown), shown
    for what in ("files list", "jobs"):
        cut = slow_desk(*what.split(), "--limit", "1")
        assert cut.stdout.count("file-" if what != "jobs" else "job-") == 1 and "the newest 1; --all lists the others too" in cut.stderr
        assert not slow_desk(*what.split(), "--limit", "2").stderr and not slow_desk(*what.split(), "--all").stderr
    assert [file["id"] for file in json.loads(slow_desk("files", "list", "--json").output)] == [ids["other.jsonl"], ids["data.jsonl"]]
    assert "no files" in slow_desk("files", "list", tenant="bob").output
    refused = slow_desk("files", "delete", "data.jsonl", "none.jsonl", status=2).output
    assert "which has not ended. Cancel that job, or wait" in refused and "there is no file 'none.jsonl'. `tlora files list`" in refused
    slow_desk("cancel", "a", "b")
    assert "there is no file 'data.jsonl'" in slow_desk("files", "delete", "data.jsonl", tenant="bob", status=2).output
    assert f"data.jsonl ({ids['data.jsonl']}): deleted" in slow_desk("files", "delete", "data.jsonl").output
    assert f"{ids['other.jsonl']}: deleted" in slow_desk("files", "delete", ids["other.jsonl"]).output
    assert slow_desk.asked("/v1/files")["data"] == []


def test_of_several_files_of_a_name_an_id_is_asked_for(slow_desk: Desk, place: Path) -> None:
    for count in (8, 9):
        (place / "data.jsonl").write_bytes(ROW * count)
        (place / "jobs.yaml").write_text(f"base_model: base\njobs: [{{name: a{count}, data: data.jsonl}}]\n")
        slow_desk("submit", "jobs.yaml")
        slow_desk("cancel", f"a{count}")
    found = slow_desk("files", "delete", "data.jsonl", status=2).output
    assert "2 files are named 'data.jsonl': file-" in found and "Give an id" in found
    assert len(slow_desk.asked("/v1/files")["data"]) == 2


def test_a_missed_deadline_is_said_of_jobs_that_wait_run_and_have_ended(slow_desk: Desk, place: Path) -> None:
    """Wherever a job has a line; one that has time left is not called late."""
    more = ", deadline_seconds: 1.0e-6}"
    (place / "jobs.yaml").write_text(
        f"base_model: base\njobs:\n  - {{name: late, data: data.jsonl, max_steps: 5{more}\n  - {{name: held, data: data.jsonl{more}\n"
        "  - {name: early, data: data.jsonl, deadline_seconds: 1.0e+6}\n"
    )
    slow_desk("submit", "jobs.yaml")
    late, _, early = (slow_desk.wait(name, "queued")["id"] for name in ("late", "held", "early"))
    slow_desk("pause", "held")
    until(lambda: late in slow_desk.served.cluster.placed)
    slow_desk.served.cluster.step(late, 3)
    slow_desk.wait("late", "running")
    slow_desk.tick_until(lambda: "late (3/10, missed its deadline)" in slow_desk("queue").output)
    assert {job["name"]: job["deadline_missed"] for job in slow_desk.asked("/v1/jobs")["data"]} == {
        "late": True,
        "held": True,
        "early": False,
    }
    waiting = {one["name"]: one["deadline_missed"] for one in slow_desk.asked("/v1/cluster")["waiting"]}
    assert waiting["held"] and not waiting.get("early", False)
    assert "paused; missed its deadline" in slow_desk("queue").output
    listed = slow_desk("jobs").output
    assert listed.count("missed its deadline") == 2
    assert re.search(r"deadline +\d{4}-\d\d-\d\d [\d:]+, missed", slow_desk("show", "late").output)
    assert re.search(r"deadline +\d{4}-\d\d-\d\d [\d:]+ *\n", slow_desk("show", "early").output)
    page = slow_desk.served.client.get("/", headers={"X-API-Key": slow_desk.served.key("alice")}).text
    assert page.count("missed its deadline") == 2
    for job, count in ((late, 1), (early, 0)):
        page = slow_desk.served.client.get(f"/jobs/{job}", headers={"X-API-Key": slow_desk.served.key("alice")}).text
        assert page.count("Missed its deadline") == count
    slow_desk("cancel", "late", "early")
    assert {job["name"]: job["deadline_missed"] for job in slow_desk.asked("/v1/jobs")["data"]} == {
        "late": True,
        "held": True,
        "early": False,
    }
