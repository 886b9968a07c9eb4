"""Clients of `report_to`: which options each is opened with. Stand-ins for their modules; no network."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tlora.errors import ConfigError
from tlora.job import RunSpec
from tlora.store.metrics import Tracker, check_trackers


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
    client = Client(both | {"reinit", "id", "resume", "dir"} if name == "wandb" else both)
    monkeypatch.setitem(sys.modules, name, client)
    run = RunSpec.model_validate({"base_model": "b", "report_to": [name], "jobs": [{"name": job, "data": "d"} for job in ("one", "two")]})
    notes: list[str] = []
    for job in run.jobs:
        Tracker(run.report_to, job, tmp_path / "runs" / job.name, notes.append)
    assert not notes and [options["name"] for options in client.opened] == ["one", "two"]
    assert [options.get("reinit") for options in client.opened] == reinit and {options["project"] for options in client.opened} == {"runs"}


def test_a_job_keeps_its_run_at_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The id is the job's own, and steps that the run has already are not sent again: wandb refuses them."""
    monkeypatch.delenv("WANDB_DIR", raising=False)
    client, sent = Client({"project", "name", "group", "config", "reinit", "id", "resume", "dir"}), list[int]()
    monkeypatch.setattr(client, "log", lambda values, step: sent.append(step))
    monkeypatch.setitem(sys.modules, "wandb", client)
    run = RunSpec.model_validate({"base_model": "b", "jobs": [{"name": job, "data": "d"} for job in ("one", "two")]})
    for start in (0, 3):
        monkeypatch.setattr(client, "starting_step", start, raising=False)
        for job in run.jobs:
            tracker = Tracker(["wandb"], job, tmp_path / job.name, pytest.fail, 2 if start else 0)
            for step in (1, 2, 3):
                tracker.log({"step": step, "loss": 1.0})
    ids = [options["id"] for options in client.opened]
    assert ids[:2] == ids[2:] and len(set(ids)) == 2 and {options["resume"] for options in client.opened} == {"allow"}
    assert sent == [1, 2, 3, 1, 2, 3, 3, 3] and client.opened[0]["dir"] == str(tmp_path / "one")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    Tracker(["wandb"], run.jobs[0], tmp_path / "one", pytest.fail)
    assert "dir" not in client.opened[-1]


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_folder_is_not_the_package(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match=f"{name} is not installed"):
        check_trackers([name])
    (tmp_path / name / "__init__.py").write_text("")
    importlib.invalidate_caches()
    check_trackers([name])


def test_tensorboard_has_each_step_once_after_a_kill(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (job,) = RunSpec.model_validate({"base_model": "b", "jobs": [{"name": "one", "data": "d"}]}).jobs
    for done, last in ((0, 7), (4, 9)):  # killed after step 7, with a checkpoint at 4
        tracker = Tracker(["tensorboard"], job, tmp_path / "one", pytest.fail, done)
        for step in range(done + 1, last + 1):
            tracker.log({"step": step, "loss": 100.0 * done + step})
        tracker.close()
        for file in (tmp_path / "one" / "tensorboard").iterdir():  # the order of the files is that of their names' seconds
            if done == 0:
                file.rename(file.with_name(file.name.replace("tfevents.", "tfevents.0")))
    found = events.EventAccumulator(str(tmp_path / "one" / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    expected = [(step, float(step)) for step in range(1, 5)] + [(step, 400.0 + step) for step in range(5, 10)]
    assert [(event.step, event.value) for event in found.Scalars("loss")] == expected
