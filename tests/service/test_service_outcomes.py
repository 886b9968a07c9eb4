"""What becomes of jobs reaches the store: before the cluster is asked for more, whatever a reason quotes, from any thread."""

from __future__ import annotations

import sqlite3
import sys
import threading
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.service.fake_cluster import FakeCluster, FakeIntake
from tests.service.served import Served, config_of, serving, until
from tlora.protocol import (
    ChangeGroup,
    Event,
    GroupFound,
    JobFailed,
    JobFinished,
    JobGroup,
    JobProfile,
    JobRequest,
    JobSubmitted,
    ParallelPlan,
    StartGroup,
    StepsDone,
    StopGroup,
)
from tlora.service.backend_factory import BackendFactory
from tlora.service.job_status_writer import JobStatusWriter
from tlora.service.live_state import LiveState
from tlora.service.machine import Devices
from tlora.service.server import open_server


def test_the_store_has_a_jobs_end_before_the_cluster_is_asked_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a worker forgets an end that a killed server has not kept. Each commit waits for the next poll, if that comes so early."""
    database = tmp_path / "server" / "tlora.db"
    polled, ends = threading.Event(), list[str]()
    statuses: list[str] = []
    poll = FakeCluster.poll

    def look(cluster: FakeCluster) -> list[Event]:
        polled.set()
        if ends:
            with closing(sqlite3.connect(database)) as connection:
                statuses.append(connection.execute("SELECT status FROM jobs WHERE id = ?", (ends.pop(),)).fetchone()[0])
        events = poll(cluster)
        ends.extend(event.job_id for event in events if isinstance(event, JobFailed | JobFinished))
        polled.clear()
        return events

    def failpoint(point: str) -> None:
        if point == "before commit" and ends:
            polled.wait(0.3)

    monkeypatch.setattr(FakeCluster, "poll", look)
    with serving(tmp_path / "server", eager=False, failpoint=failpoint) as served:
        file = served.upload("alice")
        jobs = [served.submit("alice", file=file)["id"] for _ in range(2)]
        for job in jobs:
            while job not in served.cluster.placed:
                served.wait("alice", job, "queued", "running")
        served.cluster.fail(jobs[0], "its data")
        served.wait("alice", jobs[0], "failed")
        served.cluster.finish(jobs[1])
        served.wait("alice", jobs[1], "succeeded")
        served.cluster.tick()
        while len(statuses) < 2:
            served.cluster.tick()
    assert statuses == ["failed", "succeeded"]


def test_a_reason_may_quote_anything(tmp_path: Path, database_url: str) -> None:
    """Zero characters and lone surrogates come from data files; neither database takes the one or the other."""
    with serving(tmp_path / "server", eager=False, database_url=database_url) as served:
        job = served.submit("alice")["id"]
        while job not in served.cluster.placed:
            served.wait("alice", job, "queued")
        served.cluster.fail(job, "line 3: role 'x\0y\udc80\ud800z' is none")
        assert served.wait("alice", job, "failed")["reason"] == "line 3: role 'x\ufffdy??z' is none"
        last = served.ask("alice", "GET", f"/v1/jobs/{job}/events", 200)["data"][-1]
        assert last["kind"] == "failed" and "role" in last["message"]


def test_jobs_of_workers_that_were_found_have_their_steps_at_once(outcomes: tuple[Any, LiveState]) -> None:
    """Not those of the last time that a server wrote them down, until each has made one more."""
    made, live = outcomes
    order = JobSubmitted("z", "base", 1, JobProfile(100.0, 10, 30, 1000))
    made.see(GroupFound(_group("z"), (order,), (7,)))
    assert live.steps("z") == 7
    made.see(GroupFound(_group("z"), (order,)))
    assert live.steps("z") == 7, "never back"


def test_a_job_that_waits_after_a_restart_has_the_steps_of_its_checkpoint(tmp_path: Path) -> None:
    """A server that was killed had not heard of its last ones, or not written them down; they are never fewer than were shown."""
    place = tmp_path / "server"
    with serving(place, eager=False) as served:
        jobs = [served.submit("alice", name=name)["id"] for name in ("one", "two")]
        for job, steps in zip(jobs, (3, 6), strict=True):
            until(lambda job=job: job in served.cluster.placed)
            served.cluster.step(job, steps)
            served.wait("alice", job, "running")
            for step in (2, 5, 4):
                (place / "jobs" / job / f"checkpoint-{step}").mkdir(parents=True)
            (place / "jobs" / job / "checkpoint-9.tmp").mkdir()
    with serving(place, eager=False) as served:
        assert [served.wait("alice", job, "queued")["steps"] for job in jobs] == [5, 6]


def test_a_job_that_ends_early_has_its_last_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all jobs are written down each ten seconds."""
    monkeypatch.setattr("tlora.service.job_status_writer._STEPS_SECONDS", 1e9)
    with serving(tmp_path / "server", eager=False) as served:
        cancelled, failed = (served.submit("alice", name=name)["id"] for name in ("one", "two"))
        for job in (cancelled, failed):
            until(lambda job=job: job in served.cluster.placed)
            served.cluster.step(job, 3)
            until(lambda job=job: served.ask("alice", "GET", f"/v1/jobs/{job}", 200)["steps"] == 3)
        served.ask("alice", "POST", f"/v1/jobs/{cancelled}/cancel", 200)
        served.cluster.fail(failed, "its data")
        served.wait("alice", failed, "failed")
        until(lambda: served.ask("alice", "GET", f"/v1/jobs/{failed}", 200)["steps"] == 3)
        assert served.ask("alice", "GET", f"/v1/jobs/{cancelled}", 200)["steps"] == 3
        served.cluster._inbox.put(StepsDone(cancelled, "its group", 4, 0.1))  # its worker lets it go
        assert until(lambda: served.ask("alice", "GET", f"/v1/jobs/{cancelled}", 200)["steps"] == 4)


