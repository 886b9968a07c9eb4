"""The state of a resumed run's jobs after the earlier run: finished jobs stay finished, and the others are described."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tlora.group.isolation import try_call
from tlora.job import JobSpec, RunSpec
from tlora.planning.start import adopt_adapter_config
from tlora.store.job_result import JobResult, is_finished, read_result
from tlora.store.run_directory import check_same_job, earlier_order, read_run_file
from tlora.wording.numbers import by_jobs, names_text


@dataclass(frozen=True)
class EarlierEnd:
    """A job that is done with all the steps that are asked for. `spec`: its order, with the shape of the adapter that it started from."""

    spec: JobSpec
    result: JobResult


def earlier_ends(jobs: Iterable[JobSpec], directory: Path) -> dict[str, EarlierEnd]:
    """Those of `jobs` that are done in `directory`, by name: their data is not looked at. Others, and what cannot be read, are opened."""
    found = {spec.name: try_call(_end_of, spec, directory / spec.name) for spec in jobs}
    return {name: end for name, end in found.items() if isinstance(end, EarlierEnd)}


def _end_of(spec: JobSpec, directory: Path) -> EarlierEnd | None:
    """None for a job that is not done, or shall have another number of steps. Raises ConfigError for one that was another order."""
    result, before = read_result(directory), earlier_order(directory)
    if result is None or before is None or not is_finished(directory):
        return None
    if spec.adapter_path:
        spec, _ = adopt_adapter_config(spec, directory)
    check_same_job(directory, spec)
    if spec.max_steps:
        as_long = result.total_steps == spec.max_steps
    else:
        as_long = not before.max_steps and before.num_train_epochs == spec.num_train_epochs
    return EarlierEnd(spec, result) if as_long else None


def with_ends(run: RunSpec, ends: Mapping[str, EarlierEnd]) -> RunSpec:
    """`run` with the recorded orders of jobs that have ended."""
    return run.model_copy(update={"jobs": [ends[job.name].spec if job.name in ends else job for job in run.jobs]})


def to_plan(run: RunSpec, ended: Iterable[str]) -> RunSpec:
    """`run` without the jobs that have `ended`. A deterministic run is planned with all of them: its token budget follows from all."""
    gone = set(ended)
    return run if run.deterministic else run.model_copy(update={"jobs": [job for job in run.jobs if job.name not in gone]})


def with_plans(run: RunSpec, planned: Iterable[JobSpec]) -> RunSpec:
    """`run` with the orders of the `planned` jobs as planning has them: with the shapes of the adapters that they start from."""
    by_name = {spec.name: spec for spec in planned}
    return run.model_copy(update={"jobs": [by_name.get(job.name, job) for job in run.jobs]})


def describe_resume(run: RunSpec, ends: Mapping[str, EarlierEnd]) -> list[str]:
    """Describe a resume before anything is loaded: which jobs are done, begin at step 0, are new, or are left out."""
    directory, names = Path(run.output_dir), [job.name for job in run.jobs]
    file = directory / "run.json"
    before = {job["name"] for job in read_run_file(file)["jobs"]} if file.is_file() else set[str]()
    left_out = sorted(name for name in before - set(names) if (directory / name).is_dir())
    lines = [f"{names_text(list(ends))}: done before, and not trained again"] if ends else []
    said: list[tuple[str, str]] = []
    for name in names:
        if name in ends or any((directory / name).glob("checkpoint-*")) or is_finished(directory / name):
            continue
        new = " (not a job of the earlier run)" if before and name not in before else ""
        close = difflib.get_close_matches(name, left_out, n=1) if new else []
        meant = f". The earlier run has a job {close[0]!r}, which is left out now: is this its name misspelt?" if close else ""
        said.append((name, f"nothing to resume: begins at step 0{new}{meant}"))
    lines += by_jobs(said)
    if left_out:
        lines.append(f"{names_text(left_out)}: in {directory}, but not in the jobs file: left out, and kept as before")
    return lines
