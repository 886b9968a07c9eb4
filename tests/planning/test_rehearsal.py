"""The largest micro-batches before the first step: what they take more than planned is left free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.interpreter import MARKS
from tests.planning.test_memory_probe import COUNTED, DEVICE, SPECS, make_shared
from tests.planning.test_memory_probe import eager as eager
from tlora.batching.recompute_plan import RecomputePlan
from tlora.job import RunSpec
from tlora.planning.memory_probe import rehearse
from tlora.planning.plan import RunPlan, settle
from tlora.planning.planned_job import PlannedJob
from tlora.shape.memory import Phase
from tlora.supermodel.supermodel import SuperModel

pytestmark = MARKS
BUDGET, LONGEST = 16, 32  # tokens; a sample of 32 is computed as 128
KEPT, SAVED = 200, 100  # bytes a token, and of them those of a layer that is recomputed


class Taking:
    """What an allocator would tell where each micro-batch takes `more` bytes a token than is planned, or there is none for large ones."""

    def __init__(self, model: SuperModel, more: int, most: int = 10**9) -> None:
        self._model, self._more, self._most, self._tokens = model, more, most, 0
        self.seen: list[tuple[int, int]] = []
        model.base.decoder.register_forward_pre_hook(self._begin, with_kwargs=True)

    def _begin(self, _module: object, _args: object, kwargs: dict[str, Any]) -> None:
        self._tokens = kwargs["input_ids"].shape[1]
        self.seen.append((self._tokens, self._model.recompute.layers(self._tokens)))
        if self._tokens > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def allocated(self) -> int:
        return 0

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        return self._tokens * (KEPT - SAVED * self._model.recompute.layers(self._tokens) + self._more)


@pytest.fixture
def model() -> Iterator[SuperModel]:
    with torch.compiler.set_stance("force_eager"):
        yield make_shared()
    torch._dynamo.reset()


def plan_for(model: SuperModel, bytes_of_128: int, budget: int = BUDGET) -> tuple[RunSpec, RunPlan]:
    """With so much room beside the adapter for the longest sample."""
    run = RunSpec.model_validate({"base_model": "b", "jobs": SPECS[:1], "token_budget": budget})
    memory = replace(COUNTED, phases=(Phase(0.0, KEPT, SAVED),), num_layers=2, base_bytes=0, step_copies=0, measured=True)
    jobs = (PlannedJob(run.jobs[0], layout=model.layout(run.jobs[0])),)
    layouts = [job.layout for job in jobs if job.layout is not None]
    limit = memory.total_bytes(layouts, 0) + bytes_of_128
    return run, settle(run, RunPlan(jobs, BUDGET, RecomputePlan(), memory, limit, LONGEST, {}), memory, DEVICE)


def test_a_plan_that_holds_stays(model: SuperModel) -> None:
    run, plan = plan_for(model, 128 * 150)
    assert (plan.largest, plan.recomputed_layers, plan.recompute.layers(BUDGET)) == (128, 1, 0)
    meter, notes = Taking(model, 0), list[str]()
    assert rehearse(run, plan, model, meter, notes.append) == plan and notes == []
    assert set(meter.seen) == {(128, 1), (BUDGET, 0)} and model.bank.jobs() == [] and model.recompute == RecomputePlan()


@pytest.mark.slow
def test_what_they_take_more_is_left_free_once(model: SuperModel) -> None:
    """The longest sample, of which no layer was to be recomputed, recomputes one then."""
    run, plan = plan_for(model, 128 * 220)
    assert plan.recomputed_layers == 0
    meter, notes = Taking(model, 50), list[str]()
    found = rehearse(run, plan, model, meter, notes.append)
    assert found.memory.base_bytes == 128 * 50 and found.recomputed_layers == 1 and len(notes) == 1
    assert "more than planned: the plan leaves 6.2 KiB more free" in notes[0] and not found.jobs[0].problems
    assert (128, 0) in meter.seen and (128, 1) in meter.seen and model.bank.jobs() == []


def test_memory_that_runs_out_leaves_a_part_of_the_limit_free_each_time(model: SuperModel) -> None:
    run, plan = plan_for(model, 128 * 220)
    notes = list[str]()
    found = rehearse(run, plan, model, Taking(model, 0, most=100), notes.append)
    assert found.memory.base_bytes == len(notes) * (plan.limit_bytes // 16) > 0 and all("ran out of memory" in line for line in notes)
    assert model.bank.jobs() == []


def test_samples_that_all_fit_the_budget_are_not_tried(model: SuperModel) -> None:
    run, plan = plan_for(model, 128 * 220, budget=LONGEST)
    meter = Taking(model, 50)
    assert rehearse(run, plan, model, meter, print) == plan and meter.seen == []
