"""A group without files: what it is told and what it reports. Progress in a report is a value that a listener may keep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import make_model, make_samples
from tlora.data.dataset import Dataset, Writer
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.group.reports import CheckpointDue, Computed, Ended, Evaluated, Noted, Report, Stepped
from tlora.group.stream import Stream
from tlora.job import JobSpec
from tlora.supermodel.batch import PackedBatch
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel


def dataset(directory: Path, count: int, seed: int) -> Dataset:
    writer = Writer(directory)
    for sample in make_samples(count, seed):
        writer.add(sample)
    writer.finish({})
    return Dataset(directory)


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Dataset]:
    directory = tmp_path_factory.mktemp("sets")
    return dataset(directory / "train", 12, 0), dataset(directory / "eval", 3, 1)


def spec(name: str, **fields: Any) -> JobSpec:
    few = {"r": 4, "batch_size": 4, "max_steps": 5, "learning_rate": 1e-3, "target_modules": ["q_proj", "down_proj"]}
    return JobSpec(**{"name": name, "data": "-", **few, **fields})


@pytest.fixture
def heard() -> list[Report]:
    return []


@pytest.fixture
def engine(heard: list[Report]) -> Iterator[Engine]:
    yield Engine(SuperModel(make_base(make_model(), "tiny"), deterministic=True), 64, heard.append)


def until_idle(engine: Engine) -> None:
    while engine.run_micro_batch() is not None:
        pass


def of(heard: list[Report], kind: type[Any], job_id: str) -> list[Any]:
    return [report for report in heard if isinstance(report, kind) and report.job_id == job_id]


def test_what_a_job_reports_from_its_first_step_to_its_end(engine: Engine, heard: list[Report], sets: tuple[Dataset, Dataset]) -> None:
    train, evaluation = sets
    engine.join(JobRun(spec("a", data={"path": "-", "eval_path": "-"}, save_steps=2, eval_steps=2), train, evaluation))
    until_idle(engine)
    steps, evaluations = of(heard, Stepped, "a"), of(heard, Evaluated, "a")
    assert [report.progress.step for report in steps] == [1, 2, 3, 4, 5] and [r.stats.step for r in steps] == [0, 1, 2, 3, 4]
    assert [report.loss for report in steps] == list(steps[-1].progress.losses)
    assert [report.progress.evaluated_step for report in evaluations] == [0, 2, 4, 5]
    assert [report.loss for report in evaluations] == [report.progress.eval_last for report in evaluations]
    assert len({report.loss for report in evaluations}) == 4, "the evaluation does not see the training"
    assert [report.progress.step for report in of(heard, CheckpointDue, "a")] == [2, 4]  # the end saves step 5
    (end,) = of(heard, Ended, "a")
    assert heard[-1] is end and (end.status, end.progress.finished) == ("done", True) and end.state.step == 5
    batches = [report for report in heard if isinstance(report, Computed)]
    trained = sum(report.packed.tokens for report in batches if report.packed.kind == "train")
    assert trained == end.progress.num_tokens and engine.runs == {}


def test_a_checkpoint_is_due_between_the_step_and_the_next_batch(
    engine: Engine, heard: list[Report], sets: tuple[Dataset, Dataset]
) -> None:
    """The state stands at the step that the report names: what a listener copies is what a resume needs."""
    engine.join(JobRun(spec("a", save_steps=1), sets[0], None))
    kept: list[tuple[int, int, bytes]] = []

    def copy(report: Report) -> None:
        heard.append(report)
        if isinstance(report, CheckpointDue):
            kept.append((report.progress.step, report.state.step, report.state.params.numpy().tobytes()))

    engine._listen = copy
    until_idle(engine)
    assert [(step, of_state) for step, of_state, _ in kept] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert len({weights for _, _, weights in kept}) == 4


def test_a_job_that_is_stopped_goes_on_where_it_left(engine: Engine, heard: list[Report], sets: tuple[Dataset, Dataset]) -> None:
    whole = JobRun(spec("a", lora_dropout=0.1), sets[0], None)
    engine.join(whole)
    until_idle(engine)
    (end,) = of(heard, Ended, "a")
    heard.clear()
    engine.join(JobRun(spec("a", lora_dropout=0.1), sets[0], None))
    while not any(report.progress.step == 2 for report in of(heard, Stepped, "a")):
        engine.run_micro_batch()
    engine.leave("a")
    (left,) = of(heard, Ended, "a")
    assert left.status == "stopped" and left.progress.step == left.state.step < 5
    again = JobRun(spec("a", lora_dropout=0.1), sets[0], None)
    again.progress = left.progress
    engine.join(again, left.state)
    until_idle(engine)
    assert np.array_equal(of(heard, Ended, "a")[-1].state.params.numpy(), end.state.params.numpy())
    assert of(heard, Ended, "a")[-1].progress == end.progress


def test_a_job_that_cannot_join_has_ended_without_a_state(
    engine: Engine, heard: list[Report], sets: tuple[Dataset, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise MemoryError("no room for a slot")

    monkeypatch.setattr(SuperModel, "join", no_room)
    run = JobRun(spec("a"), sets[0], None)
    engine.join(run)
    assert heard == [Ended("a", run.progress, "failed", "MemoryError: no room for a slot")] and engine.runs == {}


def test_shares_hold_for_those_that_join_later(engine: Engine, sets: tuple[Dataset, Dataset]) -> None:
    engine.share(5, weights={"b": 3.0})
    for name in ("a", "b"):
        engine.join(JobRun(spec(name), sets[0], None))
    assert {name: run.flow.weight for name, run in engine.runs.items()} == {"a": 1.0, "b": 3.0}
    packed = engine.run_micro_batch()
    assert packed is not None and engine.token_budget == 5 and len(packed.rows) == 1, "longer samples come one by one"
    assert packed.tokens == packed.budget == int(sets[0].lengths[packed.rows[0].sample])


def test_an_error_of_no_job_is_noted_and_the_batch_starts_over(
    engine: Engine, heard: list[Report], sets: tuple[Dataset, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, calls = Stream.compute, [0]

    def once(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("a passing fault")
        return compute(*args)

    monkeypatch.setattr(Stream, "compute", once)
    engine.join(JobRun(spec("a"), sets[0], None))
    until_idle(engine)
    (note,) = [report for report in heard if isinstance(report, Noted)]
    assert note.line.startswith("RuntimeError: a passing fault; ") and of(heard, Ended, "a")[0].status == "done"


def test_a_micro_batch_may_be_padded_up_to_the_budget_but_not_where_a_job_is_tried_alone(
    engine: Engine, heard: list[Report], sets: tuple[Dataset, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    train = engine.model.forward_backward

    def asking(batch: PackedBatch, *rest: Any) -> Any:
        asked.append(batch.most_tokens)
        if len(asked) == 2:
            raise RuntimeError("a passing fault")
        return train(batch, *rest)

    monkeypatch.setattr(engine.model, "forward_backward", asking)
    engine.join(JobRun(spec("a"), sets[0], None))
    until_idle(engine)
    assert asked[:4] == [64, 64, 0, 64] and set(asked[4:]) == {64}
    reports = [report for report in heard if isinstance(report, Computed)]
    assert reports and all(report.computed_tokens == report.packed.tokens for report in reports), "nothing is padded on a CPU"
