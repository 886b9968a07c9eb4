"""The four verbs, and what stands beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.numerics.world import adapter_sha256
from tests.tiny import make_batch, make_model, make_samples
from tlora.adapters.adamw import StepStats
from tlora.adapters.state import AdapterState, init_state
from tlora.errors import ConfigError, ModelError
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel.batch import collate
from tlora.supermodel.load import hidden_states, make_base
from tlora.supermodel.supermodel import JobLoss, StepError, SuperModel

TRAIN = TrainConfig(lr_scheduler_type="constant", learning_rate=3e-3)


@pytest.fixture(params=[False, True], ids=["default", "deterministic"])
def model(request: pytest.FixtureRequest) -> SuperModel:
    return SuperModel(make_base(make_model(), "llama"), deterministic=request.param)


def test_a_fresh_adapter_changes_nothing_and_an_absent_one_neither(model: SuperModel) -> None:
    samples = make_samples(3)
    model.join("a", LoraConfig(r=4), TRAIN)
    batch = make_batch({"a": samples})
    found = model.evaluate(batch)["a"].mean
    losses = []
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids).long()
        hidden = hidden_states(model.base, ids, torch.arange(len(ids)), (len(ids),))
        logits = model.base.head.logits(hidden)[:-1]
        losses.append((torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none"), torch.from_numpy(sample.loss_weights[1:])))
    expected = sum(float((loss * weight).sum()) for loss, weight in losses) / sum(float(weight.sum()) for _, weight in losses)
    assert found == pytest.approx(expected, rel=1e-5)


def test_training_lowers_the_loss_of_each_job_and_evaluation_changes_nothing(model: SuperModel) -> None:
    samples = {"a": make_samples(3, seed=1), "b": make_samples(2, seed=2)}
    for job, rank in (("a", 4), ("b", 17)):
        model.join(job, LoraConfig(r=rank, lora_dropout=0.1), TRAIN)
    before = {job: loss.mean for job, loss in model.evaluate(make_batch(samples)).items()}
    for step in range(20):
        model.forward_backward(make_batch(samples, step=step))
        if step % 10 == 5:
            params = model.state("a").params.clone()
            model.evaluate(make_batch(samples))
            assert torch.equal(params, model.state("a").params)
        stats = model.optim_step(samples)
        assert all(s.applied and s.step == step and s.grad_norm > 0 for s in stats.values())
    after = model.evaluate(make_batch(samples))
    assert all(after[job].mean < 0.9 * before[job] for job in samples), (before, after)


def test_evaluation_between_two_halves_of_a_batch_changes_no_gradient(model: SuperModel) -> None:
    sums: list[torch.Tensor] = []
    for evaluate in (False, True):
        model.join("a", LoraConfig(r=4, lora_dropout=0.5), TRAIN)
        model.forward_backward(make_batch({"a": make_samples(2)}, step=0))
        if evaluate:
            model.evaluate(make_batch({"a": make_samples(3, seed=8)}, step=0))  # with keys, which evaluation must not heed
        sums.append(model.bank.take_grad("a"))
        model.leave("a")
    assert torch.equal(*sums) and bool(sums[0].any())


def test_dropout_comes_with_its_keys_only(model: SuperModel) -> None:
    """A job without keys has no dropout, also beside one that has."""
    samples = {"a": make_samples(2, seed=1), "b": make_samples(2, seed=2)}
    for job in samples:
        model.join(job, LoraConfig(r=4, lora_dropout=0.5), TRAIN, state=_trained(model, job))
    plain, keyed = make_batch(samples), make_batch(samples, step=0)
    mixed = collate([*_rows("a", samples, None), *_rows("b", samples, 0)])
    losses = {name: model.forward_backward(batch) for name, batch in (("plain", plain), ("keyed", keyed), ("mixed", mixed))}
    mean = {name: {job: loss.mean for job, loss in found.items()} for name, found in losses.items()}
    assert mean["mixed"]["a"] == pytest.approx(mean["plain"]["a"], rel=1e-6)
    assert mean["mixed"]["b"] == pytest.approx(mean["keyed"]["b"], rel=1e-6)
    assert abs(mean["plain"]["b"] - mean["keyed"]["b"]) > 1e-3
    assert model.evaluate(keyed)["b"].mean == pytest.approx(mean["plain"]["b"], rel=1e-6)


def _trained(model: SuperModel, job: str):
    state = init_state(model.layout(LoraConfig(r=4)), len(job), torch.float32)
    state.params += 0.1 * torch.randn(state.params.shape, generator=torch.Generator().manual_seed(1))
    return state


def _rows(job: str, samples: dict[str, list], step: int | None) -> list:
    from tlora.supermodel.batch import BatchRow

    return [BatchRow(job, s.input_ids, s.loss_weights, 10.0, None if step is None else (0, step, i)) for i, s in enumerate(samples[job])]


def test_leaving_and_coming_back_is_never_having_left(model: SuperModel) -> None:
    hashes = []
    for pause in (False, True):
        model.join("a", LoraConfig(r=4), TRAIN)
        for step in range(4):
            if pause and step == 2:
                state = model.leave("a")
                model.join("b", LoraConfig(r=30), TRAIN)
                model.forward_backward(make_batch({"b": make_samples(2, seed=5)}))
                model.join("a", LoraConfig(r=4), TRAIN, state=state)
                model.leave("b")
            model.forward_backward(make_batch({"a": make_samples(3)}, step=step))
            model.optim_step(["a"])
        hashes.append(adapter_sha256(model.leave("a"), LoraConfig(r=4)))
    assert hashes[0] == hashes[1] and model.bank.jobs() == []


def test_leaving_drops_a_half_summed_gradient_and_so_does_forgetting(model: SuperModel) -> None:
    model.join("a", LoraConfig(r=4), TRAIN)
    batch = make_batch({"a": make_samples(2)})
    model.forward_backward(batch)
    model.join("b", LoraConfig(r=4), TRAIN)
    model.zero_grad_of("b")
    assert bool(model.bank.take_grad("a").any())
    model.forward_backward(batch)
    model.zero_grad_of("a")
    assert not model.bank.take_grad("a").any()
    model.forward_backward(batch)
    state = model.leave("a")
    model.join("a", LoraConfig(r=4), TRAIN, state=state)
    assert not model.bank.take_grad("a").any()


def test_padding_and_a_batch_of_nothing_have_no_effect(model: SuperModel) -> None:
    model.join("a", LoraConfig(r=4), TRAIN)
    rows = _rows("a", {"a": make_samples(2)}, None)
    plain = model.forward_backward(collate(rows))["a"].mean
    gradient = model.bank.take_grad("a")
    padded = model.forward_backward(collate(rows, pad_to=200))["a"].mean
    assert padded == pytest.approx(plain, rel=1e-6)
    torch.testing.assert_close(model.bank.take_grad("a"), gradient, rtol=1e-4, atol=1e-7)
    for pad_to in (0, 7):
        assert model.forward_backward(collate([], pad_to=pad_to)) == {} and model.evaluate(collate([], pad_to=pad_to)) == {}
    assert not model.bank.take_grad("a").any()


def test_a_job_with_nothing_to_learn_has_no_mean(model: SuperModel) -> None:
    model.join("a", LoraConfig(r=4), TRAIN)
    rows = [replace(row, loss_weights=row.loss_weights * 0) for row in _rows("a", {"a": make_samples(2)}, None)]
    loss = model.forward_backward(collate(rows))["a"]
    assert float(loss.loss_sum) == float(loss.weight_sum) == 0 and loss.mean != loss.mean
    assert not model.bank.take_grad("a").any()
    assert JobLoss(torch.tensor(3.0), torch.tensor(2.0)).mean == 1.5


def test_the_base_is_neither_copied_nor_trained(model: SuperModel) -> None:
    pointer = model.base.head.weight_VH.data_ptr()
    before = {n: p.clone() for n, p in model.model.named_parameters()}
    model.join("a", LoraConfig(r=4), TRAIN)
    for step in range(2):
        model.forward_backward(make_batch({"a": make_samples(2)}, step=step))
        model.optim_step(["a"])
    after = dict(model.model.named_parameters())
    assert all(torch.equal(after[n], p) and after[n].grad is None for n, p in before.items())
    assert len(before) == len(after) and model.base.head.weight_VH.data_ptr() == pointer


def test_a_gradient_that_is_not_finite_is_skipped_and_forgotten(model: SuperModel) -> None:
    model.join("a", LoraConfig(r=4), TRAIN)
    rows = [replace(row, loss_weights=row.loss_weights * float("nan")) for row in _rows("a", {"a": make_samples(2)}, None)]
    before = model.state("a").params.clone()
    model.forward_backward(collate(rows))
    assert not model.optim_step(["a"])["a"].applied and torch.equal(model.state("a").params, before)
    model.forward_backward(make_batch({"a": make_samples(2)}))
    assert model.optim_step(["a"])["a"].applied


# -- what is refused -----------------------------------------------------------------------------------------------------


def test_joining_twice(model: SuperModel) -> None:
    model.join("a", LoraConfig(r=4), TRAIN)
    with pytest.raises(ConfigError, match=r"'a' has joined already\. Let it leave first"):
        model.join("a", LoraConfig(r=4), TRAIN)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, float("nan")), (torch.float32, float("-inf")), (torch.float16, 65520.0)])
def test_weights_that_are_not_finite(dtype: torch.dtype, value: float) -> None:
    """The last is finite in the adapter's fp32, but not in the fp16 that the kernels would read."""
    model, lora = SuperModel(make_base(make_model(dtype=dtype), "llama")), LoraConfig(r=4)
    model.join("healthy", lora, TRAIN)
    state = init_state(model.layout(lora), 0, torch.float32)
    state.params[-1] = value
    with pytest.raises(ConfigError, match="'broken': its adapter holds NaN or Inf"):
        model.join("broken", lora, TRAIN, state=state)
    assert model.bank.jobs() == ["healthy"]
    state.params[-1] = 65000.0
    model.join("broken", lora, TRAIN, state=state)


