"""Nano-batches over stages in threads: the bytes of one process at any number of slices; the number found is kept and taken up again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import in_every_run
from tests.engine.ranks.test_stage_pipeline import Pipeline, base, of, state_of
from tests.group.test_engine_reports import dataset, spec
from tlora.batching.nano_batches import SliceCount
from tlora.data.dataset import Dataset
from tlora.group import nano_batching
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.group.reports import Computed, Ended, Noted, Stepped
from tlora.supermodel.supermodel import SuperModel

__all__ = ["base"]  # the fixture
BUDGET, TRIALS = 200, 10


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return dataset(tmp_path_factory.mktemp("sets") / "train", 24, 0)


def lone(data: Dataset, **fields: Any) -> JobRun:
    return JobRun(spec("a", **{"max_steps": 2, "batch_size": 8, "lora_dropout": 0.1, **fields}), data, None)


def fixed(count: int) -> Callable[[int, int], SliceCount]:
    return lambda most, _: SliceCount(most, count, trials=0)


def of_one_process(base: Path, runs: Sequence[JobRun]) -> dict[str, Tensor]:
    model, ended = SuperModel.from_pretrained(str(base), "float32", deterministic=True), dict[str, Tensor]()
    engine = Engine(
        model, BUDGET, lambda report: ended.update({report.job_id: state_of(report).params} if isinstance(report, Ended) else {})
    )
    for run in runs:
        engine.join(run)
    while engine.runs:
        engine.run_micro_batch()
    return ended


@pytest.fixture(scope="module")
def alone(base: Path, data: Dataset) -> Tensor:
    return of_one_process(base, [lone(data)])["a"]


def staged(base: Path, stages: int = 2) -> Pipeline:
    pipeline = Pipeline(base, stages)
    pipeline.engine.share(BUDGET)
    return pipeline


@pytest.mark.parametrize(("stages", "count"), in_every_run([(2, 1), (2, 2), (2, 3), (2, 4), (2, 8), (3, 5)], 2, 5))
def test_any_number_of_slices_gives_the_bytes_of_one_process(base: Path, data: Dataset, alone: Tensor, stages: int, count: int) -> None:
    pipeline = staged(base, stages)
    pipeline.engine.nano_batching.make_choice = fixed(count)
    ended = pipeline.train([lone(data)])
    assert ended["a"].status == "done" and torch.equal(state_of(ended["a"]).params, alone)
    slices = [report.packed for report in of(pipeline.heard, Computed)]
    assert count < len(slices) <= 2 * count if count > 1 else len(slices) == 2
    assert all(len(packed.rows) <= -(-8 // count) + 2 for packed in slices)


def test_slices_of_several_jobs_give_their_bytes(base: Path, data: Dataset) -> None:
    def runs() -> list[JobRun]:
        return [lone(data), JobRun(spec("b", max_steps=4, batch_size=2, r=16, seed=3), data, None), lone_of_two_replicas(data)]

    alone, pipeline = of_one_process(base, runs()), staged(base, 3)
    pipeline.engine.nano_batching.make_choice = fixed(6)
    ended = pipeline.train(runs())
    for name, params in alone.items():
        assert torch.equal(state_of(ended[name]).params, params), name


def lone_of_two_replicas(data: Dataset) -> JobRun:
    return JobRun(spec("wide", max_steps=2, batch_size=4, gpus=2, seed=4), data, None)


class Clock:
    """Of the last stage, by which a step takes as long as a pipeline's of two stages, with slices that cost `fixed` of its work each, and
    in proportion to the work of its batch.
    """

    def __init__(self, engine: Engine, fixed: float) -> None:
        self._engine, self._fixed, self._now = engine, fixed, 0.0

    def __call__(self) -> float:
        """Called once a step, after it."""
        nano = self._engine.nano_batching
        slices = nano.slices or 1
        self._now += (1 / slices + self._fixed) * (slices + 1) * nano._work / nano._all_work
        return self._now


def test_the_number_is_found_by_the_last_stages_clock_recorded_and_taken_up(
    base: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, steps = staged(base), TRIALS + 3
    pipeline.engine.nano_batching.make_choice = lambda most, first: SliceCount(most, first, trials=TRIALS)
    monkeypatch.setattr(pipeline.pipeline, "seconds", Clock(pipeline.engine, 0.06))
    with pipeline.running() as engine:
        engine.join(lone(data, max_steps=steps, batch_size=4))
        while engine.runs["a"].progress.step < TRIALS + 2:
            engine.run_micro_batch()
        engine.leave("a")
    (ended,) = of(pipeline.heard, Ended)
    assert (ended.progress.nano_batches, ended.progress.nano_batches_of) == (4, "2 stages: a")
    (note,) = [report.line for report in of(pipeline.heard, Noted) if "nano-batches" in report.line]
    assert note.startswith("nano-batches: global batches are cut into 4 (a step with 2: 1.68 s, ")
    found = [report.progress.nano_batches for report in of(pipeline.heard, Stepped)]
    assert found[:TRIALS] == [0] * TRIALS and found[-1] == 4

    again, run = staged(base), lone(data, max_steps=steps, batch_size=4)
    run.progress = ended.progress
    again.engine.nano_batching.make_choice = lambda most, first: pytest.fail("it tries again what is known")
    with again.running() as engine:
        engine.join(run, state_of(ended))
        while engine.runs:
            engine.run_micro_batch()
    slices = of(again.heard, Computed)
    left = steps - ended.progress.step
    assert left > 0 and 2 * left < len(slices) <= 4 * left
    assert torch.equal(state_of(of(again.heard, Ended)[0]).params, of_one_process(base, [lone(data, max_steps=steps, batch_size=4)])["a"])


def test_another_job_opens_the_choice_anew(base: Path, data: Dataset) -> None:
    pipeline, opened = staged(base), list[tuple[int, int]]()

    def choose(most: int, first: int) -> SliceCount:
        opened.append((most, first))
        return SliceCount(most, first)

    pipeline.engine.nano_batching.make_choice = choose
    pipeline.train([lone(data, max_steps=3), JobRun(spec("b", max_steps=1, batch_size=2), data, None)])
    assert opened == [(10, 2), (8, 2)]  # both, and a alone


def test_jobs_that_fill_all_stages_are_not_cut(base: Path, data: Dataset) -> None:
    pipeline = staged(base)
    pipeline.engine.share(24)
    with pipeline.running() as engine:
        for name in "abc":
            engine.join(JobRun(spec(name, max_steps=1, batch_size=8), data, None))
        engine.run_micro_batch()
        assert engine.nano_batching.slices is None
        engine.stop()


def test_a_base_in_one_process_cuts_nothing(base: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nano_batching, "pack_slices", lambda *_, **__: pytest.fail("a slice in one process"))
    of_one_process(base, [lone(data)])


def test_a_planted_slice_that_is_dropped_is_seen(base: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken from the job's flow, and in no micro-batch: the step would be taken without it."""
    real, calls = nano_batching.pack_slices, list[int]()

    def drop(*args: Any, **settings: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 2:
            real(*args, **settings)
        return real(*args, **settings)

    monkeypatch.setattr(nano_batching, "pack_slices", drop)
    pipeline = staged(base)
    pipeline.engine.nano_batching.make_choice = fixed(4)
    with pytest.raises(AssertionError, match="a: batch 0 leaves after 7 of 8 samples"):
        pipeline.train([lone(data)])


def test_a_planted_second_batch_in_flight_is_seen(base: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    real = nano_batching.pack_slices

    def hasten(flows: Any, *args: Any, **settings: Any) -> Any:
        packed = real(flows, *args, **settings)
        if packed is not None and not flows[0].pending:  # its last slice: the next batch enters beside it
            run.progress = replace(run.progress, step=run.progress.step + 1)
            run.offer()
        return packed

    monkeypatch.setattr(nano_batching, "pack_slices", hasten)
    run, pipeline = lone(data), staged(base)
    pipeline.engine.nano_batching.make_choice = fixed(2)
    with pytest.raises(AssertionError, match=r"a: batch 1 (enters before|leaves)|a: samples of batch"):
        pipeline.train([run])
