"""Metrics of a run: `metrics.jsonl` per job, `run.jsonl` for the run, and the clients of `report_to`.

A full disk must not end a job: rows that cannot be written are dropped, with one warning.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from tlora import durable
from tlora.errors import ConfigError
from tlora.group.isolation import Failure, try_call
from tlora.job import JobSpec

Row = Mapping[str, Any]
WANDB_ID = "wandb-run-id"


def finite(value: float | None) -> float | None:
    """`value`, or None if it is not finite: JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


def finite_mean(values: Sequence[float]) -> float:
    """The mean of the finite values; NaN if there is none."""
    kept = [value for value in values if math.isfinite(value)]
    return sum(kept) / len(kept) if kept else math.nan


def means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric's finite values over the steps; NaN if it has none."""
    by_name: dict[str, list[float]] = {name: [] for step in steps for name in step}
    for step in steps:
        for name, value in step.items():
            if math.isfinite(value):
                by_name[name].append(value)
    return {name: fmean(values) if values else math.nan for name, values in by_name.items()}


class RowWriter:
    """Appends one JSON object a line, flushed at once, so that a reader sees it and a crash loses at most the torn last line."""

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self._path, self._note, self._broken = path, note, False

    def write(self, row: Row) -> None:
        if isinstance(failed := try_call(self._append, row), Failure):
            if not self._broken:
                self._note(f"{failed.reason}; rows of {self._path} are dropped until it can be written again")
            self._broken = True

    def _append(self, row: Row) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({k: finite(v) if isinstance(v, float) else v for k, v in row.items()}) + "\n")


def check_trackers(names: list[str]) -> None:
    """Raise ConfigError for a tracker whose client is not installed: a folder of its name, as wandb makes one, is not the package."""
    for name in names:
        module = importlib.util.find_spec(name)
        if module is None or (module.origin is None and module.submodule_search_locations is not None):
            raise ConfigError(f"report_to: {name} is not installed. Install it with: pip install 'tlora[{name}]'")


def _add_scalars(writer: Any, values: dict[str, float], step: int) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, step)


@dataclass(frozen=True)
class _Client:
    log: Callable[[dict[str, float], int], None]
    close: Callable[[], None]


def _open_client(name: str, job: JobSpec, directory: Path, step: int) -> _Client:
    """`step`: the last one that the job has taken. Later steps that a killed process has reported are not reported twice."""
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1 if step else 0)
        return _Client(partial(_add_scalars, writer), writer.close)
    client = importlib.import_module(name)  # wandb and trackio share this interface
    own = _options_of_wandb(directory) if name == "wandb" else {}  # trackio resumes by itself, and lacks these options
    run = client.init(project=directory.parent.name, name=job.name, group="tlora", config=job.model_dump(), **own)
    first = getattr(run, "starting_step", 0)  # of a resumed run: wandb refuses earlier steps

    def log(values: dict[str, float], step: int) -> None:
        if step >= first:
            run.log(values, step=step)

    return _Client(log, run.finish)


def _options_of_wandb(directory: Path) -> dict[str, Any]:
    """One run for each job: by default `init` would end this process' current run, which is another job's, and begin a new one at each
    resume. Its files go into the job's directory unless WANDB_DIR is set.
    """
    path = directory / WANDB_ID
    if not path.is_file():
        durable.make_directory(directory)
        durable.write_file(path, uuid.uuid4().hex[:16] + "\n")
    own = {"reinit": "create_new", "id": path.read_text(encoding="utf-8").strip(), "resume": "allow"}
    return own if os.environ.get("WANDB_DIR") else own | {"dir": str(directory)}


class Tracker:
    """One job's numbers to the clients named in `report_to`, one run of theirs per job.

    A client that raises (no login, no network, a full disk) is disabled with a warning; the job continues.
    """

    def __init__(self, report_to: Sequence[str], job: JobSpec, directory: Path, note: Callable[[str], None], step: int = 0) -> None:
        """`step`: the last that the job has taken."""
        self._job, self._note = job.name, note
        self._clients: dict[str, _Client] = {}
        for name in report_to:
            with self._kept_apart(name):
                self._clients[name] = _open_client(name, job, directory, step)

    def log(self, row: Row) -> None:
        values = {k: float(v) for k, v in row.items() if isinstance(v, int | float) and k != "step"}
        for name, client in list(self._clients.items()):
            with self._kept_apart(name):
                client.log(values, int(row["step"]))

    def close(self) -> None:
        for name, client in list(self._clients.items()):
            with self._kept_apart(name):
                client.close()

    @contextmanager
    def _kept_apart(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # clients raise anything
            self._clients.pop(name, None)
            self._note(f"{self._job}: {name} gets no more numbers: {type(error).__name__}: {error}")
