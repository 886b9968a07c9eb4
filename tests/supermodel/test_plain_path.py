"""The plain path as a GPU runs it, in chunks and with one attention for all samples, on a CPU: equal to run by run; nobody's NaN leaks;
the number of operator calls depends on no sample, and none of them waits for the device.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny import FAMILIES, make_model, make_samples
from tests.tolerances import TRAINED, assert_close, relative_error
from tlora.adapters.state import init_state
from tlora.job import LoraConfig, TrainConfig
from tlora.objectives import Dpo
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.job_by_job import make_queued_optimizer
from tlora.supermodel.load import make_base
from tlora.supermodel.plain_path import chunk, groups_on
from tlora.supermodel.supermodel import SuperModel

CPU = torch.device("cpu")
SPOILT = 130  # a token that no other sample has
LORA = {
    "a": LoraConfig(r=4),
    "b": LoraConfig(r=20, target_modules="all-linear", lora_dropout=0.2),
    "c": LoraConfig(r=70),
}
TRAIN = TrainConfig(learning_rate=1e-2, lr_scheduler_type="constant", adam_epsilon=1e-3)


def make_shared(family: str = "llama", grouped: bool = True, dtype: torch.dtype = torch.float64, **changes: Any) -> SuperModel:
    shared = SuperModel(make_base(make_model(family, dtype, **changes), family))
    shared.plain_path.grouped = grouped  # as `groups_on` has it on a GPU
    if grouped:
        shared.optimizer = make_queued_optimizer(shared.bank)
    return shared


def join(shared: SuperModel, job_id: str, lora: LoraConfig) -> None:
    """With a B that is not zero, so that all gradients are there from the first step on."""
    state = init_state(shared.layout(lora), ord(job_id), shared.bank.sum_dtype, CPU)
    noise = torch.randn(state.params.shape, generator=torch.Generator().manual_seed(ord(job_id)), dtype=torch.float64)
    shared.join(job_id, lora, TRAIN, state=replace(state, params=(state.params + 0.05 * noise).to(state.params.dtype)))


def batch_of(jobs: str, step: int = 0, count: int = 3, pad_to: int = 0) -> PackedBatch:
    rows: list[BatchRow] = []
    for job_id in jobs:
        own = make_samples(count, seed=100 * step + ord(job_id), low=5, high=40, vocab=SPOILT)
        normalizer = float(sum(s.loss_weights[1:].sum() for s in own))
        rows += [BatchRow(job_id, s.input_ids, s.loss_weights, normalizer, (ord(job_id), step, i)) for i, s in enumerate(own)]
    return collate(rows, CPU, pad_to)


def trained(shared: SuperModel, jobs: str, loras: dict[str, LoraConfig], steps: int = 2, pad_to: int = 0) -> dict[str, Tensor]:
    """Weights after some steps, by job, with every loss on the way under its name."""
    found: dict[str, Tensor] = {}
    for job_id in jobs:
        join(shared, job_id, loras[job_id])
    for step in range(steps):
        losses = shared.forward_backward(batch_of(jobs, step, pad_to=pad_to))
        found |= {f"loss {step} of {job_id}": loss.loss_sum.clone() for job_id, loss in losses.items()}
        found |= {f"gradient {step} of {job_id}": shared.bank.gradient(job_id) for job_id in jobs}
        assert all(stats.applied for stats in shared.optim_step(jobs).values())
    found |= {job_id: shared.leave(job_id).params for job_id in jobs}
    return found


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if number % 3 else []) for number, name in enumerate(FAMILIES)]
)
def test_grouped_is_run_by_run(family: str) -> None:
    """In fp64; Gemma's windows and soft caps, biases, joined linears; norms stay in fp32 as the families have them."""
    targets = ["qkv_proj", "down_proj"] if family == "phi3" else ["q_proj", "down_proj"]
    loras = LORA | {"c": LORA["c"].model_copy(update={"target_modules": targets})}
    one_by_one, grouped = (trained(make_shared(family, each), "abc", loras, pad_to=400 * each) for each in (False, True))
    for name, expected in one_by_one.items():
        assert_close(grouped[name], expected, 1e-5, name)


def test_together_is_alone() -> None:
    together = trained(make_shared(), "abc", LORA)
    for job_id in "abc":
        alone = trained(make_shared(), job_id, LORA)
        assert relative_error(together[job_id], alone[job_id]) < TRAINED[torch.float64], job_id


