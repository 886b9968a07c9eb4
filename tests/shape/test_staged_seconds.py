"""Seconds of a group over a base in stages: worked out by hand, and as the planner's model of a pipeline has them."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.shape.made_stages import with_made_stages
from tests.shape.test_base_parts import PARTS
from tlora.batching.flow import Item
from tlora.batching.pipeline_model import OfferedJob, Pipeline, StageOverhead, Stream, turn_seconds
from tlora.shape.base_parts import StageRooms
from tlora.shape.cost import BaseConstants, CostModel
from tlora.shape.memory import BaseMemory
from tlora.shape.sharing import Member, group_step_seconds
from tlora.shape.stages import LATENCY_SECONDS

WHOLE = BaseMemory((10**10,), 0.0, 0.0, 0.0)


def made(launch_seconds: float = 0.0, boundary_bytes: int = 0, in_stages: bool = True) -> CostModel:
    """1,024 tokens/s a GPU, in two stages of which each takes half of that; exchanges of whole bases take a second."""
    constants = BaseConstants(1024.0, launch_seconds, 0.0, 1.0, 1.0, 1e10, 0.0, 1e11, {})
    cost = CostModel({"base": constants}, fill_share=1.0, stage_rates=(1e6, 1e5))
    memory = with_made_stages(WHOLE, *([5 * 10**9] * 7), boundary_bytes=boundary_bytes)
    cost.memory["base"] = memory.cut() if in_stages else memory
    return cost


def lone(cost: CostModel, tokens: float, budget: int = 2048, gpus: int = 2) -> float:
    return cost.lone_step_seconds("base", budget, gpus, 1, tokens)


def through(stages: int, batches: list[int], latency: float = 0.0) -> float:
    """Seconds in which the planner's pipeline lets one global batch of each job through, of so many micro-batches of 1,000 tokens each.
    Their samples have 100; a stage takes a second for a micro-batch.
    """
    offered = {
        f"{number}": OfferedJob(f"{number}", itertools.repeat([Item(sample, 100) for sample in range(10 * count)]))
        for number, count in enumerate(batches)
    }
    overhead = StageOverhead(latency=latency, host_ahead=True)
    found = Pipeline(Stream(offered, 1000, stages), lambda entry: entry.tokens / 1000 * stages, stages, overhead).run(600, 100)
    return found.seconds / found.tokens * 1000 * sum(batches)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("jobs", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("latency", [0.0, 0.005])
def test_a_turn_takes_as_long_as_in_the_pipeline_of_the_planner(stages: int, jobs: int, latency: float) -> None:
    """Within 3 %. Several jobs with fewer than two micro-batches a stage miss turns there, as news of an end come late: up to a fifth."""
    for count in range(1, 9):
        if stages <= jobs * count <= 4 * stages:
            found = turn_seconds(jobs * count, 1.0, stages, [(1 / jobs, 1.0)] * jobs, latency)
            pipeline, late = through(stages, [count] * jobs, latency), latency and jobs > 1 and jobs * count < 2 * stages
            assert 0.97 * pipeline / (1.17 if late else 1.0) <= found <= 1.03 * pipeline, (count, "micro-batches of each")


@pytest.mark.parametrize(("stages", "batches"), [(2, [3, 1]), (2, [8, 1, 1]), (4, [3, 1]), (4, [4, 1]), (4, [6, 2]), (4, [4, 2, 2])])
def test_it_does_with_unequal_batches(stages: int, batches: list[int]) -> None:
    parts = [(own / sum(batches), 1.0) for own in batches]
    assert turn_seconds(sum(batches), 1.0, stages, parts) == pytest.approx(through(stages, batches), rel=0.03)


def test_a_lone_job_leaves_bubbles() -> None:
    """2,048 tokens take two seconds on one GPU, and 1,024 half a second in a stage: the second of two follows in the last one."""
    cost = made()
    assert lone(cost, 2048.0) == pytest.approx(3 * 0.5 + 3 * LATENCY_SECONDS)
    assert lone(cost, 8192.0, budget=4096) == pytest.approx(9 * 0.5 + 3 * LATENCY_SECONDS), "in eight slices of 1,024, not four of 2,048"
    assert lone(cost, 1024.0) == pytest.approx(3 * 0.25 + 3 * LATENCY_SECONDS), "at least one for each stage"
    for tokens in (256.0, 1024.0, 5000.0, 30_000.0):
        assert tokens / 2048 < lone(cost, tokens) < tokens / 1024, "no faster than both GPUs, and no slower than one"


def test_where_micro_batches_cost_something_themselves_there_are_fewer() -> None:
    """Of N slices of 8,192 tokens one takes a stage 0.25 + 4 / N seconds: (N + 1) times that is least for N = 4."""
    each = {count: (count + 1) * (0.25 + 4.0 / count) for count in range(2, 9)}
    assert min(each, key=each.__getitem__) == 4
    assert lone(made(launch_seconds=0.5), 8192.0, budget=16384) == pytest.approx(each[4] + 3 * LATENCY_SECONDS)


def test_a_batch_beyond_the_budget_goes_in_full_micro_batches() -> None:
    assert lone(made(launch_seconds=100.0), 8192.0, budget=2048) == pytest.approx(9 * (50.0 + 0.5) + 3 * LATENCY_SECONDS)


def test_two_jobs_fill_the_stages_between_them() -> None:
    cost = made()
    seconds = group_step_seconds(cost, "base", 4096, 2, 1, [Member(2048.0, 1.0), Member(2048.0, 1.0)])
    assert seconds == pytest.approx([2.0, 2.0], rel=1e-3), "4,096 tokens at twice 1,024 a second"
    assert seconds[0] < 2 * lone(cost, 2048.0)
    saturated = group_step_seconds(cost, "base", 4096, 2, 1, [Member(8192.0, 1.0), Member(8192.0, 1.0)])
    assert saturated == pytest.approx([8.0, 8.0])


def test_a_small_job_beside_a_large_one_fills_little_of_its_bubbles() -> None:
    """Of four stages the last three wait at the end of a batch of 16 slices, for as long as the small one offers nothing."""
    large, small = group_step_seconds(made(), "base", 32768, 4, 1, [Member(16384.0, 1.0), Member(1024.0, 1.0)])
    assert large == small, "both step once in a turn"
    alone, full = lone(made(), 16384.0, budget=32768, gpus=4), (16384 + 1024) / 4096
    assert full < large < alone + 1024 / 4096


def test_hidden_states_are_copied_at_both_ends_of_a_boundary() -> None:
    """Nothing hides them: each of two stages copies a token's forward and its gradient back, and a middle one twice as many."""
    cost = made(boundary_bytes=1000)
    for gpus, nodes, copies in ((2, 1, 2), (4, 1, 4), (2, 2, 2)):
        rate = cost.stage_rates[nodes > 1]
        found = cost.micro_batch_seconds("base", 8192.0, gpus, nodes, 1)
        assert found == pytest.approx(8192 / (1024 * gpus) + copies * 1000 * 8192 / rate)


