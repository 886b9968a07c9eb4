"""From a planned job to one that can join: its run, with the state of its newest checkpoint or of its start; or its refusal on disk.

Shared by `train`, where all jobs are known beforehand, and `worker`, where they come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tlora.adapters.state import AdapterState, init_state
from tlora.engine import checkpoint
from tlora.engine.job_run import JobRun
from tlora.engine.plan import PlannedJob, start_state
from tlora.engine.recorder import JobResult, write_result
from tlora.engine.run_directory import find_checkpoint
from tlora.errors import ConfigError, DataError
from tlora.job import JobSpec
from tlora.supermodel.supermodel import SuperModel

Note = Callable[[str], None]


def open_run(job: PlannedJob, model: SuperModel, directory: Path, resume: bool, note: Note) -> tuple[JobRun, AdapterState]:
    """The job's run, and the state to join with, on the host: of its newest whole checkpoint in `directory` with `resume`, of
    `adapter_path`, or a fresh one. The model is asked what it has and not touched.

    Raises TloraError, for a job with problems as for a checkpoint that is not its own, and OSError.
    """
    name = job.spec.name
    if job.problems or job.data is None or job.layout is None:
        raise ConfigError("; ".join(job.problems))
    run = JobRun(job.spec, directory, job.data.train, job.data.eval)
    found = find_checkpoint(directory, note) if resume else None
    if found is None:
        return run, start_state(job.spec, model, job.layout) or init_state(job.layout, job.spec.seed, model.bank.sum_dtype)
    state, run.progress = checkpoint.load(found, job.layout, model.bank.sum_dtype)
    if run.progress.data != run.data_key:
        raise DataError(f"{job.spec.data.path}: is not the data that {found} was trained on. Put it back, or use a new output_dir")
    if run.progress.eval_data not in ("", run.eval_key):  # "": an earlier version did not write it down
        changed = f"{job.spec.data.eval_path or job.spec.data.path}: is not the data that {found} was evaluated on"
        raise DataError(f"{changed}, and losses of both would be mixed. Put it back, or use a new output_dir")
    run.progress.eval_data = run.eval_key
    note(f"{name}: goes on from {found}")
    return run, state


def refuse(spec: JobSpec, directory: Path, reason: str, settings: Mapping[str, Any], note: Note) -> JobResult:
    """The result, also in `directory`, of a job that cannot join. `settings` as in `Recorder`."""
    result = JobResult(spec.name, "failed", reason, spec.r, path=str(directory), sweep_of=spec.sweep_of, settings=dict(settings))
    write_result(directory, result, note)
    note(f"{spec.name} failed: {reason}")
    return result
