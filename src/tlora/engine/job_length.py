"""Checks resumed jobs whose number of steps has changed: the effect on the learning rate, and when the change is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tlora import durable
from tlora.adapters.adamw import learning_rate
from tlora.data.order import epoch_size
from tlora.errors import ConfigError
from tlora.group.isolation import Failure, try_call
from tlora.group.job_run import stopped_early
from tlora.job import JobSpec
from tlora.planning.planned_job import PlannedJob
from tlora.store.checkpoint import read_progress
from tlora.store.run_directory import earlier_order
from tlora.wording.numbers import by_jobs, quantity


def check_lengths(jobs: Sequence[PlannedJob], directory: Path) -> list[str]:
    """Notes on jobs of the run in `directory` whose number of steps has changed. Raises ConfigError for a job that has already taken more
    steps than ordered now.

    Unreadable files are left to the opening of the job.
    """
    said: list[tuple[str, str]] = []
    too_short: list[str] = []
    for job in jobs:
        place = directory / job.spec.name
        earlier = try_call(earlier_order, place)
        if job.data is None or earlier is None or isinstance(earlier, Failure):
            continue
        before, now = (spec.total_steps(epoch_size(job.data.train.epoch)) for spec in (earlier, job.spec))
        found = durable.find_verified(place) if before != now else None
        progress = try_call(read_progress, found) if found is not None else None
        if progress is None or isinstance(progress, Failure):
            continue
        if now < progress.step:
            too_short.append(f"{job.spec.name} is at step {progress.step} and would end at step {now}")
        elif progress.finished and stopped_early(job.spec, progress):
            said.append(
                (
                    job.spec.name,
                    f"it stopped early at step {progress.step} and stays ended; {quantity(now, 'step changes', 'steps change')} nothing",
                )
            )
        else:
            said.append((job.spec.name, _describe(job.spec, before, now, progress.step)))
    if too_short:
        raise ConfigError(
            f"resume: {'; '.join(too_short)}, and steps cannot be taken back. Raise max_steps or num_train_epochs to at least the step "
            "where it is, or use a new output_dir"
        )
    return by_jobs(said)


def _describe(spec: JobSpec, before: int, now: int, done: int) -> str:
    length = f"{quantity(now, 'step')} instead of {before}"
    warmup_stays = spec.warmup_count(before) == spec.warmup_count(now)
    if done == 0 or spec.lr_scheduler_type == "constant" or (spec.lr_scheduler_type == "constant_with_warmup" and warmup_stays):
        return length
    note = f"{length}: from step {done + 1} on the learning rate follows the {spec.lr_scheduler_type} schedule over {quantity(now, 'step')}"
    if done < now:
        note += f" ({learning_rate(spec, done, now):.3g} there; {learning_rate(spec, done, before):.3g} over {before})"
    return (
        f"{note}, as in transformers' Trainer. Steps up to {done} followed the one over {before}, so the result is not that "
        f"of {quantity(now, 'step')} from the start"
    )
