"""Bugs of the engine's own path, from a job's data to its optimizer step: functions and methods that stand in the place of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tlora.adapters.adamw import learning_rate as healthy_learning_rate
from tlora.batching.pack import MicroBatch
from tlora.batching.pack import pack as healthy_pack
from tlora.data.order import global_batch as healthy_global_batch
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.job import TrainConfig
from tlora.store.checkpoint import _read_moments as healthy_read_moments
from tlora.store.checkpoint import _read_state as healthy_read_state
from tlora.supermodel.batch import BatchRow
from tlora.supermodel.job_by_job import JobByJobOptimizer, JobByJobSteps
from tlora.supermodel.optimizer_steps import QueuedSteps, Stepping

healthy_micro_batch = Engine.run_micro_batch
healthy_row = JobRun.batch_row
healthy_measure = JobByJobOptimizer.measure
healthy_update = JobByJobSteps.update


def only_the_last_micro_batch(self: Engine) -> MicroBatch | None:
    packed = healthy_micro_batch(self)
    for name, run in self.runs.items():
        if not run.flow.complete:
            self.model.zero_grad_of(name)
    return packed


def pack_as_fits_best(flows: Any, budget: int, in_order: bool) -> MicroBatch | None:
    return healthy_pack(flows, budget, in_order=False)


def keep_gradients(self: Any, job_id: str) -> None:
    """What a try alone has summed stays."""


class NormalizerOfAll:
    """One number for all jobs: that of the batch which was offered last."""

    last = 1.0

    def __get__(self, run: JobRun | None, owner: type) -> float:
        return self.last

    def __set__(self, run: JobRun, value: float) -> None:
        self.last = value


def dropout_by_the_place_in_the_queue(self: JobRun, row: Any) -> BatchRow:
    found = healthy_row(self, row)
    return replace(found, dropout_key=found.dropout_key and (self.spec.seed, self.progress.step, self.flow.pending_tokens))


def batch_of_the_step_before(step: int, *args: Any) -> Any:
    return healthy_global_batch(max(0, step - 1), *args)


def rate_of_the_next_step(config: TrainConfig, step: int, total_steps: int) -> float:
    return healthy_learning_rate(config, step + 1, total_steps)


def update_by_the_first_rule(self: JobByJobSteps) -> QueuedSteps:
    train = next(iter(self.due.values())).train if self.due else None
    return healthy_update(replace(self, due={name: replace(job, train=train) for name, job in self.due.items()}))  # type: ignore[type-var]


def _norm_of_all(steps: JobByJobSteps) -> Tensor:
    return torch.stack([verdict[0] for verdict in steps.verdicts.values()]).square().sum().sqrt()


def clip_by_the_norm_of_all(self: JobByJobOptimizer, due: Mapping[str, Stepping]) -> JobByJobSteps:
    steps = healthy_measure(self, due)
    for job_id, verdict in steps.verdicts.items():
        limit = due[job_id].train.max_grad_norm or 1e9
        steps.verdicts[job_id] = torch.stack([verdict[0], (limit / (_norm_of_all(steps) + 1e-6)).clamp(max=1.0)])
    return steps


def refuse_where_a_neighbour_must(self: JobByJobOptimizer, due: Mapping[str, Stepping]) -> JobByJobSteps:
    steps = healthy_measure(self, due)
    nothing = 0 * _norm_of_all(steps) if steps.verdicts else 0
    return replace(steps, verdicts={job_id: torch.stack([v[0] + nothing, v[1]]) for job_id, v in steps.verdicts.items()})


def moments_of_zero(*args: Any) -> dict[str, Tensor]:
    return {name: torch.zeros_like(moment) for name, moment in healthy_read_moments(*args).items()}


def state_without_updates(*args: Any) -> tuple[Any, dict[str, int]]:
    progress, counters = healthy_read_state(*args)
    return progress, counters | {"updates": 0}
