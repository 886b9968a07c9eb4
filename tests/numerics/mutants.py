"""Ten bugs that systems of this kind have really had, each planted by replacing one function while the promises are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from tlora.adapters.adamw import StepStats, adamw_step
from tlora.adapters.bank import AdapterBank
from tlora.adapters.state import AdapterState, init_state
from tlora.job import LoraConfig, TrainConfig
from tlora.kernels import multi_lora
from tlora.kernels.reference import Segments, _dropped
from tlora.supermodel import attention, batch
from tlora.supermodel.batch import BatchRow, PackedBatch
from tlora.supermodel.job_by_job import JobByJobSteps
from tlora.supermodel.lora_linear import ActiveBatch
from tlora.supermodel.optimizer_steps import QueuedSteps
from tlora.supermodel.supermodel import SuperModel

Plant = Callable[[], AbstractContextManager[None]]


@contextmanager
def _replaced(*changes: tuple[object, str, object]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, new in changes:
            stack.enter_context(patch.object(owner, name, new))
        yield


def global_clip() -> AbstractContextManager[None]:
    """One norm over the gradients of all jobs that step."""

    def optim_step(self: SuperModel, job_ids: Iterable[str]) -> dict[str, StepStats]:
        grads = {job_id: self.bank.take_grad(job_id) for job_id in job_ids}
        norm = float(torch.cat([torch.zeros(1), *(g.float() for g in grads.values())]).norm())
        stats: dict[str, StepStats] = {}
        for job_id, grad in grads.items():
            resident = self._residents[job_id]
            limit = resident.train.max_grad_norm
            if limit and norm > limit:
                grad.mul_(limit / (norm + 1e-6))
            stats[job_id] = adamw_step(resident.state, grad, resident.train, resident.total_steps)
            self.bank.write(job_id, resident.state.params)
        return stats

    return _replaced((SuperModel, "optim_step", optim_step))


def global_rng() -> AbstractContextManager[None]:
    """Dropout from one generator for all, seeded once at the start, as `seed_everything` does."""
    generator, join = np.random.default_rng(0), SuperModel.join

    def joining(self: SuperModel, *args: Any) -> None:
        nonlocal generator
        generator = generator if self.bank.jobs() else np.random.default_rng(0)
        join(self, *args)

    def keys(_seed: int, _step: int, _sample: int, num_tokens: int) -> np.ndarray:
        return generator.integers(-(2**31), 2**31, num_tokens).astype(np.int32)

    return _replaced((SuperModel, "join", joining), (batch, "token_keys", keys))


def shared_step_counter() -> AbstractContextManager[None]:
    """One count of optimizer steps for bias correction and schedule of all residents."""
    steps, join, update = 0, SuperModel.join, JobByJobSteps.update

    def joining(self: SuperModel, *args: Any) -> None:
        nonlocal steps
        steps = steps if self.bank.jobs() else 0
        join(self, *args)

    def stepping(self: JobByJobSteps) -> QueuedSteps:
        nonlocal steps
        for job in self.due.values():
            job.state.step = job.state.updates = steps
            steps += 1
        return update(self)

    return _replaced((SuperModel, "join", joining), (JobByJobSteps, "update", stepping))


def mask_multiply() -> AbstractContextManager[None]:
    """Each adapter runs over all tokens, and a mask of zeros and ones picks its own: right until a neighbour holds NaN."""

    def forward_(y: Tensor, x: Tensor, a: Tensor, b: Tensor, segments: Segments, keys: Tensor | None = None, key: int = 0) -> list[Tensor]:
        shrunk: list[Tensor] = []
        for s in segments:
            mask = torch.zeros(len(x), 1, dtype=x.dtype)
            mask[s.t0 : s.t1] = 1
            whole = replace(s, t0=0, t1=len(x))
            inputs = x
            if s.dropout and keys is not None:
                inputs, _ = _dropped(x, keys, key, whole)
            s_tr = inputs @ a[s.r0 : s.r1].t()
            y.add_((s_tr * mask) @ b[s.r0 : s.r1], alpha=s.scale)
            shrunk.append(s_tr[s.t0 : s.t1])
        return shrunk

    return _replaced((multi_lora, "lora_forward_", forward_))


def global_token_mean() -> AbstractContextManager[None]:
    """The loss of a micro-batch is divided by all trained tokens in it, whoever they belong to."""
    collate = batch.collate

    def mutated(rows: Sequence[BatchRow], device: torch.device | str = "cpu", pad_to: int = 0) -> PackedBatch:
        total = float(sum(row.loss_weights[1:].sum() for row in rows)) or 1.0
        return collate([replace(row, normalizer=total) for row in rows], device, pad_to)

    return _replaced((batch, "collate", mutated))


def off_by_one_segment() -> AbstractContextManager[None]:
    """The first token of each segment goes without its adapter."""
    segments = ActiveBatch.segments

    def mutated(self: ActiveBatch, module: str) -> Segments:
        return tuple(replace(s, t0=min(s.t0 + 1, s.t1)) for s in segments(self, module))

    return _replaced((ActiveBatch, "segments", mutated))


def unmasked_weight_decay() -> AbstractContextManager[None]:
    """A job's step decays the weights of every resident."""
    healthy = SuperModel.optim_step

    def optim_step(self: SuperModel, job_ids: Iterable[str]) -> dict[str, StepStats]:
        found = healthy(self, job_ids)
        for job_id, stats in found.items():
            decay = stats.learning_rate * self._residents[job_id].train.weight_decay
            for other in self.bank.jobs():
                if other != job_id and decay:
                    state = self.state(other)
                    state.params = state.params * (1 - decay)
                    self.bank.write(other, state.params)
        return found

    return _replaced((SuperModel, "optim_step", optim_step))