class NoStore:
    """A writer that keeps nothing."""

    def submit(self, operation: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(None)
        return future


class DeafStore:
    """A writer whose database does not answer."""

    def submit(self, operation: Any) -> Future[Any]:
        return Future()


def test_a_store_that_does_not_answer_does_not_stop_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers end when nothing is heard of their controller for ten minutes."""
    monkeypatch.setattr("tlora.service.job_status_writer._SETTLE_SECONDS", 0.01)
    made = JobStatusWriter(tmp_path, DeafStore(), LiveState(2), lambda _: None)  # type: ignore[arg-type]
    made.settle()
    made.see(JobFailed("x", "its data"))
    made.settle()


@pytest.fixture
def outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, LiveState]:
    """Without a store, and shown at once."""
    monkeypatch.setattr("tlora.service.job_status_writer._SHOW_SECONDS", 0.0)
    live = LiveState(2)
    made: Any = JobStatusWriter(tmp_path, NoStore(), live, lambda _: None)  # type: ignore[arg-type]
    made.begin(Devices("cpu", (0, 1)))
    for name in ("x", "y"):
        made.see(JobSubmitted(name, "base", 1, JobProfile(100.0, 10, 30, 1000)))
    made.see(StartGroup(_group("x", "y")))
    made.see(StepsDone("x", "g0", 3, 0.1))
    return made, live


def _group(*names: str) -> JobGroup:
    return JobGroup("g0", "base", (0,), ParallelPlan(1, 256), names, tuple(1.0 for _ in names))


def test_a_cancelled_job_that_steps_once_more_does_not_wait(outcomes: tuple[Any, LiveState]) -> None:
    """A worker tells the last steps of a job as it lets it go, after its owner has cancelled it."""
    made, live = outcomes
    for item in (JobRequest("x", "cancel"), StepsDone("x", "g0", 4, 0.1), ChangeGroup(_group("y"))):
        made.see(item)
    assert list(live.snapshot.waiting) == ["y"] and live.steps("x") is None


def test_a_paused_job_waits_for_its_owner_and_not_for_a_gpu(outcomes: tuple[Any, LiveState]) -> None:
    made, live = outcomes
    for item in (JobRequest("x", "hold"), ChangeGroup(_group("y"))):
        made.see(item)
    assert "x" not in live.snapshot.waiting
    made.see(JobRequest("x", "release"))
    assert live.snapshot.waiting["x"] == "a CPU process that it fits on: it is the next"
    made.see(JobRequest("y", "release"))
    made.see(StepsDone("y", "g0", 1, 0.1))
    assert list(live.snapshot.waiting) == ["x"], "the other was never held: it trains"


def test_a_server_that_is_ended_while_it_looks_for_workers_ends(tmp_path: Path) -> None:
    """It may look for them for half a minute; a service manager waits for it."""
    looking, found = threading.Event(), threading.Event()

    def make(_: object) -> FakeCluster:
        looking.set()
        found.wait()
        return FakeCluster(tmp_path)

    backend_factory = BackendFactory(Devices("cpu", (0, 1)), make, lambda _, __, on_answer: FakeIntake(on_answer))
    opened = open_server(config_of(tmp_path / "server"), backend_factory)
    opened.controller.start({})
    looking.wait()
    closing = threading.Thread(target=opened.close)
    closing.start()
    while not opened.controller._closing:
        pass
    found.set()
    closing.join()


def test_what_ran_before_is_shown_so_until_its_worker_is_known_to_be_gone(tmp_path: Path) -> None:
    place = tmp_path / "server"
    with serving(place, eager=False) as served:
        job = served.submit("alice")["id"]
        until(lambda: job in served.cluster.placed)
        served.cluster.step(job, 3)
        served.wait("alice", job, "running")
        key = served.key("alice")
    with sqlite3.connect(place / "tlora.db") as connection:
        assert connection.execute("SELECT status FROM jobs").fetchall() == [("queued",)], "after an orderly end"
        connection.execute("UPDATE jobs SET status = 'running'")  # as a kill leaves it
    connection.close()
    found = threading.Event()

    def make(_: object) -> FakeCluster:
        found.wait()
        return FakeCluster(tmp_path, eager=False)

    backend_factory = BackendFactory(Devices("cpu", (0, 1)), make, lambda _, __, on_answer: FakeIntake(on_answer))
    opened = open_server(config_of(place), backend_factory)
    with TestClient(opened.app) as client:
        served = Served(opened, client, [], [], {"alice ()": key})
        assert served.ask("alice", "GET", f"/v1/jobs/{job}", 200)["status"] == "running"
        found.set()
        served.wait("alice", job, "queued")


def test_requests_and_the_cluster_may_tell_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups come and go in one thread while another tells the ends of jobs: neither may see the other's change as an error."""
    monkeypatch.setattr("tlora.service.job_status_writer._SHOW_SECONDS", 0.0)
    made: Any = JobStatusWriter(tmp_path, NoStore(), LiveState(2), lambda _: None)  # type: ignore[arg-type]
    made.begin(Devices("cpu", (0, 1)))
    errors: list[BaseException] = []
    over = threading.Event()

    def requests() -> None:
        try:
            while not over.is_set():
                made.ended("job-of-nobody")
        except BaseException as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    other = threading.Thread(target=requests)
    try:
        other.start()
        for number in range(600):
            names = tuple(f"j{number}-{index}" for index in range(4))
            made.see(ChangeGroup(JobGroup(f"g{number}", "base", (0,), ParallelPlan(1, 256), names, (1.0,) * 4)))
            if number >= 8:
                for index in range(4):  # else they would wait for another group, and the queue grow
                    made.see(JobRequest(f"j{number - 8}-{index}", "cancel"))
                made.see(StopGroup(f"g{number - 8}"))
    finally:
        over.set()
        other.join()
        sys.setswitchinterval(before)
    assert not errors, errors


def test_a_base_is_loaded_ahead_for_jobs_that_came_before_it_was_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a server's start: its intake process looks at the bases while the first jobs come."""
    known, put = threading.Event(), FakeIntake.put

    def put_late(intake: FakeIntake, key: str, line: bytes) -> None:
        if key.startswith("base:") and not known.is_set():
            threading.Thread(target=lambda: (known.wait(), put(intake, key, line)), daemon=True).start()
        else:
            put(intake, key, line)

    monkeypatch.setattr(FakeIntake, "put", put_late)
    with serving(tmp_path / "server", held=True) as served:
        job = served.submit("alice", file=served.upload("alice"))["id"]
        until(lambda: job in served.intakes[0].asked)
        assert not served.cluster.asked
        known.set()
        until(lambda: bool(served.cluster.asked))
        assert [what for what, _ in served.cluster.asked] == ["expect"] and not served.cluster.submitted
        served.intakes[0].let_go()
        served.wait("alice", job, "succeeded")
