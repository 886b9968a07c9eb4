"""A job whose global batches are cut among replicas that one process computes in turn: its bytes, its neighbours, and what goes wrong."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from tests.group.test_decisions import raise_at
from tests.group.test_engine_reports import dataset, of, spec, until_idle
from tests.group.test_engine_reports import heard as heard
from tests.group.test_engine_reports import sets as sets
from tests.tiny import make_model
from tests.tolerances import TRAINED, assert_close
from tlora.adapters.state import AdapterState
from tlora.batching.replicas import cut
from tlora.data.dataset import Dataset
from tlora.data.order import global_batch
from tlora.group.engine import Engine
from tlora.group.exchange import RunningSums
from tlora.group.job_run import JobRun
from tlora.group.reports import Computed, Ended, Evaluated, Report, Stepped
from tlora.job import JobSpec
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

Sets = tuple[Dataset, Dataset]


def spanning(gpus: int = 3, **fields: Any) -> JobSpec:
    """Batches of 5 of 12 samples: the third of an epoch has 2, fewer than there are replicas. An epsilon at which a step follows its
    gradient, and a limit below each gradient's norm.
    """
    chosen: dict[str, Any] = {"batch_size": 5, "lora_dropout": 0.2, "adam_epsilon": 1e-3, "max_grad_norm": 0.02, "learning_rate": 1e-2}
    return spec("spanning", gpus=gpus, **(chosen | fields))


def make_engine(heard: list[Report], budget: int = 64, deterministic: bool = True) -> Engine:
    return Engine(SuperModel(make_base(make_model(), "tiny"), deterministic=deterministic), budget, heard.append)


def trained(job: JobSpec, train: Dataset, evaluation: Dataset | None = None, budget: int = 64) -> AdapterState:
    """The job alone: many tests compare with the same, which is trained once for all of them."""
    return _trained(job.model_dump_json(exclude_unset=True), train, evaluation, budget)


@functools.cache
def _trained(job: str, train: Dataset, evaluation: Dataset | None, budget: int) -> AdapterState:
    heard: list[Report] = []
    engine, spec = make_engine(heard, budget), JobSpec.model_validate_json(job)
    engine.join(JobRun(spec, train, evaluation))
    until_idle(engine)
    return ended(heard, spec.name)


def ended(heard: list[Report], name: str) -> AdapterState:
    (end,) = of(heard, Ended, name)
    assert end.status == "done", end
    return end.state


def assert_same(one: AdapterState, other: AdapterState) -> None:
    for name in ("params", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def by_hand(job: JobSpec, train: Dataset) -> AdapterState:
    """Each replica's gradient from a super-model of its own, added in the order of the replicas."""
    models = [SuperModel(make_base(make_model(), "tiny"), deterministic=True) for _ in range(job.gpus)]
    steps = job.total_steps(len(train))
    for model in models:
        model.join(job.name, job, job, total_steps=steps)
    for step in range(steps):
        samples = global_batch(step, len(train), job.batch_size, job.seed)
        normalizer = float(sum(train.trained[i] for i in samples))
        shares = cut([int(train.lengths[i]) for i in samples], job.gpus)
        for model, share in zip(models, shares, strict=True):
            chosen = [samples[position] for position in share]
            rows = [
                BatchRow(job.name, train[i].input_ids, train[i].loss_weights, normalizer, (job.seed, step, i), train[i].lengths)
                for i in chosen
            ]
            model.forward_backward(collate(rows, "cpu"))
        total = models[0].gradient(job.name)
        for model in models[1:]:
            total = total + model.gradient(job.name)
        for model in models:
            model.set_gradient(job.name, total)
            assert model.optim_step([job.name])[job.name].grad_norm > 2 * job.max_grad_norm
    return models[0].state(job.name)


def test_replicas_in_turn_give_the_bytes_of_replicas_apart(sets: Sets) -> None:
    found = trained(spanning(), sets[0])
    assert_same(found, by_hand(spanning(), sets[0]))
    assert not torch.equal(found.params, trained(spanning(gpus=1), sets[0]).params), "the order of additions is not seen here"


def test_it_is_the_job_without_replicas_up_to_rounding(sets: Sets) -> None:
    start = trained(spanning(learning_rate=0), sets[0]).params
    one, many = (trained(spanning(gpus=gpus, eval_steps=2, data=EVALUATED), *sets).params - start for gpus in (1, 3))
    assert_close(many, one, TRAINED[torch.float32])


EVALUATED = {"path": "-", "eval_path": "-"}


@pytest.mark.slow
def test_neighbours_and_budgets_change_no_bit_of_either(sets: Sets, heard: list[Report]) -> None:
    """One neighbour takes seven micro-batches for each of its batches, another one; one is evaluated, one spans too."""
    others = [
        spec("long", batch_size=12, r=8),
        spec("short", batch_size=1, max_steps=9, lora_dropout=0.1),
        spec("spans", gpus=2, max_steps=4, eval_steps=1, data=EVALUATED),
    ]
    alone = {job.name: trained(job, *sets) if job.eval_steps else trained(job, sets[0]) for job in [spanning(), *others]}
    for budget in (25, 300):
        heard.clear()
        engine = make_engine(heard, budget)
        for job in [*others, spanning()]:
            engine.join(JobRun(job, sets[0], sets[1] if job.eval_steps else None))
        until_idle(engine)
        for name, state in alone.items():
            assert_same(ended(heard, name), state)