@contextmanager
def packed_attention_row() -> Iterator[None]:
    """All samples in one attention row under a block-diagonal mask: right until a neighbour's value is NaN."""

    def row(_: object, query: Tensor, key: Tensor, value: Tensor, *args: Any, sequence_lengths: tuple[int, ...] = (), **more: Any) -> Any:
        owner = torch.repeat_interleave(torch.tensor(sequence_lengths))
        visible = (owner[:, None] == owner[None, :]).tril()
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        scores = (query @ key.transpose(2, 3)) * more["scaling"]
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return (weights @ value).transpose(1, 2), None

    try:
        with patch.object(attention, "packed_attention", row):
            attention.register()
            yield
    finally:
        attention.register()


def skipped_zero_grad() -> AbstractContextManager[None]:
    """A step forgets to forget its gradient."""

    def take_grad(self: AdapterBank, job_id: str) -> Tensor:
        grad = torch.empty(self._layouts[job_id].numel, dtype=self.sum_dtype)
        views = [view for _, a, b in self._layouts[job_id].views(grad) for view in (a, b)]
        torch._foreach_copy_(views, self._rows(job_id, "da_RK", "db_RN"))
        return grad

    return _replaced((AdapterBank, "take_grad", take_grad))


def stale_optimizer() -> AbstractContextManager[None]:
    """A newcomer finds the Adam moments of the one who had a slot of this shape before."""
    join, leave, old = SuperModel.join, SuperModel.leave, dict[int, AdapterState]()

    def joining(
        self: SuperModel, job_id: str, lora: LoraConfig, train: TrainConfig, total: int | None = None, state: AdapterState | None = None
    ) -> None:
        layout = self.layout(lora)
        if state is None and layout.numel in old:
            stale, state = old[layout.numel], init_state(layout, train.seed, self.bank.sum_dtype)
            state.exp_avg, state.exp_avg_sq = stale.exp_avg.clone(), stale.exp_avg_sq.clone()
        join(self, job_id, lora, train, total, state)

    def leaving(self: SuperModel, job_id: str) -> AdapterState:
        state = leave(self, job_id)
        old[state.layout.numel] = state
        return state

    return _replaced((SuperModel, "join", joining), (SuperModel, "leave", leaving))


@dataclass(frozen=True)
class Mutant:
    name: str
    plant: Plant


MUTANTS = tuple(
    Mutant(plant.__name__.replace("_", " "), plant)
    for plant in (
        global_clip,
        global_rng,
        shared_step_counter,
        mask_multiply,
        global_token_mean,
        off_by_one_segment,
        unmasked_weight_decay,
        packed_attention_row,
        skipped_zero_grad,
        stale_optimizer,
    )
)
