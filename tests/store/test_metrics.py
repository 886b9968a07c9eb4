"""Clients of `report_to`: which options each is opened with. Stand-ins for their modules; no network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tlora.job import RunSpec
from tlora.store.metrics import Tracker


class Client:
    """Takes only the options that the real module of that name takes."""

    def __init__(self, allowed: set[str]) -> None:
        self.allowed, self.opened = allowed, list[dict[str, Any]]()

    def init(self, **options: Any) -> Client:
        if unknown := set(options) - self.allowed:
            raise TypeError(f"init() got an unexpected keyword argument {min(unknown)!r}")
        self.opened.append(options)
        return self

    def log(self, values: dict[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


@pytest.mark.parametrize(("name", "reinit"), [("wandb", ["create_new"] * 2), ("trackio", [None] * 2)])
def test_each_job_has_a_run_of_its_own_at_the_client(
    name: str, reinit: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"project", "name", "group", "config"}
    client = Client(both | {"reinit"} if name == "wandb" else both)
    monkeypatch.setitem(sys.modules, name, client)
    run = RunSpec.model_validate({"base_model": "b", "report_to": [name], "jobs": [{"name": job, "data": "d"} for job in ("one", "two")]})
    notes: list[str] = []
    for job in run.jobs:
        Tracker(run.report_to, job, tmp_path / "runs" / job.name, notes.append)
    assert not notes and [options["name"] for options in client.opened] == ["one", "two"]
    assert [options.get("reinit") for options in client.opened] == reinit and {options["project"] for options in client.opened} == {"runs"}
