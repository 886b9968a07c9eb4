"""The plan of a group: against all prepared budgets, tried one by one."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.scheduler.mirror import made_cost, made_spec, made_state, waiting_job
from tlora.protocol import ParallelPlan
from tlora.scheduler.job import Job
from tlora.scheduler.plans import exclusive_plan, shared_plan
from tlora.scheduler.state import ClusterState
from tlora.shape.cost import BaseConstants, CostModel
from tlora.shape.sharing import Member, group_step_seconds

BASE = "north"


def job(state: ClusterState, tokens: float, gpus: int = 1, **others: object) -> Job:
    return waiting_job(state, made_spec(f"j{len(state.jobs)}", gpus, tokens=tokens, **others))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "gpus", "longest", "budget"),
    [(10.0, 1, 64, 1024), (1024.0, 1, 64, 1024), (1025.0, 1, 64, 2048), (8000.0, 4, 64, 2048), (1e6, 1, 64, 16384), (10.0, 1, 3000, 4096)],
)
def test_alone_the_smallest_budget_that_holds_a_step_and_a_sample(tokens: float, gpus: int, longest: int, budget: int) -> None:
    state = made_state(8)
    found = exclusive_plan(state.cost, job(state, tokens, gpus, longest=longest), gpus)
    assert found == ParallelPlan(gpus, budget * gpus)


def test_alone_the_largest_budget_that_fits_where_none_that_holds_a_step_does() -> None:
    state = made_state(8)
    large = job(state, 1e5, 2, parameters=17 * 10**8)  # 52 + 30.6 GB of 92, and 4.1 for each 4,096 tokens
    assert exclusive_plan(state.cost, large, 2) == ParallelPlan(2, 2 * 8192)


def test_a_job_without_any_budget_is_a_bug_of_whoever_let_it_in() -> None:
    state = made_state(8)
    with pytest.raises(AssertionError, match="no prepared budget holds a sample of 20000"):
        exclusive_plan(state.cost, job(state, 10.0, longest=20_000), 1)


@given(
    tokens=st.lists(st.floats(50.0, 40_000.0), min_size=1, max_size=8),
    bounds=st.lists(st.sampled_from((1.0, 1.2, 2.0, 5.0, 20.0, math.inf)), min_size=8, max_size=8),
    parameters=st.sampled_from((10**7, 2 * 10**8, 6 * 10**8)),
    longest=st.sampled_from((64, 2000, 9000)),
    gpus=st.sampled_from((1, 2, 8, 16)),
    check_bounds=st.booleans(),
)
@example([900.0], [20.0] * 7 + [1.0], 10**7, 64, 1, False)  # 1,000 tokens: less than 1,024, but not than 95 % of these
def test_of_all_budgets_the_one_that_slows_down_least(
    tokens: list[float], bounds: list[float], parameters: int, longest: int, gpus: int, check_bounds: bool
) -> None:
    state = made_state(8, 8)
    cost, nodes = state.cost, -(-gpus // 8)
    jobs = [job(state, own, max_slowdown=bound, parameters=parameters) for own, bound in zip(tokens, bounds, strict=False)]
    jobs.append(job(state, 100.0, longest=longest, max_slowdown=bounds[-1], parameters=parameters))
    members = [Member(own.spec.profile.tokens_per_step, own.weight) for own in jobs]
    means: dict[int, float] = {}
    for budget in cost.budgets:
        seconds = group_step_seconds(cost, BASE, budget * gpus, gpus, nodes, members)
        slowdowns = [own / one.alone_step_seconds for own, one in zip(seconds, jobs, strict=True)]
        bounded = all(own <= one.spec.max_slowdown * (1 + 1e-9) for own, one in zip(slowdowns, jobs, strict=True))
        all_parameters = sum(own.spec.profile.adapter_parameters for own in jobs)
        if budget >= longest and cost.fits(BASE, all_parameters, budget) and (bounded or not check_bounds):
            means[budget] = sum(slowdowns) / len(jobs)
    found = shared_plan(cost, gpus, nodes, jobs, check_bounds)
    if not means:
        assert found is None
        return
    assert found is not None and found.data_parallel == gpus and found.token_budget % gpus == 0
    least = min(means.values())
    assert means[found.token_budget // gpus] == pytest.approx(least)
    assert found.token_budget // gpus >= max(budget for budget, mean in means.items() if mean == least)


def test_jobs_without_a_bound_take_what_others_leave() -> None:
    state = made_state(1)
    bound, free = job(state, 20_000.0, max_slowdown=2.0), job(state, 20_000.0, max_slowdown=math.inf)
    plan = shared_plan(state.cost, 1, 1, [bound, free])
    assert plan is not None and free.need == 0 < free.weight
    members = [Member(20_000.0, bound.weight), Member(20_000.0, free.weight)]
    held, left = group_step_seconds(state.cost, BASE, plan.token_budget, 1, 1, members)
    assert held <= 2 * bound.alone_step_seconds and math.isfinite(left)
    assert shared_plan(state.cost, 1, 1, [free, job(state, 500.0, max_slowdown=math.inf)]) is not None


def test_a_bound_that_is_met_exactly_is_met() -> None:
    state = made_state(1)
    alone = job(state, 1000.0, max_slowdown=1.0)
    assert shared_plan(state.cost, 1, 1, [alone]) is not None
    assert shared_plan(state.cost, 1, 1, [alone, job(state, 1000.0, max_slowdown=9.0)]) is None
    assert shared_plan(state.cost, 1, 1, [alone, job(state, 1000.0)], check_bounds=False) is not None


def test_the_plan_costs_nothing_to_ask_for_when_needs_are_too_many() -> None:
    cost = made_cost()
    state = made_state(1, cost=cost)
    jobs = [job(state, 4000.0, max_slowdown=1.2) for _ in range(2)]
    cost.fits = None  # type: ignore[assignment,method-assign]
    assert shared_plan(cost, 1, 1, jobs) is None


def test_samples_of_one_length_get_micro_batches_in_which_they_have_room_beside_others() -> None:
    """A step of one sample of 128 tokens beside four of 1,024, with the constants of two H100s that trained them so."""
    cost = CostModel({BASE: BaseConstants(55480.0, 0.0, 0.0, 0.0, 0.0, 3.4e9, 0.0, 8e10, {}, floor_seconds=0.0244)}, fill_share=1.0)
    state = made_state(1, cost=cost)
    found: list[int] = []
    for even in (False, True):
        jobs = [job(state, 128.0, longest=128, max_slowdown=1.5), job(state, 4096.0, longest=1024, max_slowdown=2.0)]
        for one in jobs:
            one.sample_tokens = one.spec.profile.longest_sample_tokens if even else 0
        plan = shared_plan(cost, 1, 1, jobs)
        assert plan is not None
        found.append(plan.token_budget)
    assert found == [1024, 2048]
