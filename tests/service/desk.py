"""A user at a terminal with a server: what commands send, print and return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.service.served import Served, listening, until
from tlora.cli.commands import app

JOBS = """base_model: base
defaults: {r: 4, max_length: 64}
jobs:
  - {name: polite, data: {path: data.jsonl, eval_size: 2}, max_steps: 5}
  - {name: sql, data: [data.jsonl, same.jsonl], learning_rate: 1e-4}
  - {name: grid, data: data.jsonl, sweep: {r: [8, 16], learning_rate: [1e-3, 5e-4]}}
"""


@dataclass
class Desk:
    """A user at a terminal with a server."""

    served: Served
    url: str
    monkeypatch: pytest.MonkeyPatch

    def __call__(self, *arguments: str, tenant: str = "alice", stdin: str | None = None, status: int = 0) -> Result:
        scopes = ("read", "submit", "admin") if tenant == "operator" else ("read", "submit")
        self.monkeypatch.setenv("TLORA_API_KEY", self.served.key(tenant, *scopes))
        found = CliRunner().invoke(app, list(arguments), input=stdin)
        assert found.exit_code == status, (found.exit_code, found.output, found.exception)
        return found

    def asked(self, path: str, tenant: str = "alice") -> Any:
        return self.served.ask(tenant, "GET", path, 200)

    def tick_until(self, look: Callable[[], bool]) -> None:
        """The picture of the cluster is drawn anew with what happens there."""

        def see() -> bool:
            self.served.cluster.tick()
            return look()

        until(see)

    def wait(self, name: str, status: str) -> dict[str, Any]:
        return until(
            lambda: next((job for job in self.asked("/v1/jobs?limit=100")["data"] if (job["name"], job["status"]) == (name, status)), None)
        )


def at_desk(directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Desk]:
    with listening(directory, **options) as (served, url):
        monkeypatch.setenv("TLORA_URL", url)
        monkeypatch.setenv("TLORA_HOME", str(directory))
        yield Desk(served, url, monkeypatch)
