"""The run's directory: opened without ever destroying what is not ours, `run.json`, `job.json`, and where a job can go on from."""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tlora import __version__, durable
from tlora.engine.checkpoint import Progress
from tlora.errors import ConfigError
from tlora.job import JobSpec, RunSpec

_LEFTOVER = re.compile(r"tmp-[0-9a-f]{32}")  # what a kill within the very first write leaves
_FREE_TO_CHANGE = {"weight", "logging_steps", "save_steps", "save_total_limit", "sweep_of"}  # by --resume: no number depends on them


def open_run_directory(run: RunSpec, resume: bool, overwrite: bool) -> Path:
    """Make `output_dir` with a directory per job, or take up an earlier run's. Raises ConfigError."""
    directory = Path(run.output_dir)
    earlier = directory / "run.json"
    try:
        if directory.exists() and not directory.is_dir():
            raise ConfigError(f"output_dir {directory} is a file. Choose another output_dir")
        if directory.is_dir() and any(not _LEFTOVER.fullmatch(path.name) for path in directory.iterdir()):
            _take_up(directory, earlier, run, resume, overwrite)
        durable.make_directory(directory)
        durable.clean(directory)
        write_run_file(directory, run, {"status": "preparing"})  # first of all: whatever is killed from here on is a run
        for job in run.jobs:
            durable.make_directory(directory / job.name)
            write_job_file(directory / job.name, job)
        return directory
    except OSError as error:
        raise ConfigError(f"output_dir {directory} cannot be written ({error.strerror or error}). Choose one where you may write") from None


def _take_up(directory: Path, earlier: Path, run: RunSpec, resume: bool, overwrite: bool) -> None:
    if not earlier.is_file():
        raise ConfigError(f"output_dir {directory} exists and is no run of tlora. Choose another, so that nothing of it is lost")
    if resume:
        _check_same_order(_read_run_file(earlier), run)
        durable.truncate_rows(directory / "run.jsonl", lambda _: True)  # a kill may have torn its last line
    elif overwrite:
        for job in _read_run_file(earlier)["jobs"]:
            shutil.rmtree(directory / job["name"], ignore_errors=True)
        for name in ("run.jsonl", "report.html"):  # run.json is replaced: without it nobody would know this for a run
            (directory / name).unlink(missing_ok=True)
    else:
        raise ConfigError(
            f"output_dir {directory} holds an earlier run. Continue it with --resume, replace it with --overwrite, or choose another"
        )


def _read_run_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        specs = RunSpec.model_validate({key: value for key, value in content.items() if key in RunSpec.model_fields})
        return json.loads(specs.model_dump_json())
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({str(error).splitlines()[0]}). Use a new output_dir; the adapters there stay") from None


def _check_same_order(before: dict[str, Any], run: RunSpec) -> None:
    """A resumed run must be the same run, or its adapters would be of nobody's order. New jobs may be added."""
    now = json.loads(run.model_dump_json())
    changed = [
        f"{key} was {before[key]!r} and is {now[key]!r}" for key in ("base_model", "dtype", "deterministic") if before[key] != now[key]
    ]
    jobs = {job["name"]: job for job in before["jobs"]}
    for job in now["jobs"]:
        old = jobs.get(job["name"], job)
        changed += [
            f"{job['name']}: {key} was {old.get(key)!r} and is {value!r}"
            for key, value in job.items()
            if key not in _FREE_TO_CHANGE and old.get(key) != value
        ]
    if changed:
        raise ConfigError(
            "resume: this is not the run that was interrupted: " + "; ".join(changed) + ". Put it back, or use a new output_dir"
        )


def write_job_file(directory: Path, job: JobSpec) -> None:
    """`job.json`: the resolved order beside its adapter."""
    durable.write_file(directory / "job.json", job.model_dump_json(indent=1) + "\n")


def write_run_file(directory: Path, run: RunSpec, facts: dict[str, Any]) -> None:
    """`run.json`: the resolved run with its status and the versions it ran with."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    versions |= {"tlora": __version__, "python": platform.python_version()}
    content = json.loads(run.model_dump_json()) | {"versions": versions} | facts
    durable.write_file(directory / "run.json", json.dumps(content, indent=1) + "\n")


def find_checkpoint(directory: Path, note: Callable[[str], None]) -> Path | None:
    """The job's newest whole checkpoint; its metrics are cut back to it. None, and no metrics, when there is none."""
    durable.clean(directory)
    found, notes = durable.newest_verified(directory)
    for line in notes:
        note(line)
    step, evaluated = -1, -1
    if found is not None:
        progress = Progress(**json.loads((found / "state.json").read_text(encoding="utf-8")))
        step, evaluated = progress.step, progress.evaluated_step

    def keep(row: dict[str, Any]) -> bool:
        return row.get("step", 0) <= (evaluated if "eval_loss" in row else step)

    if (directory / "metrics.jsonl").is_file():
        durable.truncate_rows(directory / "metrics.jsonl", keep)
    return found


def spec_of(directory: Path) -> JobSpec:
    """The resolved order beside an adapter."""
    return JobSpec.model_validate_json((directory / "job.json").read_text(encoding="utf-8"))
