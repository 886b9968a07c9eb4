"""The server is killed after a worker has told it a job's end and before the store has it: the worker tells the next server the same.

The store's commit and the line to the worker are the real ones, the worker trains; the process that is killed is a fork of this one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.engine.tiny_runs import write_rows
from tests.service.fake_cluster import FakeIntake
from tests.service.served import Served, config_of, until
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.json_file import read_object
from tlora.link.process_identity import ProcessIdentity
from tlora.service.backend_factory import BackendFactory
from tlora.service.job_status_writer import JobStatusWriter
from tlora.service.machine import Devices
from tlora.service.server import open_server

BASE = Path(__file__).parents[2] / "demo" / "base"
KILLED = 9


@contextmanager
def training(directory: Path, failpoint: Any = lambda _: None) -> Iterator[Served]:
    """A server whose one worker trains; its data is not looked at before."""

    def make(bases: Mapping[str, str]) -> LocalBackend:
        return LocalBackend(LocalMachine((0,), "cpu", bases, directory, deterministic=True))

    backend_factory = BackendFactory(Devices("cpu", (0,)), make, lambda _, __, on_answer: FakeIntake(on_answer))
    opened = open_server(config_of(directory, base_models={"base": str(BASE)}), backend_factory, failpoint)
    with TestClient(opened.app) as client:
        until(lambda: opened.services.live.fault is None)
        yield Served(opened, client, [], [])


def serve_and_die(directory: Path, order: dict[str, Any], data: bytes) -> tuple[int, str, str]:
    """A server that is killed as it commits the end of its first job; its exit status, a key, and the job's id."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        ended = False

        def failpoint(point: str) -> None:
            if point == "before commit" and ended:
                time.sleep(1.0)  # for an acknowledgement that comes too early
                os._exit(KILLED)

        def see(method: Any) -> Any:
            def call(outcomes: JobStatusWriter, *args: Any) -> None:
                nonlocal ended
                ended = True
                method(outcomes, *args)

            return call

        try:
            JobStatusWriter.fail, JobStatusWriter._finish = see(JobStatusWriter.fail), see(JobStatusWriter._finish)
            with training(directory, failpoint) as served:
                key = served.key("alice")
                job = served.submit("alice", file=served.upload("alice", data), **order)["id"]
                os.write(writer, f"{key} {job}".encode())
                while True:
                    time.sleep(1.0)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        key, job = told.read().decode().split()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), key, job


@pytest.mark.parametrize(
    ("fields", "status", "once"),
    [
        pytest.param({"target_modules": ["none_such"]}, "failed", "failed: ", marks=pytest.mark.soak),
        ({"max_steps": 3, "r": 4, "save_steps": 1}, "succeeded", "goes on from"),
    ],
)
def test_an_end_that_the_store_has_not_kept_is_told_again(tmp_path: Path, fields: dict[str, Any], status: str, once: str) -> None:
    directory = tmp_path / "server"
    data = write_rows(tmp_path / "rows.jsonl", 12).read_bytes()
    worker = directory / "workers" / "gpu0.json"
    try:
        code, key, job = serve_and_die(directory, fields, data)
        assert code == KILLED
        before = read_object(worker)
        with training(directory) as served:
            served.keys["alice ()"] = key
            ended = served.wait("alice", job, "succeeded", "failed")
            events = served.ask("alice", "GET", f"/v1/jobs/{job}/events", 200)["data"]
        assert ended["status"] == status and (status != "failed" or "none_such" in ended["reason"]), ended
        assert sum(event["kind"] == status for event in events) == 1
        assert read_object(worker) == before, "the worker was never replaced"
        log = (directory / "workers" / "gpu0.log").read_text()
        assert log.count(once) == (1 if status == "failed" else 0), f"the job was run twice: {log}"
    finally:
        with suppress(OSError, TypeError, ValueError):
            ProcessIdentity(**read_object(worker)).kill()
