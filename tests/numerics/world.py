"""A small world to train jobs in at the super-model's level: any jobs, any packing, any joining, leaving and pausing.

It stands where the engine stands, with a packing that is random instead of fair, so that what holds here holds for every packing.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.tiny import make_model
from tests.tolerances import relative_error
from tlora.adapters.peft import WEIGHTS_FILE, save_adapter
from tlora.adapters.state import AdapterState, init_state
from tlora.data.dataset import Sample
from tlora.errors import ConfigError
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel import batch as batches
from tlora.supermodel.batch import BatchRow
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

WIDE = (("hidden_size", 256), ("intermediate_size", 320), ("num_hidden_layers", 1))
"""Wide enough that a matrix product's bits depend on how many rows it has; at width 64 they are equal by luck."""


@dataclass(frozen=True)
class Job:
    """One job, and when it comes, pauses and goes, counted in micro-batches of the world (and for `pause_after`, in own steps)."""

    name: str
    lora: LoraConfig
    train: TrainConfig
    samples: tuple[Sample, ...]
    steps: int
    join_at: int = 0
    pause_after: int | None = None
    pause_for: int = 0
    spoil: Callable[[AdapterState], None] | None = None  # done to the fresh adapter before it joins

    def batch(self, step: int) -> list[int]:
        """Indices of the samples of a step; a job without samples steps on nothing."""
        size = self.train.batch_size if self.samples else 0
        return [(step * size + i) % len(self.samples) for i in range(size)]

    def normalizer(self, step: int) -> float:
        return max(1e-30, float(sum(self.samples[i].loss_weights[1:].sum(dtype=np.float64) for i in self.batch(step))))

    def row(self, step: int, index: int) -> BatchRow:
        sample = self.samples[index]
        return BatchRow(self.name, sample.input_ids, sample.loss_weights, self.normalizer(step), (self.train.seed, step, index))


@dataclass
class Running:
    """A job on its way: what it still has to take of its global batch, and what came of it."""

    job: Job
    left: list[int] = field(default_factory=list)
    step: int = 0
    away_until: int = 0
    state: AdapterState | None = None
    resident: bool = False
    losses: list[float] = field(default_factory=list)
    loss_sum: float = 0.0
    error: Exception | None = None  # why it was taken out


@dataclass(frozen=True)
class Trained:
    """What a job became: its state, the sha256 of its adapter file, its mean loss at each step, and why it was taken out."""

    state: AdapterState
    sha256: str
    losses: tuple[float, ...]
    error: Exception | None = None

    def delta(self) -> list[Tensor]:
        """scale * B @ A of each linear, and an embedding's trained rows, in fp64."""
        parts = self.state.layout.views(self.state.params.detach())
        return [a.double() if s.tokens else s.scale * (b.double().t() @ a.double()) for s, a, b in parts]


@lru_cache(maxsize=4)
def super_model(family: str = "llama", dtype: torch.dtype = torch.float32, changes: tuple[tuple[str, object], ...] = WIDE) -> SuperModel:
    """A super-model of a random base; shared by tests, which leave it without jobs and so, by our promise, without a trace."""
    return SuperModel(make_base(make_model(family, dtype, **dict(changes)), family))  # type: ignore[arg-type]


def train(model: SuperModel, jobs: Sequence[Job], packing_seed: int = 0, deterministic: bool = True) -> dict[str, Trained]:
    """Train `jobs` in one world whose packing is drawn from `packing_seed`."""
    model.deterministic = deterministic
    rng = np.random.default_rng(packing_seed)
    world = [Running(job) for job in jobs]
    try:
        for tick in range(10_000):
            active = [run for run in world if _present(model, run, tick)]
            if active:
                _micro_batch(model, active, rng, tick)
            elif all(run.error or run.step == run.job.steps for run in world):
                return {run.job.name: _finish(run) for run in world}
        raise AssertionError("the world did not end")
    finally:
        for run in world:
            if run.job.name in model.bank:
                model.leave(run.job.name)


