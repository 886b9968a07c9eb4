"""A job that two super-models of one base train together: each computes half of every global batch, gradients are added, both step.

The optimizer is the CPU's or the GPU's, whichever machine this is: on a CPU its kernels go through Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.interpreter import DEVICE, MARKS, interpreted
from tests.tiny import make_model, make_samples
from tests.tolerances import TRAINED, assert_close
from tlora.adapters.adamw import StepStats
from tlora.errors import ConfigError
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.job_by_job import make_host_optimizer
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

pytest.importorskip("triton")
with interpreted():
    from tlora.supermodel.device_optimizer import DeviceOptimizer

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")]  # dynamo looks
LORA = LoraConfig(r=4, lora_dropout=0.2, rank_pattern={"down_proj": 19})
# With an epsilon at which a step follows its gradient, and a limit below each gradient's norm: halves would be clipped otherwise.
TRAIN = TrainConfig(learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=1, adam_epsilon=1e-3, weight_decay=0.1, max_grad_norm=0.02)
STEPS = 2


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Where layers would be compiled, which is looked at elsewhere."""
    with torch.compiler.set_stance("force_eager"):
        yield


def make_shared(optimizer: Any) -> SuperModel:
    shared = SuperModel(make_base(make_model().to(DEVICE), "llama"), deterministic=True)
    shared.optimizer = optimizer(shared.bank)
    shared.join("spanning", LORA, TRAIN, total_steps=STEPS)
    return shared


@pytest.fixture(params=[make_host_optimizer, DeviceOptimizer], ids=["host", "device"])
def models(request: pytest.FixtureRequest) -> tuple[SuperModel, SuperModel, SuperModel]:
    """Two that share the job, and one that has it alone."""
    first, second, whole = (make_shared(request.param) for _ in range(3))
    return first, second, whole


def global_batch(step: int, size: int) -> list[BatchRow]:
    samples = make_samples(size, seed=step, low=5)
    normalizer = float(sum(s.loss_weights[1:].sum() for s in samples))
    return [BatchRow("spanning", s.input_ids, s.loss_weights, normalizer, (1, step, i)) for i, s in enumerate(samples)]


def train(model: SuperModel, rows: Sequence[BatchRow]) -> None:
    model.forward_backward(collate(rows, DEVICE))


def exchange(peers: Sequence[SuperModel]) -> None:
    """All peers get the sum of their gradients, added in the order of the peers."""
    first, *others = [model.gradient("spanning") for model in peers]
    for other in others:
        first += other
    for model in peers:
        model.set_gradient("spanning", first)


def step(peers: Sequence[SuperModel], rows: Sequence[BatchRow]) -> list[StepStats]:
    """One optimizer step of the job on all peers, each with its stretch of the global batch."""
    share = len(rows) // len(peers)
    for i, model in enumerate(peers):
        train(model, rows[i * share : (i + 1) * share])
    exchange(peers)
    measured = [model.measure_gradients(["spanning"]) for model in peers]
    verdicts = [m.verdicts["spanning"].cpu().nan_to_num(-1) for m in measured]
    assert all(torch.equal(verdict, verdicts[0]) for verdict in verdicts)
    return [m.update().read()["spanning"] for m in measured]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_job_in_two_halves_learns_what_it_learns_in_one(models: tuple[SuperModel, SuperModel, SuperModel], size: int) -> None:
    """With one sample each the sums are added as one super-model adds them, sample by sample: then the bits are the same, on a CPU."""
    *peers, whole = models
    peers[1].join("neighbour", LoraConfig(r=8), TRAIN.model_copy(update={"learning_rate": 0.1}), total_steps=STEPS)  # of this peer alone
    start = whole.state("spanning").params.clone()
    for number in range(STEPS):
        rows = global_batch(number, size)
        train(peers[1], [replace(row, job_id="neighbour") for row in rows])
        found = step(peers, rows)
        train(whole, rows)
        expected = whole.optim_step(["spanning"])["spanning"]
        peers[1].optim_step(["neighbour"])
        assert found[0] == found[1] and found[0].applied and found[0].grad_norm > 2 * TRAIN.max_grad_norm
        assert found[0].grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert not peers[0].gradient("spanning").any() and not peers[1].gradient("spanning").any()
    one, two, true = (model.state("spanning") for model in models)
    for name in ("params", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
        if size == len(peers) and DEVICE.type == "cpu":
            assert torch.equal(getattr(one, name), getattr(true, name)), name
    assert_close(one.params - start, true.params - start, TRAINED[torch.float32])


def test_a_half_that_is_not_finite_is_skipped_by_both(models: tuple[SuperModel, SuperModel, SuperModel]) -> None:
    *peers, _ = models
    first, second = global_batch(0, 2)
    before = [model.state("spanning").params.clone() for model in peers]
    found = step(peers, [first, replace(second, loss_weights=second.loss_weights * math.nan)])
    assert not any(stats.applied for stats in found)
    for model, params in zip(peers, before, strict=True):
        assert torch.equal(model.state("spanning").params, params) and model.state("spanning").skipped == 1
    assert all(stats.applied and stats.step == 1 for stats in step(peers, global_batch(1, 2)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda g: g[:-1], r"has shape \(\d+,\)"),
        (lambda g: g.view(1, -1), r"has shape \(1, \d+\)"),
        (lambda g: g.double(), r"torch\.float64"),
        (lambda g: g.to("meta"), "on meta"),
    ],
    ids=["size", "shape", "dtype", "device"],
)
def test_a_gradient_that_does_not_fit_is_refused(models: tuple[SuperModel, SuperModel, SuperModel], change: Any, said: str) -> None:
    model = models[-1]
    train(model, global_batch(0, 2))
    before = model.gradient("spanning")
    with pytest.raises(ConfigError, match=rf"'spanning' .*{said}.*gradient\('spanning'\)"):
        model.set_gradient("spanning", change(before))
    assert torch.equal(model.gradient("spanning"), before)
    strided = torch.stack([before, before], 1)[:, 0]
    assert not strided.is_contiguous()
    model.set_gradient("spanning", strided)
    assert torch.equal(model.gradient("spanning"), before)