def test_a_weight_that_would_not_be_finite_in_the_bank_is_not_written() -> None:
    model, lora = SuperModel(make_base(make_model(dtype=torch.float16), "llama")), LoraConfig(r=4)
    train = TrainConfig(lr_scheduler_type="constant", learning_rate=1e6, max_grad_norm=0)
    model.join("wild", lora, train)
    before = model.state("wild").clone()
    model.forward_backward(make_batch({"wild": make_samples(2)}))
    assert not model.optim_step(["wild"])["wild"].applied
    assert torch.equal(model.state("wild").params, before.params) and model.state("wild").step == 1


def test_a_step_that_raises_keeps_no_other_from_stepping(model: SuperModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for job, rank in (("a", 4), ("b", 5), ("c", 6)):
        model.join(job, LoraConfig(r=rank), TRAIN)
    model.forward_backward(make_batch({job: make_samples(2) for job in "abc"}))
    optimizer: Any = model.optimizer
    step = optimizer._step

    def raising(state: AdapterState, *args: Any) -> StepStats:
        if state is model.state("b"):
            raise torch.OutOfMemoryError("no room for the step")
        return step(state, *args)

    monkeypatch.setattr(optimizer, "_step", raising)
    with pytest.raises(StepError, match="b: OutOfMemoryError: no room for the step") as caught:
        model.optim_step(["a", "b", "c"])
    assert set(caught.value.errors) == {"b"} and set(caught.value.stats) == {"a", "c"}
    assert [model.state(job).step for job in "abc"] == [1, 0, 1]


def test_a_schedule_without_a_length(model: SuperModel) -> None:
    with pytest.raises(ConfigError, match="the cosine schedule needs its length"):
        model.join("a", LoraConfig(r=4), TrainConfig(lr_scheduler_type="cosine"))
    model.join("a", LoraConfig(r=4), TrainConfig(lr_scheduler_type="cosine", max_steps=3))


def test_samples_of_a_stranger_change_nothing(model: SuperModel) -> None:
    model.join("a", LoraConfig(r=4), TRAIN)
    with pytest.raises(ConfigError, match="samples of 'b', which has not joined"):
        model.forward_backward(make_batch({"a": make_samples(1), "b": make_samples(1)}))
    assert not model.bank.take_grad("a").any()


def test_a_job_that_cannot_join_leaves_no_trace(model: SuperModel) -> None:
    with pytest.raises(ModelError):
        model.join("a", LoraConfig(target_modules=["nothing"]), TRAIN)
    assert "a" not in model.bank
    model.join("a", LoraConfig(r=4), TRAIN)
