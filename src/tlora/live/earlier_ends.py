"""Jobs of an earlier run of the same command that have ended: taken from the disk, so that no worker loads them to find them done."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tlora.group.wall import Failure, attempt
from tlora.job import JobSpec
from tlora.json_file import read_object
from tlora.protocol import JobFinished
from tlora.store.job_result import JobResult
from tlora.store.run_directory import check_same_job, job_spec_in

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_LENGTH = ("max_steps", "num_train_epochs")


def earlier_ends(jobs: Iterable[JobSpec], directory: Path) -> dict[str, JobResult]:
    """Results of those of `jobs` that are done in `directory`, by name. Others, and what cannot be read, are for a worker to look at."""
    found: dict[str, JobResult] = {}
    for spec in jobs:
        result = attempt(_end_of, spec, directory / spec.name)
        if isinstance(result, JobResult):
            found[spec.name] = result
    return found


def _end_of(spec: JobSpec, directory: Path) -> JobResult | None:
    """None for a job that is not done, or was done as another order or for fewer steps."""
    if not all((directory / name).is_file() for name in (*_ADAPTER, "result.json")):
        return None
    result = JobResult(**read_object(directory / "result.json"))
    before = job_spec_in(read_object(directory / "job.json"))
    same = any(directory.glob("checkpoint-*")) and not isinstance(attempt(check_same_job, directory, spec), Failure)
    as_long = all(getattr(before, key) == getattr(spec, key) for key in _LENGTH)
    return result if result.status == "done" and same and as_long else None


def not_told(names: Iterable[str], events: Path) -> list[str]:
    """Those of `names` of whose end the log of events says nothing: they ended while no controller was there."""
    left = dict.fromkeys(names)
    mark = f'"{JobFinished.__name__}"'
    if left and events.is_file():
        with events.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if mark in line:
                    for name in [name for name in left if f'"{name}"' in line]:
                        del left[name]
    return list(left)
