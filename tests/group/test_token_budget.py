"""Memory that runs out: for how long its consequences last, and what of a job's replicas is tried again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.ranks.test_span_exchange import World, story
from tests.group.test_decisions import raise_at
from tests.group.test_engine_reports import engine as engine
from tests.group.test_engine_reports import heard as heard
from tests.group.test_engine_reports import sets as sets
from tests.group.test_engine_reports import spec
from tests.group.test_replicas import Sets, assert_same, ended, spanning, trained
from tests.tiny import make_model
from tlora.engine.ranks.spanning import Mailbox
from tlora.group import engine as module
from tlora.group import token_budget
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.group.reports import Ended, Noted, Report
from tlora.group.stream import Stream
from tlora.group.token_budget import CALM, TokenBudget
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

FULL = "CUDA out of memory"


def raising(call: int, do: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    """`do`, of which one call runs out of memory first."""

    def once(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise torch.OutOfMemoryError(FULL)
        return do(*args)

    return once


# -- the budget ------------------------------------------------------------------------------------------------------------


def calm(budget: TokenBudget, count: int) -> list[int]:
    """What it wants to be, over so many micro-batches."""
    return [tokens for _ in range(count) if (tokens := budget.see_calm()) is not None]


def test_a_halved_budget_grows_again_to_what_it_was_and_no_further() -> None:
    budget = TokenBudget(1000)
    assert calm(budget, 3 * CALM) == []
    for least in (1, 1):
        budget.lower(budget.next_lower(least) or 0)
    assert budget.tokens == 250 and calm(budget, CALM - 1) == []
    for expected in (500, 1000):
        (tokens,) = calm(budget, 1)
        budget.grow(tokens)
        assert budget.tokens == expected and calm(budget, CALM - 1) == []
    assert calm(budget, 3 * CALM) == []
    assert TokenBudget(100).next_lower(100) is None and TokenBudget(100).next_lower(70) == 70


def test_what_runs_out_again_and_again_is_tried_less_and_less_often() -> None:
    budget, waits = TokenBudget(1000), []
    for _ in range(9):
        budget.lower(500)
        waits.append(next(count for count in range(1, 10**6) if budget.see_calm() is not None))
        budget.grow(1000)
    assert waits == [CALM * 2**k for k in range(7)] + [6400] * 2
    budget.order(1000)
    budget.lower(500)
    assert calm(budget, CALM) == [1000], "a budget that is ordered anew begins anew"


def test_a_job_that_leaves_makes_room_at_once() -> None:
    budget = TokenBudget(1000)
    budget.lower(500)
    budget.room_came()
    assert calm(budget, 1) == [1000]


@pytest.mark.slow
def test_an_engine_grows_its_budget_again_and_forgets_what_nobody_explained(
    engine: Engine, heard: list[Report], sets: Sets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_budget, "CALM", 5)
    monkeypatch.setattr(module, "CALM", 5)
    engine._budget = TokenBudget(60)
    engine.join(JobRun(spec("a", max_steps=30, batch_size=4), sets[0], None))
    full = engine.token_budget
    raise_at(monkeypatch, 3, torch.OutOfMemoryError(FULL))
    released = list[int]()
    monkeypatch.setattr(engine.model, "release_memory", lambda: released.append(engine.token_budget))
    budgets: list[int] = []
    while engine.run_micro_batch() is not None:
        budgets.append(engine.token_budget)
    assert min(budgets) < full and budgets[-1] == full and released == [full]
    notes = [report.line for report in heard if isinstance(report, Noted)]
    assert notes == [
        f"out of memory: the token budget is now {min(budgets)}",
        f"memory has sufficed for a while: the token budget is {full} again",
    ]


@pytest.mark.slow
def test_errors_that_no_job_repeats_are_forgiven_as_long_as_they_are_rare(
    engine: Engine, sets: Sets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker lives for months: four errors in all of them are not four in a row."""
    monkeypatch.setattr(module, "CALM", 3)
    engine.join(JobRun(spec("a", max_steps=60, batch_size=4), sets[0], None))
    compute, calls = Stream.compute, [0]

    def shaky(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] % 8 == 0:
            raise RuntimeError("a bit flipped")
        return compute(*args)

    monkeypatch.setattr(Stream, "compute", shaky)
    while engine.run_micro_batch() is not None:
        pass
    assert calls[0] > 8 * (module._FORGIVEN + 2)
    often, calls[0] = JobRun(spec("b", max_steps=60, batch_size=4), sets[0], None), 0
    monkeypatch.setattr(module, "CALM", 10**6)
    engine.join(often)
    with pytest.raises(RuntimeError, match="a bit flipped"):
        while engine.run_micro_batch() is not None:
            pass


# -- between replicas ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "call"), [("gradient", 2), pytest.param("set_gradient", 5, marks=pytest.mark.slow)])
def test_replicas_in_turn_go_on_where_memory_runs_out_between_them(
    what: str, call: int, sets: Sets, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = spanning(gpus=3)
    heard: list[Report] = []
    model = SuperModel(make_base(make_model(), "tiny"), deterministic=True)
    engine, calls = Engine(model, 300, heard.append), [0]
    monkeypatch.setattr(model, what, raising(call, getattr(model, what), calls))
    engine.join(JobRun(job, sets[0], None, 3))
    while engine.runs:
        engine.run_micro_batch()
    assert calls[0] > call and engine.token_budget <= 300
    assert_same(ended(heard, job.name), trained(job, sets[0], None))


@pytest.mark.parametrize(
    ("rank", "what", "call"),
    [
        (1, "gradient", 2),
        pytest.param(2, "set_gradient", 3, marks=pytest.mark.slow),
        pytest.param(0, "rewrite", 1, marks=pytest.mark.slow),
        pytest.param(2, "empty", 4, marks=pytest.mark.slow),
    ],
)
def test_spanning_jobs_go_on_where_memory_runs_out_while_a_gradient_is_published_or_read(
    rank: int, what: str, call: int, sets: Sets, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, spans = story()
    world, calls = World(jobs, spans, sets, 3, [60] * 3), [0]
    engine = world.engines[rank]
    of_what = Mailbox if what == "empty" else engine.model
    monkeypatch.setattr(of_what, what, raising(call, getattr(of_what, what), calls))
    world.run(random.Random(call))
    assert calls[0] > call or (what == "rewrite" and calls[0] >= call)
    assert not world.faults
    for job in jobs[1:]:
        assert_same(ended(world.heard[spans[job.name].lead_rank], job.name), trained(job, sets[0], sets[1] if job.eval_steps else None))


def test_a_job_fails_where_no_lower_budget_is_left(sets: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    job = spanning(gpus=3)
    heard: list[Report] = []
    model = SuperModel(make_base(make_model(), "tiny"), deterministic=True)
    engine = Engine(model, 300, heard.append)

    def full(_: str) -> Any:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(model, "gradient", full)
    engine.join(JobRun(job, sets[0], None, 3))
    while engine.runs:
        engine.run_micro_batch()
    (end,) = [report for report in heard if isinstance(report, Ended)]
    assert end.status == "failed" and FULL in end.reason and len([r for r in heard if isinstance(r, Noted)]) > 1
