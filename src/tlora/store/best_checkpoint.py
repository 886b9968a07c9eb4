"""The checkpoint of a job's best evaluation, which `load_best_model_at_end` hands over: what to do if it is missing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tlora import durable
from tlora.adapters.peft import CONFIG_FILE, WEIGHTS_FILE
from tlora.group.reports import TrainingProgress
from tlora.job import JobSpec
from tlora.manifest import find_damage
from tlora.store.job_result import is_finished, read_result

_ADAPTER = (CONFIG_FILE, WEIGHTS_FILE)


def settle_best(spec: JobSpec, directory: Path, p: TrainingProgress, note: Callable[[str], None]) -> TrainingProgress:
    """`p` with a best evaluation whose checkpoint is intact, or with none.

    If the best checkpoint of `p` is missing and the job's directory still holds its adapter, the adapter is copied back; otherwise the
    best of the evaluations with an intact checkpoint replaces it.
    """
    if not spec.load_best_model_at_end or p.best_step < 0:
        return p
    best = _checkpoint(directory, p.best_step)
    if p.best_step > 0 and _is_whole(best):
        return p
    lost = f"{spec.name}: {best}, its best evaluation (loss {p.best_eval:.6g}), is gone or damaged"
    result = read_result(directory)
    if p.best_step > 0 and is_finished(directory) and result is not None and result.best_step == p.best_step:
        durable.write_directory(best, lambda scratch: _copy_adapter(directory, scratch))
        note(f"{lost}; its adapter is still in {directory}, and stays the best until an evaluation is better")
        return p
    losses = _eval_losses(directory, p.step)
    left = {step: loss for step, loss in losses.items() if step > 0 and _is_whole(_checkpoint(directory, step))}
    if not left:
        if p.best_step > 0:
            note(f"{lost}, and no other evaluation has a checkpoint: the best is that of the evaluations to come, or the last step")
        return replace(p, best_eval=None, best_step=-1, evals_without_gain=0)
    step = min(left, key=lambda each: (left[each], each))
    if p.best_step > 0:
        note(f"{lost}; the best of what is left is checkpoint-{step} (loss {left[step]:.6g})")
    return replace(p, best_eval=left[step], best_step=step, evals_without_gain=sum(each > step for each in losses))


def _checkpoint(directory: Path, step: int) -> Path:
    return directory / f"checkpoint-{step}"


def _is_whole(checkpoint: Path) -> bool:
    """Whether the files that are handed over are intact."""
    return checkpoint.is_dir() and find_damage(checkpoint, only=_ADAPTER) is None


def _copy_adapter(directory: Path, scratch: Path) -> None:
    for name in _ADAPTER:
        durable.link_file(directory / name, scratch / name)


def _eval_losses(directory: Path, last: int) -> dict[int, float]:
    """Finite losses of the evaluations up to the step `last`, by step."""
    losses: dict[int, float] = {}
    with suppress(OSError):
        for line in (directory / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                row = json.loads(line)
                step, loss = int(row["step"]), float(row["eval_loss"])
                if step <= last and math.isfinite(loss):
                    losses[step] = loss
    return losses
