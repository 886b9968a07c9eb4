"""The results of a run's jobs by name, including those that did not start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tlora.job import JobSpec, RunSpec
from tlora.store.job_result import JobResult, read_result, saved_result, write_result


class Results(dict[str, JobResult]):
    """Results by job name. `report` is the page; `signal_number` says which signal ended the run early, if one did."""

    report: Path | None = None
    signal_number: int | None = None

    @property
    def status(self) -> str:
        """The worst that happened to a job: "failed", "stopped", or "done"."""
        ended = {result.status for result in self.values()}
        return next((status for status in ("failed", "stopped") if status in ended), "done")


def all_results(
    run: RunSpec,
    ended: Mapping[str, JobResult],
    received: Sequence[int],
    note: Callable[[str], None],
    total_steps: Mapping[str, int] = MappingProxyType({}),
) -> Results:
    """In the order of the file; `received` are the signals that ended the run early. A job that has not ended is "stopped". `total_steps`
    of jobs where they are known.
    """
    results = Results()
    for spec in run.jobs:
        results[spec.name] = ended.get(spec.name) or _not_ended(spec, run, note, total_steps.get(spec.name, 0))
    results.signal_number = received[0] if received else None
    return results


def _not_ended(spec: JobSpec, run: RunSpec, note: Callable[[str], None], total_steps: int) -> JobResult:
    """The result of a job that did not start, as an earlier run left it; or of one whose process died."""
    directory = Path(run.output_dir) / spec.name
    if (earlier := read_result(directory)) is not None:
        return earlier
    result = saved_result(spec, directory, total_steps)
    if (directory / f"checkpoint-{result.steps}").is_dir():
        reason = f"it did not come to its end; checkpoint-{result.steps} continues with resume"
    elif (directory / "job.json").is_file():
        reason = "it ended before its first checkpoint; it begins at step 0 with resume"
    else:
        result, reason = replace(result, path=""), "interrupted before it began"
    result = replace(result, reason=reason, settings=swept(spec, run.jobs))
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