def train_alone(model: SuperModel, job: Job, deterministic: bool = True) -> Trained:
    """One job, each global batch as one micro-batch, nobody else, no pause."""
    alone = replace(job, join_at=0, pause_after=None)
    return train(model, [alone], packing_seed=-1 % 2**32, deterministic=deterministic)[job.name]


def _present(model: SuperModel, run: Running, tick: int) -> bool:
    """Whether the job takes part in this micro-batch; joins it when its time has come."""
    job = run.job
    if run.error or run.step == job.steps or tick < max(job.join_at, run.away_until):
        return False
    if not run.resident:
        if job.spoil and run.state is None:
            run.state = init_state(model.layout(job.lora), job.train.seed, model.bank.sum_dtype)
            job.spoil(run.state)
        try:
            model.join(job.name, job.lora, job.train, job.steps, run.state)
        except ConfigError as error:  # weights that are not finite: it is out before it was in
            run.error = error
            return False
        run.resident = True
    if not run.left:
        run.left = job.batch(run.step)
    return True


def _micro_batch(model: SuperModel, active: list[Running], rng: np.random.Generator, tick: int) -> None:
    order = rng.permutation(len(active))
    takes = {run.job.name: int(rng.integers(0, len(run.left) + 1)) for run in active}
    if not any(takes.values()):
        takes = {run.job.name: len(run.left) for run in active}
    rows = [row for i in order for row in _take(active[i], takes[active[i].job.name])]
    try:
        losses = model.forward_backward(batches.collate(rows, model.device, int(rng.integers(0, 96))))
    except Exception:
        _take_out_guilty(model, [run for run in active if takes[run.job.name]], rows)
        return
    for run in active:
        if takes[run.job.name]:
            run.loss_sum += float(losses[run.job.name].loss_sum)
    done = [run for run in active if not run.left]
    model.optim_step([run.job.name for run in done])
    for run in done:
        run.losses, run.loss_sum, run.step = [*run.losses, run.loss_sum / run.job.normalizer(run.step)], 0.0, run.step + 1
        if run.step == run.job.steps or run.step == run.job.pause_after:
            run.state, run.resident, run.away_until = model.leave(run.job.name), False, tick + 1 + run.job.pause_for


def _take_out_guilty(model: SuperModel, present: list[Running], rows: list[BatchRow]) -> None:
    """A micro-batch raised: try each job alone, take out those that raise again, and let the others start their global batch over."""
    for run in present:
        model.zero_grad_of(run.job.name)
        try:
            model.forward_backward(batches.collate([row for row in rows if row.job_id == run.job.name], model.device))
        except Exception as error:
            run.error, run.state, run.resident = error, model.leave(run.job.name), False
        else:
            model.zero_grad_of(run.job.name)
            run.left, run.loss_sum = run.job.batch(run.step), 0.0
    if not any(run.error for run in present):
        raise AssertionError("a micro-batch raised, and none of its jobs does alone")


def _take(run: Running, count: int) -> Iterable[BatchRow]:
    taken, run.left = run.left[:count], run.left[count:]
    return [run.job.row(run.step, index) for index in taken]


def _finish(run: Running) -> Trained:
    assert run.state is not None
    return Trained(run.state, adapter_sha256(run.state, run.job.lora), tuple(run.losses), run.error)


def adapter_sha256(state: AdapterState, lora: LoraConfig) -> str:
    """sha256 of the `adapter_model.safetensors` that this adapter would be saved as."""
    with tempfile.TemporaryDirectory() as directory:
        save_adapter(Path(directory), state.layout, state.params, lora, "base")
        return hashlib.sha256((Path(directory) / WEIGHTS_FILE).read_bytes()).hexdigest()


def delta_error(found: Sequence[Tensor], true: Sequence[Tensor]) -> float:
    """Relative Frobenius error of all modules' weight changes taken together; there must be a change."""
    assert len(found) == len(true)
    assert any(bool(d.any()) for d in true), "nothing was trained, so there is nothing to compare"
    return relative_error(torch.cat([d.flatten() for d in found]), torch.cat([d.flatten() for d in true]))
