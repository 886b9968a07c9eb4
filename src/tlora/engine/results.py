"""How a run's jobs ended, by name, and what is said of those whose turn did not come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tlora.job import JobSpec, RunSpec
from tlora.json_file import read_object
from tlora.store.job_result import JobResult, write_result


class Results(dict[str, JobResult]):
    """Results by job name. `report` is the page; `signal_number` says which signal ended the run early, if one did."""

    report: Path | None = None
    signal_number: int | None = None

    @property
    def status(self) -> str:
        """The worst that happened to a job: "failed", "stopped", or "done"."""
        ended = {result.status for result in self.values()}
        return next((status for status in ("failed", "stopped") if status in ended), "done")


def all_results(run: RunSpec, ended: Mapping[str, JobResult], received: Sequence[int], note: Callable[[str], None]) -> Results:
    """In the order of the file; `received` are the signals that ended the run early. A job that never started is "stopped"."""
    results = Results()
    for spec in run.jobs:
        results[spec.name] = ended.get(spec.name) or _untouched(spec, run, note)
    results.signal_number = received[0] if received else None
    return results


def _untouched(spec: JobSpec, run: RunSpec, note: Callable[[str], None]) -> JobResult:
    """A job whose turn did not come: as an earlier run left it, or interrupted before it began."""
    directory = Path(run.output_dir) / spec.name
    try:
        return JobResult(**read_object(directory / "result.json"))
    except (OSError, ValueError, TypeError):
        settings = swept(spec, run.jobs)
        result = JobResult(spec.name, "stopped", "interrupted before it began", spec.r, sweep_of=spec.sweep_of, settings=settings)
        write_result(directory, result, note)
        return result


def swept(spec: JobSpec, jobs: Sequence[JobSpec]) -> dict[str, Any]:
    """The fields in which the jobs of one sweep differ, with this job's values."""
    if spec.sweep_of is None:
        return {}
    family = [job.model_dump() for job in jobs if job.sweep_of == spec.sweep_of]
    mine = spec.model_dump()
    found = {key: mine[key] for key in mine if key not in ("name", "data") and any(job[key] != mine[key] for job in family)}
    return found | {key: mine["data"][key] for key in mine["data"] if any(job["data"][key] != mine["data"][key] for job in family)}
