"""How one job ended: `result.json` in its directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

from pydantic import TypeAdapter

from tlora import durable
from tlora.adapters.peft import CONFIG_FILE, WEIGHTS_FILE
from tlora.group.isolation import Failure, try_call
from tlora.group.job_result import JobResult
from tlora.group.reports import TrainingProgress
from tlora.job import JobSpec
from tlora.json_file import read_object
from tlora.store.checkpoint import read_progress
from tlora.store.metrics import finite, finite_mean

RESULT_FILE = "result.json"


def result_of(spec: JobSpec, progress: TrainingProgress, directory: Path, total_steps: int) -> JobResult:
    """The result of a job in `directory` that was stopped at `progress`."""
    p, best = progress, spec.load_best_model_at_end
    return JobResult(
        name=spec.name,
        status="stopped",
        rank=spec.r,
        steps=p.step,
        total_steps=total_steps,
        train_loss_first=finite(p.loss_first),
        train_loss=finite(finite_mean(p.losses)),
        eval_loss_first=finite(p.eval_first),
        eval_loss=finite(p.best_eval if best else p.eval_last),
        eval_loss_best=finite(p.best_eval),
        best_step=p.best_step if p.best_step >= 0 else None,
        skipped_steps=p.skipped_steps,
        num_tokens=p.num_tokens,
        seconds=p.seconds,
        path=str(directory),
        sweep_of=spec.sweep_of,
    )


def saved_result(spec: JobSpec, directory: Path, total_steps: int = 0) -> JobResult:
    """The result of a job that is not running: "stopped" at its newest intact checkpoint, or at step 0 without one."""
    checkpoint = durable.find_verified(directory)
    progress = try_call(read_progress, checkpoint) if checkpoint is not None else TrainingProgress()
    if isinstance(progress, Failure):
        progress = TrainingProgress()
    return result_of(spec, progress, directory, spec.max_steps or total_steps)


def read_result(directory: Path) -> JobResult | None:
    """The job's `result.json`; None if it is missing or unreadable. Keys of other versions are ignored.

    The `path` is `directory`: the run may have been moved, or be resumed from elsewhere. Empty still means that the job did not begin.
    """
    known = {each.name for each in fields(JobResult)}
    try:
        content = read_object(directory / RESULT_FILE)
        result = TypeAdapter(JobResult).validate_python({key: value for key, value in content.items() if key in known})
        return replace(result, path=str(directory) if result.path else "")
    except (OSError, ValueError):
        return None


def is_finished(directory: Path) -> bool:
    """Whether the job in `directory` is done and its adapter is there."""
    result = read_result(directory)
    return result is not None and result.status == "done" and all((directory / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE))


def write_result(
    directory: Path, result: JobResult, note: Callable[[str], None], failpoint: durable.Failpoint = durable.no_failpoint
) -> None:
    """Write `result.json`; if that fails, the caller still has the result."""
    path = directory / RESULT_FILE

    def write() -> None:
        durable.make_directory(directory)
        durable.write_file(path, json.dumps(asdict(result), indent=1) + "\n", failpoint=failpoint)

    if isinstance(failed := try_call(write), Failure):
        note(f"{path}: {failed.reason}")
