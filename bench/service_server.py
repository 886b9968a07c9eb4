"""A server whose cluster trains nothing and whose intake reads nothing, for `bench.service`: what is measured is HTTP and the store."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tlora.cluster.reconciler import LocalJob
from tlora.job import JobSpec
from tlora.protocol import Action, Event, JobRequest, JobSubmitted
from tlora.scheduler.state import ClusterState
from tlora.service import server
from tlora.service.backend_factory import BackendFactory, Cluster, ReadsData
from tlora.service.config import read_config
from tlora.service.intake import IntakeSettings, parse_request
from tlora.service.machine import Devices


class IdleCluster(Cluster):
    """Takes jobs and never runs them."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self.more_to_come = lambda: False

    @property
    def began_at_seconds(self) -> float:
        return 0.0

    def now(self) -> float:
        return 0.0

    def poll(self) -> list[Event]:
        self._stopped.wait()
        return []

    def execute(self, action: Action) -> None:
        pass

    def submit(self, spec: JobSubmitted, job: LocalJob, at_seconds: float | None = None) -> None:
        pass

    def ask(self, request: JobRequest, at_seconds: float = 0.0) -> None:
        pass

    def forget(self, job_id: str) -> None:
        pass

    def expect(self, base_model: str, spec: JobSpec) -> None:
        pass

    def drain(self, host: str, *, finish: bool = False, undo: bool = False) -> None:
        pass

    def follow(self, state: ClusterState) -> None:
        pass

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self._stopped.set()


class IdleIntake(ReadsData):
    """Knows every base and answers for no job."""

    def __init__(self, _: IntakeSettings, __: Path, on_answer: Callable[[dict[str, Any]], None]) -> None:
        self._answer = on_answer

    @property
    def pid(self) -> int | None:
        return None

    def start(self) -> None:
        pass

    def put(self, key: str, line: bytes) -> None:
        if key.startswith("base:"):
            request = parse_request(line)
            threading.Thread(target=self._answer, args=({"key": request.key, "bytes": 1 << 30},)).start()

    def forget(self, key: str) -> None:
        pass

    def close(self) -> None:
        pass


def _idle_hall(_: object) -> BackendFactory:
    def make(_: Mapping[str, str]) -> IdleCluster:
        return IdleCluster()

    return BackendFactory(Devices("cpu", (0,)), make, IdleIntake)


def main() -> None:
    """argv: the server's directory, and optionally a database's URL."""
    server.local_hall = _idle_hall
    options: dict[str, object] = {"data_dir": sys.argv[1], "port": 0, "base_models": {"base": "models/base"}}
    if len(sys.argv) > 2:
        options["database_url"] = sys.argv[2]
    limits = {"requests_per_second": 1e6, "open_jobs": 10**6}
    sys.exit(server.serve(read_config(None, options | {"limits": limits}), print))


if __name__ == "__main__":
    main()