def spoil(_module: object, args: tuple[Tensor], embedded: Tensor) -> Tensor:
    return torch.where((args[0] == SPOILT)[..., None], math.nan, embedded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_neighbour_of_nan_changes_no_bit(dtype: torch.dtype) -> None:
    """In every hidden state that a neighbour has, and so in all its gradients."""
    found: list[dict[str, Tensor]] = []
    for bad in (False, True):
        shared = make_shared("gemma2", dtype=dtype)
        for job_id in "abc":
            join(shared, job_id, LORA[job_id])
        batch = batch_of("abc")
        middle = batch.spans[1]
        batch.input_ids_T[middle.t0 : middle.t1] = SPOILT
        if bad:
            shared.base.model.get_input_embeddings().register_forward_hook(spoil)
        losses = shared.forward_backward(batch)
        found.append({job_id: shared.bank.gradient(job_id) for job_id in "abc"} | {f"loss {j}": losses[j].loss_sum for j in "abc"})
        stats = shared.optim_step("abc")
        assert [stats[job_id].applied for job_id in "abc"] == [True, not bad, True]
    healthy, beside = found
    for name in ("a", "c", "loss a", "loss c"):
        assert torch.equal(healthy[name], beside[name]), name
    assert not bool(beside["b"].isfinite().any())


def test_preferences_and_a_reference() -> None:
    """Units of two sequences, next to a job of samples; the reference is an adapter of its own."""
    found: list[dict[str, Tensor]] = []
    for grouped in (False, True):
        shared = make_shared(grouped=grouped)
        for job_id in "ab":
            join(shared, job_id, LORA["a"])
        shared.set_reference("a", shared.state("a").params * 0.5)
        pairs = [np.concatenate([s.input_ids for s in make_samples(2, seed=i, low=8, high=20)]) for i in range(3)]
        rows: list[BatchRow] = []
        for i, ids in enumerate(pairs):
            first = len(ids) // 2
            rows.append(BatchRow("a", ids, np.ones(len(ids), np.float32), 3.0, (1, 0, i), (first, len(ids) - first)))
        other = make_samples(2, seed=9)
        rows += [BatchRow("b", s.input_ids, s.loss_weights, 10.0, (2, 0, i)) for i, s in enumerate(other)]
        losses = shared.forward_backward(collate(rows), {"a": Dpo(0.1)})
        found.append({job_id: shared.bank.gradient(job_id) for job_id in "ab"} | {"loss": losses["a"].loss_sum})
    for name, expected in found[0].items():
        assert bool(expected.any())
        assert_close(found[1][name], expected, 1e-5, name)


def test_evaluation() -> None:
    means: list[float] = []
    for grouped in (False, True):
        shared = make_shared(grouped=grouped)
        join(shared, "b", LORA["b"])
        join(shared, "a", LORA["a"])
        means += [loss.mean for loss in shared.evaluate(batch_of("ba")).values()]
    assert means[:2] == pytest.approx(means[2:], rel=1e-6)


def test_chunks_repeat_a_jobs_own_tokens() -> None:
    batch = batch_of("abc", pad_to=500)
    chunked = chunk(batch, CPU)
    size = chunked.jobs.size
    assert chunked.places is not None and len(chunked.batch.input_ids_T) == chunked.jobs.num_tokens == sum(chunked.batch.lengths)
    for name in ("input_ids_T", "position_ids_T", "keys_T"):
        before, after = getattr(batch, name), getattr(chunked.batch, name)
        assert torch.equal(after[chunked.places], before[: batch.num_tokens])
    for span, own in zip(chunked.batch.spans, batch.spans, strict=True):
        assert span.t0 % size == 0 and (span.t1 - span.t0) % size == 0
        filled, mine = chunked.batch.input_ids_T[span.t0 : span.t1], batch.input_ids_T[own.t0 : own.t1]
        assert torch.equal(filled, mine.repeat(1 + size)[: len(filled)])
        assert span.lengths[: len(own.lengths)] == own.lengths and sum(span.lengths) == len(filled)
    alone = chunk(batch_of("a", pad_to=500), CPU)
    assert alone.places is None and len(alone.batch.input_ids_T) == batch_of("a").num_tokens


def test_where_passes_are_grouped() -> None:
    cuda = torch.device("cuda")
    assert groups_on(cuda, False) and not groups_on(cuda, True) and not groups_on(CPU, False)
    assert not SuperModel(make_base(make_model(), "llama")).plain_path.grouped


class Calls(TorchDispatchMode):
    """Operator calls, but for those that wait for the device: they raise."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(waiting in str(func) for waiting in ("_local_scalar_dense", "nonzero", "aten.is_nonzero")), func
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_calls_depend_on_no_sample_and_wait_for_nothing() -> None:
    """Of a micro-batch with its optimizer steps."""
    found: list[int] = []
    for count in (3, 24):
        shared = make_shared(dtype=torch.float32)
        for job_id in "abc":
            join(shared, job_id, LORA[job_id])
        batch = batch_of("abc", count=count)
        with Calls() as calls:
            shared.forward_backward(batch)
            steps = shared.measure_gradients("abc").update()
        assert not steps.done and all(stats.applied for stats in steps.read().values())
        found.append(sum(calls.found.values()))
    assert found[0] == found[1], found
