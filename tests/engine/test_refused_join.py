"""A job for which there is no memory beside its neighbours waits; they notice nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_worker import Orders, of, work
from tests.engine.test_worker import report_each_step as report_each_step
from tests.engine.test_worker_options import needed
from tests.engine.tiny_runs import sha256
from tlora.engine.messages import SetPlan
from tlora.supermodel.supermodel import SuperModel
from tlora.worker_protocol import Delayed, Finished, Join, Joined, Refused, Stepped


def back_when_ended(made: Orders, name: str, neighbour: str) -> Any:
    """The refused job is told to join again when its neighbour has ended."""

    def answer(report: Any) -> list[Any]:
        return [made.join(name)] if isinstance(report, Finished) and report.job_id == neighbour else []

    return answer


@pytest.mark.slow
def test_running_out_of_memory_costs_the_neighbour_no_step(made: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join, refused = SuperModel.join, list[str]()

    def full(model: SuperModel, job_id: str, *args: Any) -> None:
        if job_id == "short" and not refused:
            refused.append(job_id)
            raise torch.OutOfMemoryError("CUDA out of memory")
        join(model, job_id, *args)

    def answer(report: Any) -> list[Any]:
        start = [made.join("short")] if isinstance(report, Stepped) and (report.job_id, report.steps) == ("mover", 3) else []
        return start + back_when_ended(made, "short", "mover")(report)

    monkeypatch.setattr(SuperModel, "join", full)
    told = work(made.load(tmp_path), [made.join("mover")], answer)
    (report,) = of(told, Refused, "short")
    assert "out of memory" in report.reason and len(of(told, Joined, "short")) == 1
    assert [step.steps for step in of(told, Stepped, "mover")] == list(range(1, 15))
    for name in ("mover", "short"):
        assert of(told, Finished, name) and sha256(tmp_path / name) == made.shas[name]


def test_a_job_that_never_fits_fails(made: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone there is nobody to wait for."""

    join = SuperModel.join

    def full(model: SuperModel, job_id: str, *args: Any) -> None:
        if job_id == "short":
            raise torch.OutOfMemoryError("CUDA out of memory")
        join(model, job_id, *args)

    monkeypatch.setattr(SuperModel, "join", full)
    told = work(made.load(tmp_path), [made.join("short")])
    assert not of(told, Refused, "short") and [type(report).__name__ for report in told if hasattr(report, "job_id")] == ["Failed"]


def test_below_a_memory_limit_a_job_waits_for_its_turn(made: Orders, tmp_path: Path) -> None:
    small = next(spec for spec in made.run.jobs if spec.name == "short")
    large = small.model_copy(update={"name": "large", "r": 64, "max_steps": 2})
    other = large.model_copy(update={"name": "other"})
    limit = needed(made.base, [large], 64)
    waiting: list[str] = []

    def answer(report: Any) -> list[Any]:
        if isinstance(report, Refused):
            waiting.append(report.job_id)
        if isinstance(report, Finished) and waiting:
            return [replace(made.join("short"), job=large if waiting.pop() == "large" else other)]
        return []

    first = [SetPlan(64), replace(made.join("short"), job=large), replace(made.join("short"), job=other)]
    told = work(replace(made.load(tmp_path), memory_limit=limit), first, answer, together=True)
    (refused,) = [report for report in told if isinstance(report, Refused)]
    assert "below memory_limit" in refused.reason
    (delayed,) = [report for report in told if isinstance(report, Delayed)]
    assert (delayed.job_id, delayed.why) == (refused.job_id, "memory for its adapter, next to 1 other job on its CPU process")
    assert {report.job_id for report in told if isinstance(report, Finished)} == {"large", "other"}
    assert isinstance(made.join("short"), Join)
