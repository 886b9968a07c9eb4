"""Passes as objects: forward and backward apart, several between the two, and base weights that are looked up in both.

On both paths, the kernels' through Triton's interpreter where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreter import DEVICE, MARKS, interpret, interpreted
from tests.tiny import make_model, make_samples
from tlora.adapters.state import init_state
from tlora.batching.recompute_plan import RecomputePlan
from tlora.job import LoraConfig, TrainConfig
from tlora.kernels.frozen import FrozenLinear, PlainWeight
from tlora.objectives import Dpo
from tlora.supermodel import losses, supermodel
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

with interpreted():  # the path imports it late, when the variable may not be set any more
    from tlora.kernels import pass_operations

pytestmark = MARKS
LORA = {"a": LoraConfig(r=4), "b": LoraConfig(r=20, lora_dropout=0.2, target_modules=["q_proj", "down_proj"])}
TRAIN = TrainConfig(learning_rate=1e-2, lr_scheduler_type="constant")
LAYER = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Layers run as they are on a CPU: the interpreter takes long enough."""
    with torch.compiler.set_stance("force_eager" if DEVICE.type == "cpu" else "default"):
        yield
    torch._dynamo.reset()


@pytest.fixture(params=[pytest.param(True, marks=pytest.mark.slow), False], ids=["kernels", "plain"])
def fast(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def make_shared(fast: bool, jobs: str = "ab") -> SuperModel:
    with pytest.MonkeyPatch.context() as patch:
        if fast:
            interpret(patch)
        else:
            patch.setattr(supermodel, "why_not_fused", lambda *_: "this test takes the plain path")
        shared = SuperModel(make_base(make_model("llama-tied", **LAYER).to(DEVICE), "tiny"), deterministic=True)
    assert (shared.fast_path is not None) == fast
    for job_id in jobs:
        state = init_state(shared.layout(LORA[job_id]), ord(job_id), torch.float32, DEVICE)
        noise = torch.randn(state.params.shape, generator=torch.Generator().manual_seed(ord(job_id)))
        shared.join(job_id, LORA[job_id], TRAIN, state=replace(state, params=state.params + 0.05 * noise.to(DEVICE)))
    return shared


def batch_of(job_ids: str, seed: int = 0) -> PackedBatch:
    """Two samples a job; all batches of as many jobs have one shape."""
    rows = []
    for job_id in job_ids:
        samples = make_samples(2, seed=seed + ord(job_id), low=8, high=8)
        rows += [BatchRow(job_id, s.input_ids, s.loss_weights, 7.0, (ord(job_id), seed, i)) for i, s in enumerate(samples)]
    return collate(rows, DEVICE, 48)


def gradients(shared: SuperModel, jobs: str = "ab") -> dict[str, Tensor]:
    return {job_id: shared.bank.take_grad(job_id).clone() for job_id in jobs}


@pytest.mark.parametrize("fast", [True, False], ids=["kernels", "plain"], indirect=True)
@pytest.mark.parametrize("order", [pytest.param((0, 1), marks=pytest.mark.soak), (1, 0)])
def test_open_passes_give_the_bits_of_one_after_another(order: tuple[int, int], fast: bool) -> None:
    """On a GPU the passes' shape has a graph from the second round on, which serves the first pass of two."""
    batches = [batch_of("ab", 1), batch_of("ba", 2)]
    expected, found = make_shared(fast), make_shared(fast)
    for _ in range(4 if DEVICE.type == "cuda" else 1):
        wanted = {i: expected.forward_backward(batches[i]) for i in order}
        passes = [found.begin(batch) for batch in batches]
        for i, open_losses in enumerate([one.forward() for one in passes]):
            assert all(torch.equal(open_losses[job_id].loss_sum, wanted[i][job_id].loss_sum) for job_id in "ab")
        for i in order:
            passes[i].backward()
        true, grads = gradients(expected), gradients(found)
        assert all(bool(grad.any()) and torch.equal(grad, true[job_id]) for job_id, grad in grads.items())
    del passes
    assert not pass_operations._states, "a pass is still held"


def test_what_stands_between_forward_and_backward_changes_nothing(fast: bool) -> None:
    """An evaluation, a whole pass of another job, and its step."""
    expected, found = make_shared(fast), make_shared(fast)
    expected.forward_backward(batch_of("a"))
    one = found.begin(batch_of("a"))
    one.forward()
    found.evaluate(batch_of("ba", 3))
    found.forward_backward(batch_of("b"))
    found.optim_step("b")
    one.backward()
    assert torch.equal(gradients(found, "a")["a"], gradients(expected, "a")["a"])


class Streamed:
    """Base weights that lie elsewhere at each look, and are NaN wherever they lay before: as those that come just in time."""

    def __init__(self, shared: SuperModel) -> None:
        self._kept = {
            name: FrozenLinear(PlainWeight(linear.weight.detach().clone()), None if linear.bias is None else linear.bias.detach().clone())
            for name, linear in shared._linears.items()
        }
        for linear in shared._linears.values():  # what the modules hold is not read
            linear.weight.data.fill_(torch.nan)
        self._before: Tensor | None = None
        self.looked_up: list[str] = []

    def __call__(self, name: str) -> FrozenLinear:
        self.looked_up.append(name)
        kept = self._kept[name]
        if self._before is not None and len({n.rpartition(".")[0] for n in self.looked_up[-2:]}) > 1:  # q, k and v are read together
            self._before.fill_(torch.nan)
        self._before = kept.weight.operand().clone()
        return replace(kept, weight=PlainWeight(self._before))


@pytest.mark.parametrize(
    ("fast", "depth"), [(False, 0), *(pytest.param(True, depth, marks=pytest.mark.soak) for depth in (0, 1))], indirect=["fast"], ids=str
)
def test_weights_are_looked_up_in_forward_and_again_in_backward(depth: int, fast: bool) -> None:
    """With recomputed layers too, and for a job that adapts a part of the linears; a pair's reference pass among them."""
    pair = make_samples(2, seed=9, low=6, high=12)
    ids, weights = (torch.cat([torch.from_numpy(getattr(s, key)) for s in pair]).numpy() for key in ("input_ids", "loss_weights"))
    rows = BatchRow("b", ids, weights, 1.0, (1, 2, 3), tuple(len(s.input_ids) for s in pair))
    found = []
    for streamed in (False, True):
        shared = make_shared(fast)
        shared.recomputed_layers = depth
        linears = len(shared.targets())
        if streamed:
            shared.passes.weights = source = Streamed(shared)
        shared.forward_backward(batch_of("b"))
        if streamed:
            looks = [source.looked_up.count(name) for name in shared.targets()]
            assert len(looks) == linears and min(looks) >= 1 and sum(looks) >= 2 * linears - 3  # the first q, k and v pass nothing back
        shared.forward_backward(batch_of("ab", 5))
        pair_losses = shared.forward_backward(collate([rows], DEVICE), {"b": Dpo(0.3)})
        found.append((gradients(shared), pair_losses["b"].mean))
    (true, loss), (grads, found_loss) = found
    assert loss == found_loss
    assert all(bool(grad.any()) and torch.equal(grad, true[job_id]) for job_id, grad in grads.items())


@pytest.mark.parametrize("fast", [True], indirect=True)
def test_a_stage_hands_on_a_plan_of_more_layers_than_it_has(fast: bool) -> None:
    """The plan of the last stage goes to all others: they recomputed no more layers than that one has."""
    shared = make_shared(fast)
    shared.recompute = RecomputePlan((0, *range(4, 4 + shared.num_layers + 3)))
    assert shared.recompute.most_layers == shared.num_layers + 4 and shared.recomputed_layers == shared.num_layers


def test_a_pass_is_used_once_and_in_order(fast: bool) -> None:
    shared = make_shared(fast)
    one = shared.begin(batch_of("a"))
    with pytest.raises(RuntimeError, match="Call forward first"):
        one.backward()
    one.forward()
    with pytest.raises(RuntimeError, match="Begin another one"):
        one.forward()
    one.backward()
    grads = gradients(shared)
    one.backward()
    assert bool(grads["a"].any()) and not bool(gradients(shared)["a"].any())


def test_a_forward_that_raised_leaves_nothing_to_go_back_with_and_may_be_called_again(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, calls = make_shared(fast), list[int]()
    expected = shared.forward_backward(batch_of("a"))["a"].loss_sum
    true = gradients(shared, "a")["a"]
    healthy = losses.linear_cross_entropy

    def refuse_the_last(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == (1 if fast else 2):  # the plain path computes two samples one after another
            raise RuntimeError("no loss today")
        return healthy(*args)

    monkeypatch.setattr(losses, "linear_cross_entropy", refuse_the_last)
    one = shared.begin(batch_of("a"))
    with pytest.raises(RuntimeError, match="no loss today"):
        one.forward()
    with pytest.raises(RuntimeError, match="Call forward first"):
        one.backward()
    assert not bool(gradients(shared, "a")["a"].any())
    assert torch.equal(one.forward()["a"].loss_sum, expected)
    one.backward()
    assert torch.equal(gradients(shared, "a")["a"], true)


@pytest.mark.parametrize("what", ["step", "leave", "move"])
def test_a_pass_whose_adapters_have_changed_does_not_go_back(what: str, fast: bool) -> None:
    shared = make_shared(fast)
    one = shared.begin(batch_of("a"))
    one.forward()
    if what == "step":
        shared.forward_backward(batch_of("a"))
        shared.optim_step("a")
    elif what == "leave":
        state = shared.leave("a")
        shared.join("a", LORA["a"], TRAIN, state=state)
    else:
        shared.join("c", LoraConfig(r=64), TRAIN)
    with pytest.raises(RuntimeError, match="have stepped, joined or moved"):
        one.backward()
    assert not bool(gradients(shared, "a")["a"].any())
