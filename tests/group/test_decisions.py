"""What ranks must agree on goes through one object, and what that returns holds, whatever this rank has observed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.group.test_engine_reports import engine as engine
from tests.group.test_engine_reports import heard as heard
from tests.group.test_engine_reports import of, spec, until_idle
from tests.group.test_engine_reports import sets as sets
from tlora.data.dataset import Dataset
from tlora.group.engine import Engine
from tlora.group.exchange import Decisions
from tlora.group.isolation import Failure
from tlora.group.job_run import JobRun, Means
from tlora.group.reports import Ended, Evaluated, Report, Stepped
from tlora.group.stream import Stream

Sets = tuple[Dataset, Dataset]


def raise_at(monkeypatch: pytest.MonkeyPatch, call: int, error: Exception) -> None:
    compute, calls = Stream.compute, [0]

    def raising(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise error
        return compute(*args)

    monkeypatch.setattr(Stream, "compute", raising)


def test_a_budget_that_others_need_smaller(engine: Engine, sets: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.decisions.token_budget = lambda fits: min(fits, 27)  # type: ignore[method-assign]
    raise_at(monkeypatch, 2, torch.OutOfMemoryError("CUDA out of memory"))
    engine.join(JobRun(spec("a"), sets[0], None))
    until_idle(engine)
    assert engine.token_budget == 27


def test_a_failure_elsewhere_is_one_here(engine: Engine, heard: list[Report], sets: Sets) -> None:
    """The batch ran here; on another rank it did not, and the culprit's part fails there alone too."""
    calls = [0]

    def result(seen: Any) -> Any:
        calls[0] += 1
        return Failure(RuntimeError("elsewhere")) if calls[0] == 4 else seen  # two joins, and the second micro-batch

    engine.decisions.result = result  # type: ignore[method-assign]
    engine.decisions.culprits = lambda seen: {**seen, "b": "RuntimeError: elsewhere"}  # type: ignore[method-assign]
    for name in ("a", "b"):
        engine.join(JobRun(spec(name), sets[0], None))
    until_idle(engine)
    (bad,), (good,) = of(heard, Ended, "b"), of(heard, Ended, "a")
    assert (bad.status, bad.reason) == ("failed", "RuntimeError: elsewhere") and good.status == "done"


def test_a_join_that_fails_elsewhere_fails_here(engine: Engine, heard: list[Report], sets: Sets) -> None:
    engine.decisions.result = lambda _: Failure(MemoryError("no room on rank 1"))  # type: ignore[method-assign]
    engine.join(JobRun(spec("a"), sets[0], None))
    (end,) = of(heard, Ended, "a")
    assert end.status == "failed" and "no room on rank 1" in end.reason and engine.runs == {}


def test_early_stopping_goes_by_the_losses_that_all_agreed_on(engine: Engine, heard: list[Report], sets: Sets) -> None:
    engine.decisions.evaluations = lambda means: [Means(1.0) for _ in means]  # type: ignore[method-assign]
    job = spec("a", data={"path": "-", "eval_path": "-"}, eval_steps=1, early_stopping_patience=2)
    engine.join(JobRun(job, *sets))
    until_idle(engine)
    assert {report.loss for report in of(heard, Evaluated, "a")} == {1.0}
    (end,) = of(heard, Ended, "a")
    assert (end.status, end.progress.step) == ("done", 3), "two without gain after the first that was trained"


def test_a_job_ends_when_all_say_so(engine: Engine, heard: list[Report], sets: Sets) -> None:
    due = Decisions().end
    engine.decisions.end = lambda name, seen: ("failed", "diverged on rank 1") if len(of(heard, Stepped, name)) == 3 else due(name, seen)  # type: ignore[method-assign]
    engine.join(JobRun(spec("a"), sets[0], None))
    until_idle(engine)
    (end,) = of(heard, Ended, "a")
    assert (end.status, end.reason, end.progress.step) == ("failed", "diverged on rank 1", 3)
