"""A server whose cluster trains nothing and whose intake reads nothing, for `bench.service`: what is measured is HTTP and the store."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tlora.protocol import Event
from tlora.service import server
from tlora.service.backend_factory import BackendFactory, Cluster
from tlora.service.config import read_config
from tlora.service.intake import IntakeSettings, parse_request
from tlora.service.machine import Devices


class IdleCluster(Cluster):
    """Takes jobs and never runs them. What it does not say does nothing, as in the protocol."""

    began_at_seconds = 0.0

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def now(self) -> float:
        return 0.0

    def poll(self) -> list[Event]:
        self._stopped.wait()
        return []

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self._stopped.set()


class IdleIntake:
    """Knows every base and answers for no job."""

    pid = None

    def __init__(self, _: IntakeSettings, __: Path, on_answer: Callable[[dict[str, Any]], None]) -> None:
        self._answer = on_answer

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
