"""Layers recomputed by the tokens of a micro-batch: no bit of any job depends on it, and memory that runs out makes it more.

On the kernels' path, through Triton's interpreter where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.group.test_engine_reports import of, spec
from tests.kernels.interpreter import DEVICE, MARKS, interpret, interpreted
from tests.tiny import make_model, make_samples
from tlora.batching.pack import MicroBatch
from tlora.batching.recompute_plan import RecomputePlan, same_for_all
from tlora.data.dataset import Dataset, Sample, Writer
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.group.reports import Computed, Ended, Noted, Report
from tlora.group.stream import Stream
from tlora.group.token_budget import TokenBudget
from tlora.supermodel import supermodel
from tlora.supermodel.load import make_base
from tlora.supermodel.losses import JobLoss
from tlora.supermodel.supermodel import SuperModel

with interpreted():  # the path imports it late, when the variable may not be set any more
    from tlora.kernels import pass_operations  # noqa: F401

pytestmark = MARKS
LONG, BUDGET = 48, 24  # tokens
BY_TOKENS = RecomputePlan((BUDGET, 40))  # none of a full micro-batch, one of a longer one, both of the longest


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Layers run as they are on a CPU: the interpreter takes long enough."""
    with torch.compiler.set_stance("force_eager" if DEVICE.type == "cpu" else "default"):
        yield
    torch._dynamo.reset()


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> SuperModel:
    """On the plain path, which recomputes nothing, and keeps what it is told of it."""
    kept = [RecomputePlan()]
    monkeypatch.setattr(SuperModel, "recompute", property(lambda _: kept[0], lambda _, plan: kept.__setitem__(0, plan)))
    monkeypatch.setattr(supermodel, "why_not_fused", lambda *_: "this test takes the plain path")
    return SuperModel(make_base(make_model().to(DEVICE), "tiny"), deterministic=True)


def make_shared() -> SuperModel:
    few: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        shared = SuperModel(make_base(make_model("llama-tied", **few).to(DEVICE), "tiny"), deterministic=True)
    assert shared.num_layers == 2
    return shared


def written(directory: Path, samples: Sequence[Sample]) -> Dataset:
    writer = Writer(directory)
    for sample in samples:
        writer.add(sample)
    writer.finish({})
    return Dataset(directory)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    """Short samples and a long one; pairs of answers, of which one is longer than the budget with both of its sequences."""
    directory = tmp_path_factory.mktemp("sets")
    short, long = make_samples(2, 1, 5, 12), make_samples(1, 2, LONG, LONG)
    answers = make_samples(2, 3, 6, 10) + make_samples(2, 4, 14, 16)
    pairs = [
        Sample(
            np.concatenate([a.input_ids, b.input_ids]),
            np.concatenate([a.loss_weights, b.loss_weights]),
            (len(a.input_ids), len(b.input_ids)),
        )
        for a, b in zip(answers[::2], answers[1::2], strict=True)
    ]
    return {"samples": written(directory / "samples", [*short, *long]), "pairs": written(directory / "pairs", pairs)}


SPECS = {
    "sft": spec("sft", batch_size=3, max_steps=2, lora_dropout=0.2, learning_rate=1e-2, target_modules="all-linear"),
    "dpo": spec("dpo", batch_size=2, max_steps=2, objective="dpo"),
}


def runs(sets: dict[str, Dataset]) -> list[JobRun]:
    return [JobRun(SPECS["sft"], sets["samples"], None), JobRun(SPECS["dpo"], sets["pairs"], None)]


def trained(sets: dict[str, Dataset], budget: int, recompute: RecomputePlan, heard: list[Report]) -> dict[str, Tensor]:
    shared = make_shared()
    shared.recompute = recompute
    engine = Engine(shared, budget, heard.append)
    for run in runs(sets):
        engine.join(run)
    while engine.runs:
        engine.run_micro_batch()
    return ended(heard)


def ended(heard: list[Report]) -> dict[str, Tensor]:
    assert [of(heard, Ended, name)[-1].status for name in SPECS] == ["done", "done"], heard
    return {name: of(heard, Ended, name)[-1].state.params.clone() for name in SPECS}


