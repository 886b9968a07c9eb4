"""The server is killed at every commit point of a day's work and started again: what was acknowledged is there, once, and all ends once.

The process is a fork of this one, and ends by `os._exit` inside the writer: what is not committed is lost as with kill -9.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.service.postgres import make_database
from tests.service.served import ROW, Served, serving, until
from tlora.service.housekeeping import Housekeeping

KILLED = 9
ORDER = {"name": "a", "base_model": "base", "r": 8}


def work(served: Served, acknowledge: Callable[[str, Any], None]) -> None:
    """Each request once, with a key of its own."""

    def ask(what: str, method: str, path: str, **options: Any) -> Any:
        key = {"Idempotency-Key": what} if path in ("/v1/files", "/v1/jobs", "/v1/sweeps") else {}
        found = served.ask("alice", method, path, headers=key, **options)
        acknowledge(what, found)
        return found

    file = ask("file", "POST", "/v1/files", files={"file": ("a.jsonl", ROW)}, data={"purpose": "fine-tune"})["id"]
    order = ORDER | {"data": {"file": file}}
    one = ask("one", "POST", "/v1/jobs", json=order)["id"]
    two = ask("two", "POST", "/v1/jobs", json=order | {"name": "b"})["id"]
    swept = ask("swept", "POST", "/v1/sweeps", json={"job": order | {"name": "s"}, "sweep": {"seed": [1, 2, 3]}})["data"]
    ask("paused", "POST", f"/v1/jobs/{two}/pause")
    ask("cancelled", "POST", f"/v1/jobs/{swept[2]['id']}/cancel")
    ask("resumed", "POST", f"/v1/jobs/{two}/resume")
    for job in (one, two, *(job["id"] for job in swept)):
        served.wait("alice", job, "succeeded", "cancelled", "paused")


def run_and_die(directory: Path, key: str, nth: int, **changes: Any) -> tuple[int, dict[str, Any]]:
    """A server that works and is killed at the nth point; its exit status, and what it acknowledged."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        hits = 0

        def failpoint(_: str) -> None:
            nonlocal hits
            hits += 1
            if hits == nth:
                os._exit(KILLED)

        status = 1
        try:
            with serving(directory, failpoint=failpoint, **changes) as served:
                served.keys["alice ()"] = key
                work(served, lambda what, found: os.write(writer, json.dumps([what, found]).encode() + b"\n") and None)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        acknowledged = dict(json.loads(line) for line in told if line.endswith(b"\n"))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), acknowledged


def check(served: Served, acknowledged: dict[str, Any]) -> None:
    """Whatever was acknowledged stands; the same requests again give the same jobs; every job ends exactly once."""
    again: dict[str, Any] = {}
    jobs_before = served.ask("alice", "GET", "/v1/jobs", 200, params={"limit": 100})["data"]
    if "cancelled" in acknowledged and acknowledged["cancelled"].get("status") == "cancelled":
        assert served.ask("alice", "GET", f"/v1/jobs/{acknowledged['cancelled']['id']}", 200)["status"] == "cancelled"
    work(served, again.__setitem__)
    for what in ("file", "one", "two"):
        if what in acknowledged:
            assert acknowledged[what]["id"] == again[what]["id"], what
    if "swept" in acknowledged:
        assert [job["id"] for job in acknowledged["swept"]["data"]] == [job["id"] for job in again["swept"]["data"]]
    wanted = [again["one"]["id"], again["two"]["id"], *(job["id"] for job in again["swept"]["data"])]
    jobs = served.ask("alice", "GET", "/v1/jobs", 200, params={"limit": 100})["data"]
    assert sorted(job["id"] for job in jobs) == sorted(wanted), "none lost, none doubled"
    assert {job["id"] for job in jobs_before} <= set(wanted)
    assert len(served.ask("alice", "GET", "/v1/files", 200)["data"]) == 1
    for job in wanted:
        ended = until(lambda job=job: served.wait("alice", job, "succeeded", "cancelled"))
        events = served.ask("alice", "GET", f"/v1/jobs/{job}/events", 200)["data"]
        ends = [event["kind"] for event in events if event["kind"] in ("succeeded", "failed", "cancelled")]
        assert ends == [ended["status"]], events
        assert sum(event["kind"] == "created" for event in events) == 1
    check_storage(served)


def check_storage(served: Served) -> None:
    """The one set of the one file is there, is counted, and goes with the file."""
    place, keeper = served.opened.services.config.directory, Housekeeping(served.opened.services)
    for deleted in (False, True):
        keeper.sweep(time.time() + 4000)
        made = [path for path in place.glob("tokens/*/*") if path.name != "known"]
        assert len(made) == int(not deleted) == len(list(place.glob("files/*/*"))), made
        counted = served.ask("alice", "GET", "/v1/storage", 200)["tokenized_bytes"]
        assert counted == sum(path.stat().st_size for one in made for path in one.iterdir())
        for file in served.ask("alice", "GET", "/v1/files", 200)["data"]:
            served.ask("alice", "DELETE", f"/v1/files/{file['id']}", 200)


def kill_at_every_point(directory: Path, first: int = 1, step: int = 1, **changes: Any) -> int:
    """How many times it was killed: until it got through."""
    nth, killed = first, 0
    while True:
        place = directory / f"at{nth}"
        made = {name: value(nth) if callable(value) else value for name, value in changes.items()}
        with serving(place, **made) as served:
            key = served.key("alice")
        status, acknowledged = run_and_die(place, key, nth, **made)
        assert status in (0, KILLED), status
        with serving(place, **made) as served:
            served.keys["alice ()"] = key
            check(served, acknowledged)
        if status == 0:
            return killed
        killed, nth = killed + 1, nth + step


@pytest.mark.slow
def test_killed_at_every_sixth_commit_point(tmp_path: Path) -> None:
    assert kill_at_every_point(tmp_path, step=6) >= 7


@pytest.mark.soak
def test_killed_at_every_commit_point(tmp_path: Path) -> None:
    assert kill_at_every_point(tmp_path) >= 40


@pytest.mark.soak
def test_killed_at_every_commit_point_of_postgresql(tmp_path: Path, postgres: str) -> None:
    assert kill_at_every_point(tmp_path, database_url=lambda nth: make_database(postgres, f"killed{nth}")) >= 40


@pytest.mark.slow
def test_killed_at_some_commit_points_of_postgresql(tmp_path: Path, postgres: str) -> None:
    assert kill_at_every_point(tmp_path, first=4, step=18, database_url=lambda nth: make_database(postgres, f"some{nth}")) >= 2
