"""Turns a planned job into one that can join: its run, with the state of its newest checkpoint or its start; or records its refusal.

Shared by `train`, where all jobs are known beforehand, and `worker`, where they come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlora import durable
from tlora.adapters.layout import AdapterLayout
from tlora.adapters.state import AdapterState
from tlora.errors import CheckpointError, ConfigError, DataError, ModelError
from tlora.group.isolation import Failure, try_call
from tlora.group.job_run import JobRun
from tlora.job import JobSpec
from tlora.objectives import compares_with_start
from tlora.planning.planned_job import PlannedJob
from tlora.planning.start import start_state
from tlora.store import checkpoint
from tlora.store.best_checkpoint import settle_best
from tlora.store.checkpoint import has_reference, read_reference, write_reference
from tlora.store.job_result import RESULT_FILE, JobResult, is_finished, read_result, saved_result, write_result
from tlora.store.run_directory import REFERENCE_KEY, check_same_job, find_checkpoint, names_reference, write_job_file
from tlora.wording.numbers import quantity

_NAME_IT = "Write `reference: base` on the job to say so, or use a new output_dir to compare with the adapter that it starts from"
Note = Callable[[str], None]


def open_run(
    job: PlannedJob, dtype: torch.dtype, directory: Path, resume: bool, note: Note, start: Future[AdapterState] | None = None
) -> tuple[JobRun, AdapterState]:
    """The job's run, and the state to join with, on the host in `dtype`: of its newest whole checkpoint in `directory` with `resume`,
    else its start, which may have been made ahead. `directory` is made, and gets its `job.json`.

    Raises TloraError, for a job with problems and for a checkpoint of another job, and any error that readers raise for damaged files:
    call it in `try_call`.
    """
    name = job.spec.name
    durable.make_directory(directory)
    if job.problems or job.data is None or job.layout is None:
        raise ConfigError("; ".join(job.problems))
    if resume:
        check_same_job(directory, job.spec)
    run = JobRun(job.spec, job.data.train, job.data.eval, job.replicas, job.weights, job.held)
    found = find_checkpoint(directory, note) if resume else None
    if found is None:
        state = start.result() if start else start_state(job.spec, job.layout, dtype)
    else:
        found, state = _load_newest(found, run, job.layout, dtype, note)
        note(f"{name}: goes on from {found}")
        run.progress = settle_best(job.spec, directory, run.progress, note)
    run.reference = _reference(run, state, directory, resumed=found is not None)
    before = found is not None and compares_with_start(job.spec) and run.reference is None
    if before:
        note(f"{name}: began with a version that took the bare base as reference, and goes on with it. {_NAME_IT}")
    if not run.progress.finished:  # before the order: what it was done with before must not pass for what this order came to
        (directory / RESULT_FILE).unlink(missing_ok=True)
    write_job_file(directory, job.spec, without=(REFERENCE_KEY,) if before else ())
    return run, state


def _reference(run: JobRun, state: AdapterState, directory: Path, *, resumed: bool) -> Callable[[], Tensor] | None:
    """Of a job that compares with its start: the start, kept in `directory` from the first time on. None where that is the bare base."""
    if not compares_with_start(run.spec) or run.progress.finished:
        return None
    if not resumed:
        write_reference(directory, state.layout, state.params)
        return lambda: state.params
    if not has_reference(directory) and not names_reference(directory):
        return None
    params = read_reference(directory, state.layout, state.params.dtype)
    return lambda: params


def _load_newest(found: Path, run: JobRun, layout: AdapterLayout, dtype: torch.dtype, note: Note) -> tuple[Path, AdapterState]:
    """The state in `found`, or, where that is another job's, in the newest older checkpoint that is this job's. Raises as for `found`."""
    try:
        return found, _load(found, run, layout, dtype, note)
    except (CheckpointError, ModelError, DataError) as error:
        name, directory = run.spec.name, found.parent
        for older in durable.older_verified(directory, found):
            state = try_call(_load, older, run, layout, dtype, note)
            if isinstance(state, Failure):
                continue
            while (newest := find_checkpoint(directory, note)) not in (None, older):
                assert newest is not None
                note(f"{name}: {newest.name} is not this job's, and set aside as {durable.set_aside(newest).name}: {error}")
            return older, state
        raise


def _load(found: Path, run: JobRun, layout: AdapterLayout, dtype: torch.dtype, note: Note) -> AdapterState:
    """The state in the checkpoint `found`; `run` is where that was."""
    state, progress = checkpoint.load(found, layout, dtype)
    data = run.spec.data
    read_anew = run.train.was_named(progress.data)
    if read_anew:
        note(f"{run.spec.name}: {found} was trained by an earlier version; its rows are read as this version reads them from here on")
    elif progress.data != run.data_key:
        raise DataError(f"{data.display_name}: is not the data that {found} was trained on. Put it back, or use a new output_dir")
    evaluated_before = run.evaluation is not None and run.evaluation.was_named(progress.eval_data)
    if progress.eval_data not in ("", run.eval_key) and not evaluated_before:  # "": an earlier version did not write it down
        evaluated = " + ".join(source.display_name for source in data.eval_sources)
        changed = f"{evaluated or data.display_name}: is not the data that {found} was evaluated on"
        raise DataError(f"{changed}, and losses of both would be mixed. Put it back, or use a new output_dir")
    if run.total_steps < progress.step:
        raise ConfigError(
            f"{found} has more than the {quantity(run.total_steps, 'step')} that {run.spec.name} shall have, and steps cannot "
            "be taken back. Raise max_steps or num_train_epochs, or use a new output_dir"
        )
    run.progress = replace(progress, data=run.data_key, eval_data=run.eval_key)
    run.progress = replace(run.progress, finished=progress.finished and run.exhausted)  # else it shall have more steps than when it ended
    return state


def refuse(spec: JobSpec, directory: Path, reason: str, settings: Mapping[str, Any], note: Note) -> JobResult:
    """The result of a job that cannot join, with the numbers of what it had come to before. `settings` as in `Recorder`.

    It is written to `directory`, unless the job was done there before: what it was done with stays.
    """
    earlier = read_result(directory)
    if is_finished(directory) and earlier is not None:
        result = replace(
            earlier, status="failed", reason=f"{reason}. What it came to before stays: {quantity(earlier.steps, 'step')}, and its adapter"
        )
    else:
        saved = saved_result(spec, directory, earlier.total_steps if earlier is not None else 0)
        result = replace(saved, status="failed", reason=reason, settings=dict(settings))
        write_result(directory, result, note)
    note(f"{spec.name} failed: {result.reason}")
    return result
