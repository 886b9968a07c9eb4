"""Stages in threads of one process, with faults planted in those before the last: a job fails alone, and no other changes a bit."""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore

from tests.group.test_engine_reports import dataset, spec
from tests.tiny import make_model
from tlora.adapters.state import AdapterState
from tlora.data.dataset import Dataset
from tlora.engine.messages import StageChange, StageOrder, Stop
from tlora.engine.ranks.early_stage import EarlyStage
from tlora.engine.ranks.last_stage import StagePipeline
from tlora.engine.ranks.stage_links import StageLinks, StageSizes
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.group.reports import Ended, Noted, Report
from tlora.shape.stages import LayerRange, cut_layers
from tlora.sharing.peers import Peers, Sharing
from tlora.supermodel.supermodel import SuperModel

LAYERS, BUDGET = 4, 60


class Pipeline:
    """`stages` of a base: those before the last in threads. `engine` is the group at the last."""

    def __init__(self, base: Path, stages: int) -> None:
        cuts, met = cut_layers([1.0] * LAYERS, 1.0, [1.0] * stages), tempfile.mkdtemp()
        ranges = [LayerRange(first, stop, LAYERS) for first, stop in cuts]
        models = [SuperModel.from_pretrained(str(base), "float32", deterministic=True, shared=cut) for cut in ranges]
        self.inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in ranges[:-1]]
        self.orders: list[StageOrder] = []
        sizes = StageSizes(4 * BUDGET, models[0].base.head.weight_VH.shape[1], 1 << 16, torch.float32, torch.float32)
        links: dict[int, StageLinks] = {}

        def meet(rank: int) -> None:
            peers = Peers(Sharing(FileStore(f"{met}/store", stages), rank, stages, timeout_seconds=600))
            links[rank] = StageLinks(peers, sizes, torch.device("cpu"), True)

        meeting = [threading.Thread(target=meet, args=(rank,)) for rank in range(stages)]
        for thread in meeting:
            thread.start()
        for thread in meeting:
            thread.join()
        self.early = [EarlyStage(models[rank], links[rank], inbox) for rank, inbox in enumerate(self.inboxes)]
        self.pipeline = StagePipeline(models[-1], links[stages - 1], ranges, self.send)
        self.heard: list[Report] = []
        self.engine = Engine(models[-1], BUDGET, self.heard.append, pipeline=self.pipeline)
        self._threads = [threading.Thread(target=each.run, daemon=True) for each in self.early]

    def send(self, order: StageOrder) -> None:
        self.orders.append(order)
        for inbox in self.inboxes:
            inbox.put(order)

    @contextmanager
    def running(self) -> Iterator[Engine]:
        for thread in self._threads:
            thread.start()
        try:
            yield self.engine
        finally:
            for inbox in self.inboxes:
                inbox.put(Stop())
            for thread in self._threads:
                thread.join(600)
            assert not any(thread.is_alive() for thread in self._threads), "a stage does not end"

    def train(self, runs: Sequence[JobRun]) -> dict[str, Ended]:
        with self.running() as engine:
            for run in runs:
                engine.join(run)
            while engine.runs:
                engine.run_micro_batch()
        return {report.job_id: report for report in self.heard if isinstance(report, Ended)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pipeline") / "base"
    make_model("llama", num_hidden_layers=LAYERS).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def alone(base: Path, sets: tuple[Dataset, Dataset]) -> dict[str, Tensor]:
    """The weights of each job of `runs` over the whole base."""
    model = SuperModel.from_pretrained(str(base), "float32", deterministic=True)
    heard: list[Report] = []
    engine = Engine(model, BUDGET, heard.append)
    for run in runs(sets):
        engine.join(run)
    while engine.runs:
        engine.run_micro_batch()
    return {report.job_id: state_of(report).params for report in heard if isinstance(report, Ended)}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Dataset]:
    directory = tmp_path_factory.mktemp("sets")
    return dataset(directory / "train", 12, 0), dataset(directory / "eval", 3, 1)


def of(heard: Sequence[Report], kind: type[Any], job_id: str | None = None) -> list[Any]:
    return [report for report in heard if isinstance(report, kind) and job_id in (None, getattr(report, "job_id", None))]


def runs(sets: tuple[Dataset, Dataset]) -> list[JobRun]:
    return [
        JobRun(spec("a", max_steps=5, batch_size=4), sets[0], sets[1]),
        JobRun(spec("b", max_steps=4, batch_size=2, lora_dropout=0.1, seed=3, layers_to_transform=[0]), sets[0], None),
        JobRun(spec("wide", max_steps=3, batch_size=4, gpus=2, seed=4), sets[0], None),
    ]


def state_of(ended: Ended) -> AdapterState:
    assert ended.state is not None
    return ended.state


def same_weights(ended: dict[str, Ended], alone: dict[str, Tensor], names: Sequence[str]) -> None:
    for name in names:
        assert ended[name].status == "done", ended[name]
        assert torch.equal(state_of(ended[name]).params, alone[name]), name


@pytest.mark.parametrize("stages", [3, *(pytest.param(stages, marks=pytest.mark.slow) for stages in (2, 4))])
def test_stages_give_the_weights_of_the_whole_base(
    stages: int, base: Path, sets: tuple[Dataset, Dataset], alone: dict[str, Tensor]
) -> None:
    pipeline = Pipeline(base, stages)
    same_weights(pipeline.train(runs(sets)), alone, ["a", "b", "wide"])