def test_an_evaluation_is_not_cut(sets: Sets, heard: list[Report]) -> None:
    engine = make_engine(heard, budget=1000)
    engine.join(JobRun(spanning(data=EVALUATED, max_steps=2), *sets))
    until_idle(engine)
    packed = [(report.packed.kind, len(report.packed.rows)) for report in heard if isinstance(report, Computed)]
    assert [kind for kind, _ in packed] == ["eval", "train", "train", "train", "train", "train", "train", "eval"]
    assert packed[0][1] == packed[-1][1] == len(sets[1]) and len(of(heard, Evaluated, "spanning")) == 2


def test_losses_and_tokens_are_of_the_whole_global_batch(sets: Sets) -> None:
    found: list[list[tuple[float, int]]] = []
    for gpus in (1, 3):
        heard: list[Report] = []
        engine = make_engine(heard)
        engine.join(JobRun(spanning(gpus, learning_rate=0), sets[0], None))
        until_idle(engine)
        found.append([(report.loss, report.progress.num_tokens) for report in of(heard, Stepped, "spanning")])
    assert found[0] == found[1] and len(found[0]) == 5


def test_a_replica_that_is_not_finite_skips_the_step_of_all(sets: Sets, heard: list[Report], monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, calls = SuperModel.gradient, [0]

    def spoiled(model: SuperModel, job_id: str) -> torch.Tensor:
        calls[0] += 1
        return gradient(model, job_id) * (math.nan if calls[0] == 2 else 1.0)

    monkeypatch.setattr(SuperModel, "gradient", spoiled)
    engine = make_engine(heard)
    engine.join(JobRun(spanning(), sets[0], None))
    until_idle(engine)
    assert [report.stats.applied for report in of(heard, Stepped, "spanning")] == [False, True, True, True, True]
    assert ended(heard, "spanning").params.isfinite().all()


@pytest.mark.parametrize("call", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_micro_batch_that_fails_in_any_replica_starts_the_global_batch_over(
    sets: Sets, heard: list[Report], monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    alone = trained(spanning(), sets[0])
    raise_at(monkeypatch, call, RuntimeError("a passing fault"))
    engine = make_engine(heard)
    engine.join(JobRun(spanning(), sets[0], None))
    until_idle(engine)
    assert_same(ended(heard, "spanning"), alone)


def test_a_job_that_leaves_between_replicas_goes_on_from_its_last_step(sets: Sets, heard: list[Report]) -> None:
    alone = trained(spanning(), sets[0])
    engine = make_engine(heard, budget=1000)  # a micro-batch per replica
    engine.join(JobRun(spanning(), sets[0], None))
    for _ in range(5):
        engine.run_micro_batch()
    engine.leave("spanning")
    (left,) = of(heard, Ended, "spanning")
    assert (left.status, left.progress.step) == ("stopped", 1)
    heard.clear()
    again = JobRun(spanning(), sets[0], None)
    again.progress = left.progress
    engine.join(again, left.state)
    until_idle(engine)
    assert_same(ended(heard, "spanning"), alone)


def test_a_replica_whose_gradient_cannot_be_kept_fails_its_job_alone(
    sets: Sets, heard: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = trained(spec("other"), sets[0])

    def no_room(*_: object) -> None:
        raise MemoryError("no room for a gradient")

    monkeypatch.setattr(RunningSums, "give", no_room)
    engine = make_engine(heard)
    for job in (spanning(), spec("other")):
        engine.join(JobRun(job, sets[0], None))
    until_idle(engine)
    (end,) = of(heard, Ended, "spanning")
    assert (end.status, end.reason) == ("failed", "MemoryError: no room for a gradient")
    assert_same(ended(heard, "other"), alone)


def test_one_buffer_at_most_and_none_between_global_batches() -> None:
    sums = RunningSums()
    for first in (1.0, 5.0):
        given = torch.full((3,), first)
        sums.give("a", 7, 0, given)
        sums.give("b", 7, 0, torch.zeros(2))
        sums.give("a", 7, 1, torch.full((3,), 2.0))
        assert sums.take("a", 7, [0, 1]).gradient_P is given and given.tolist() == [first + 2.0] * 3
        assert list(sums._sums) == ["b"]
        sums.forget("b")
        assert not sums._sums


def test_a_data_set_smaller_than_the_replicas(tmp_path: Any, heard: list[Report]) -> None:
    engine = make_engine(heard)
    engine.join(JobRun(spanning(5, max_steps=2), dataset(tmp_path / "two", 2, 3), None))
    until_idle(engine)
    assert ended(heard, "spanning").step == 2