def test_the_slowest_stage_has_the_head() -> None:
    """Eight layers and a head of as much work as one: in two stages four layers and five."""
    rooms = StageRooms(PARTS)
    assert rooms.slowest(2) == rooms.slowest(8) == 1.0 and rooms.slowest(16) == 2.0, "no more stages than layers"
    assert rooms.slowest(3) == pytest.approx(3 * 3 / 8)
    head = StageRooms(PARTS.__class__(**{**{name: getattr(PARTS, name) for name in PARTS.__slots__}, "head_weights": 50 * 10**6}))
    assert head.slowest(2) == pytest.approx(2 * 5 / 9, rel=1e-4)
    assert head.boundary_bytes == 64 * 2


def test_alone_is_never_slower_than_under_a_smaller_budget() -> None:
    for launch in (0.0, 0.01, 0.5):
        cost = made(launch)
        for gpus in (2, 3, 4, 8):
            for tokens in (300.0, 2048.0, 7000.0, 60_000.0, 1e6):
                alone = cost.alone_step_seconds("base", tokens, gpus)
                assert all(alone <= lone(cost, tokens, budget * gpus, gpus) * 1.001 for budget in cost.budgets)
                assert alone > cost.micro_batch_seconds("base", tokens, gpus, 1, 1), "which never wait"


def test_a_base_that_is_in_no_stages_costs_what_it_did() -> None:
    cost = made(in_stages=False)
    assert not cost.is_cut("base", 2) and not made().is_cut("base", 1)
    assert lone(cost, 2048.0) == pytest.approx(2048 / 2048 + 1.0), "with the exchange of gradients"
    assert lone(made(), 2048.0, budget=4096, gpus=1) == pytest.approx(2.0), "whole on one GPU"
    assert math.isclose(made().largest_micro_batch("base", 3.0, 2, 1, 1), 3.0 * 2048)