def failing(times: int, error: Exception, when: Callable[[Any], bool] = lambda _: True) -> Callable[..., Callable[..., Any]]:
    """Wraps a function to raise `error` the first so many times that `when` holds of its argument."""
    left = [times]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if left[0] and when(args[0] if args else None):
                left[0] -= 1
                raise error
            return function(*args)

        return call

    return wrap


@pytest.mark.parametrize("where", [pytest.param("_go_forward", marks=pytest.mark.slow), "_go_back"])
def test_an_error_that_no_job_repeats_is_forgiven(where: str, base: Path, sets: tuple[Dataset, Dataset], alone: dict[str, Tensor]) -> None:
    pipeline = Pipeline(base, 3)
    calls = [0]

    def is_fourth(_: Any) -> bool:
        calls[0] += 1
        return calls[0] == 4

    setattr(pipeline.early[1], where, failing(1, RuntimeError("a bit flipped"), is_fourth)(getattr(pipeline.early[1], where)))
    same_weights(pipeline.train(runs(sets)), alone, ["a", "b", "wide"])
    assert any("CPU process 1: RuntimeError: a bit flipped" in note.line for note in of(pipeline.heard, Noted))


def test_a_step_that_fails_at_one_stage_fails_the_job_alone(base: Path, sets: tuple[Dataset, Dataset], alone: dict[str, Tensor]) -> None:
    """The last stage has stepped: the job must not train on with weights of two steps."""
    pipeline = Pipeline(base, 2)
    early = pipeline.early[0]
    measure = early._measure

    def spoil(job_id: str) -> None:
        measure(job_id)
        if job_id == "b":
            step: Any = early._steps[job_id]
            step.apply = failing(1, RuntimeError("the driver is gone"))(step.apply)

    early._measure = spoil  # type: ignore[method-assign]
    ended = pipeline.train(runs(sets))
    same_weights(ended, alone, ["a", "wide"])
    assert ended["b"].status == "failed" and "samples of b, which has not entered this stage" in ended["b"].reason


def test_memory_that_runs_out_on_one_stage_halves_the_budget_of_all(
    base: Path, sets: tuple[Dataset, Dataset], alone: dict[str, Tensor]
) -> None:
    pipeline = Pipeline(base, 2)
    early = pipeline.early[0]
    early._go_forward = failing(1, torch.OutOfMemoryError("CUDA out of memory"))(early._go_forward)  # type: ignore[method-assign]
    same_weights(pipeline.train(runs(sets)), alone, ["a", "b", "wide"])
    assert any("out of memory: the token budget is now" in note.line for note in of(pipeline.heard, Noted))


@pytest.mark.slow
def test_a_job_that_fails_at_one_stage_fails_alone(base: Path, sets: tuple[Dataset, Dataset], alone: dict[str, Tensor]) -> None:
    """Each time that a micro-batch has its samples."""
    pipeline = Pipeline(base, 3)
    early = pipeline.early[0]
    has_b = failing(1 << 30, ValueError("a bad sample"), lambda order: any(row.job_id == "b" for row in order.rows))
    early._go_forward = has_b(early._go_forward)  # type: ignore[method-assign]
    ended = pipeline.train(runs(sets))
    same_weights(ended, alone, ["a", "wide"])
    assert (ended["b"].status, ended["b"].reason) == ("failed", "StageError: CPU process 0: ValueError: a bad sample")


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_job_that_a_stage_cannot_take_in_fails_alone(
    rank: int, base: Path, sets: tuple[Dataset, Dataset], alone: dict[str, Tensor]
) -> None:
    """It comes while others are in the middle of a batch, whose gradients stay."""
    pipeline = Pipeline(base, 3)
    early = pipeline.early[rank]
    is_late = failing(1, torch.OutOfMemoryError("no room"), lambda change: change.job_id == "late")
    early._enter = is_late(early._enter)  # type: ignore[method-assign]
    first = runs(sets)
    with pipeline.running() as engine:
        for run in first:
            engine.join(run)
        for _ in range(2):
            engine.run_micro_batch()
        engine.join(JobRun(spec("late"), sets[0], None))
        while engine.runs:
            engine.run_micro_batch()
    ended = {report.job_id: report for report in of(pipeline.heard, Ended)}
    same_weights(ended, alone, ["a", "b", "wide"])
    assert (ended["late"].status, ended["late"].reason) == ("failed", f"OutOfMemoryError: CPU process {rank}: OutOfMemoryError: no room")


@pytest.mark.slow
def test_a_job_leaves_in_the_middle_and_comes_back(base: Path, sets: tuple[Dataset, Dataset], alone: dict[str, Tensor]) -> None:
    pipeline = Pipeline(base, 2)
    with pipeline.running() as engine:
        for run in runs(sets):
            engine.join(run)
        while not any(run.progress.step >= 2 for name, run in engine.runs.items() if name == "b"):
            engine.run_micro_batch()
        engine.leave("b")
        (left,) = of(pipeline.heard, Ended, "b")
        again = runs(sets)[1]
        again.progress = left.progress
        engine.join(again, state_of(left))
        while engine.runs:
            engine.run_micro_batch()
    ended = {report.job_id: report for report in of(pipeline.heard, Ended)}
    assert left.status == "stopped" and left.progress.step < 4
    same_weights(ended, alone, ["a", "b", "wide"])
    assert any(isinstance(order, StageChange) and order.what == "leave" for order in pipeline.orders)