@pytest.fixture(scope="module")
def expected(sets: dict[str, Dataset]) -> Iterator[dict[str, Tensor]]:
    """Nothing recomputed, everything in as few micro-batches as there can be."""
    with torch.compiler.set_stance("force_eager" if DEVICE.type == "cpu" else "default"):
        yield trained(sets, 256, RecomputePlan(), [])


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, params in expected.items():
        assert torch.equal(found[name], params), name


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "recompute"), [(BUDGET, BY_TOKENS), (LONG, same_for_all(2))], ids=["by tokens", "all alike"])
def test_no_bit_depends_on_which_micro_batches_recompute(
    budget: int, recompute: RecomputePlan, sets: dict[str, Dataset], expected: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of samples with dropout and of pairs, short and long."""
    heard, depths = list[Report](), dict[int, set[int]]()
    layers = RecomputePlan.layers

    def note(plan: RecomputePlan, tokens: int) -> int:
        depths.setdefault(tokens, set()).add(layers(plan, tokens))
        return layers(plan, tokens)

    monkeypatch.setattr(RecomputePlan, "layers", note)
    assert_same(trained(sets, budget, recompute, heard), expected)
    sizes = {report.packed.tokens for report in heard if isinstance(report, Computed)}
    assert LONG in sizes and any(BUDGET < size < LONG for size in sizes) and any(size <= BUDGET for size in sizes)
    used = {layers(recompute, size) for size in sizes}
    assert used == ({0, 1, 2} if recompute is BY_TOKENS else {2}) and used <= set().union(*depths.values())


@pytest.mark.slow
def test_a_job_that_goes_on_under_another_plan_has_the_bits_of_one_that_did_not(
    sets: dict[str, Dataset], expected: dict[str, Tensor]
) -> None:
    heard = list[Report]()
    first = Engine(make_shared(), 256, heard.append)
    run = JobRun(SPECS["sft"], sets["samples"], None)
    first.join(run)
    while not run.progress.step:
        first.run_micro_batch()
    first.leave("sft")
    (left,) = of(heard, Ended, "sft")
    shared = make_shared()
    shared.recompute = BY_TOKENS
    again, resumed = Engine(shared, BUDGET, heard.append), JobRun(SPECS["sft"], sets["samples"], None)
    resumed.progress = left.progress
    again.join(resumed, left.state)
    while again.runs:
        again.run_micro_batch()
    assert of(heard, Ended, "sft")[-1].status == "done" and left.progress.step == 1
    assert torch.equal(of(heard, Ended, "sft")[-1].state.params, expected["sft"])


# -- out of memory ---------------------------------------------------------------------------------------------------------


def full_at(monkeypatch: pytest.MonkeyPatch, shared: SuperModel, layers: int) -> None:
    """The long sample runs out of memory unless it recomputes so many layers."""
    compute = Stream.compute

    def full(self: Stream, packed: MicroBatch, *batch: Any) -> dict[str, JobLoss]:
        if packed.tokens == LONG and shared.recompute.layers(LONG) < layers:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(self, packed, *batch)

    monkeypatch.setattr(Stream, "compute", full)


def all_run(engine: Engine, sets: dict[str, Dataset]) -> None:
    for run in runs(sets):
        engine.join(run)
    while engine.runs:
        engine.run_micro_batch()


@pytest.fixture
def true(plain: SuperModel, sets: dict[str, Dataset]) -> dict[str, Tensor]:
    """On the plain path, with enough memory."""
    heard = list[Report]()
    all_run(Engine(plain, 256, heard.append), sets)
    return ended(heard)


def test_memory_that_runs_out_makes_long_samples_recompute_more_and_ends_no_job(
    plain: SuperModel, true: dict[str, Tensor], sets: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = list[Report]()
    plain.recompute = RecomputePlan((BUDGET, LONG))
    monkeypatch.setattr("tlora.group.token_budget.SMALLEST_BUDGET", 8)
    full_at(monkeypatch, plain, layers=2)
    engine = Engine(plain, BUDGET, heard.append)
    monkeypatch.setattr(engine._budget, "room_came", lambda: None)  # or it would grow again when a job ends
    all_run(engine, sets)
    assert_same(ended(heard), true)
    notes = [report.line for report in heard if isinstance(report, Noted)]
    assert notes == [f"out of memory: the token budget is now {BUDGET // 2}, and longer samples recompute more layers"]
    assert plain.recompute == RecomputePlan((BUDGET // 2, LONG // 2))


def test_a_sample_that_recomputes_all_and_runs_out_of_memory_fails_its_job_alone(
    plain: SuperModel, true: dict[str, Tensor], sets: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = list[Report]()
    plain.recompute = BY_TOKENS
    full_at(monkeypatch, plain, layers=3)
    engine = Engine(plain, BUDGET, heard.append)
    all_run(engine, sets)
    (failed,) = of(heard, Ended, "sft")
    assert failed.status == "failed" and "out of memory" in failed.reason
    assert torch.equal(of(heard, Ended, "dpo")[-1].state.params, true["dpo"])
    assert engine.token_budget == BUDGET, "a smaller budget would not have helped"


# -- the budget ------------------------------------------------------------------------------------------------------------


def test_a_lowered_budget_makes_longer_samples_recompute_more_until_it_has_grown_again() -> None:
    plan = RecomputePlan((4096, 8192, 16384))
    budget = TokenBudget(4096, plan)
    for expected in (2048, 1024):
        budget.lower(budget.next_lower(16384) or 0)
        assert budget.tokens == expected and budget.recompute == plan.scaled(expected, 4096)
        assert budget.recompute.layers(expected) == 0
    assert budget.recompute.layers(4096) == 2 and budget.recompute.layers(8192) == 3
    budget.grow(4096)
    assert budget.recompute == plan
    budget.order(1000, same_for_all(2))
    assert budget.recompute == same_for_all(2) and budget.next_lower(1000) is None and budget.next_lower(700) == 700


def test_a_lower_budget_is_not_tried_where_it_does_not_help() -> None:
    budget = TokenBudget(4096, RecomputePlan((4096, 8192)))
    assert budget.next_lower(16384, alone=16384) is None, "it recomputes all that it can"
    assert budget.next_lower(16384, alone=5000) == budget.next_lower(16384) == 2048
    budget.lower(128)
    assert budget.next_lower(16384) is None
