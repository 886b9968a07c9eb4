"""No schedule is better than the bounds: against optima by brute force, against simple policies, against the cost model's own speeds."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.sim.made_results import make_orders, make_result
from tlora.shape.cost import BaseConstants, CostModel
from tlora.shape.sharing import Member, group_step_seconds
from tlora.sim import bounds
from tlora.sim.bounds import Work, lower_bounds, work_of
from tlora.sim.records import JobRecord

COST = CostModel(
    {
        base: BaseConstants(speed, 0.02, 0.001, 0.01, 0.05, 1e9, 1e5, 1e11, {})
        for base, speed in (("llama-3-8b", 16_000.0), ("qwen3-0.6b", 90_000.0))
    }
)

Instance = list[tuple[int, int, int]]  # arrival, GPU-seconds, the most GPUs at once
INSTANCES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4)


def as_work(jobs: Instance, gpus: int) -> list[Work]:
    return [Work(arrival, size, size / min(most, gpus)) for arrival, size, most in jobs]


def best_schedules(jobs: Instance, gpus: int) -> tuple[float, float]:
    """The least mean JCT and the least makespan of all schedules that give whole GPUs for whole seconds."""

    def rates(left: tuple[int, ...], now: int) -> list[tuple[int, ...]]:
        most = [min(rest, job[2]) if job[0] <= now else 0 for rest, job in zip(left, jobs, strict=True)]
        return [rate for rate in itertools.product(*(range(top + 1) for top in most)) if sum(rate) <= gpus]

    @cache
    def least(left: tuple[int, ...], now: int) -> tuple[float, float]:
        if not any(left):
            return 0.0, 0.0
        found = []
        for rate in rates(left, now):
            if not any(rate) and any(rest and job[0] <= now for rest, job in zip(left, jobs, strict=True)):
                continue  # to let every GPU idle never helps
            after = tuple(rest - part for rest, part in zip(left, rate, strict=True))
            ended = sum(now + 1 - job[0] for job, rest, was in zip(jobs, after, left, strict=True) if was and not rest)
            total, last = least(after, now + 1)
            found.append((ended + total, max(last, now + 1)))
        return min(total for total, _ in found), min(last for _, last in found)

    total, last = least(tuple(size for _, size, _ in jobs), min(arrival for arrival, _, _ in jobs))
    return total / len(jobs), last - min(arrival for arrival, _, _ in jobs)


@given(INSTANCES, st.integers(1, 3))
def test_the_best_of_all_schedules_is_not_below_the_bounds(jobs: Instance, gpus: int) -> None:
    found = lower_bounds(as_work(jobs, gpus), gpus)
    mean, makespan = best_schedules(jobs, gpus)
    for bound in (found.alone_mean_seconds, found.queue_mean_seconds, found.flow_mean_seconds, found.mean_jct_seconds):
        assert bound <= mean + 1e-9
    assert found.makespan_seconds <= makespan + 1e-9


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.just(1)), min_size=1, max_size=4))
def test_on_one_gpu_srpt_is_the_optimum(jobs: Instance) -> None:
    found = lower_bounds(as_work(jobs, 1), 1)
    mean, makespan = best_schedules(jobs, 1)
    assert found.queue_mean_seconds == pytest.approx(mean) and found.makespan_seconds == pytest.approx(makespan)
    assert found.flow_mean_seconds <= mean + 1e-9


@pytest.mark.parametrize("arrival", [0.0, 1e6])
def test_a_single_job_has_its_own_time(arrival: float) -> None:
    elastic = lower_bounds([Work(arrival, 64.0, 4.0)], 16)
    assert elastic.alone_mean_seconds == elastic.queue_mean_seconds == elastic.makespan_seconds == 4.0
    assert elastic.flow_mean_seconds == pytest.approx(4.0)
    slow = lower_bounds([Work(arrival, 64.0, 40.0)], 16)
    assert (slow.mean_jct_seconds, slow.queue_mean_seconds, slow.makespan_seconds) == (40.0, 4.0, 40.0)
    assert slow.flow_mean_seconds == pytest.approx(40.0)


@given(INSTANCES, st.integers(1, 3), st.integers(0, 10**6))
def test_the_flow_bound_holds_for_any_prices(jobs: Instance, gpus: int, seed: int) -> None:
    """Weak duality: what the prices are may weaken the bound, never break it."""
    dice = np.random.default_rng(seed)

    def any_prices(flows: bounds.Flows, edges: bounds.Array, num_gpus: int) -> bounds.Array:
        return dice.exponential(2.0, len(edges) - 1) * (dice.random(len(edges) - 1) < 0.5)

    work = sorted(as_work(jobs, gpus), key=lambda each: each.submitted_seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "_prices", any_prices)
        patch.setattr(bounds, "_BUCKETS", 12)
        found = bounds.mean_flow_seconds([(each.submitted_seconds, each.gpu_seconds, each.fastest_seconds) for each in work], gpus)
    assert found <= best_schedules(jobs, gpus)[0] + 1e-9


def test_a_job_that_limits_others_counts_though_none_fills_the_cluster_alone() -> None:
    """Two of 3 GPU-seconds on at most 3 of 4 GPUs: 1 s each alone; together 6 GPU-seconds, of which the first has 3 after a second."""
    found = lower_bounds([Work(0.0, 3.0, 1.0), Work(0.0, 3.0, 1.0)], 4)
    assert found.alone_mean_seconds == 1.0 and found.queue_mean_seconds == pytest.approx((0.75 + 1.5) / 2)
    assert 1.125 < found.mean_jct_seconds == found.flow_mean_seconds <= (1.0 + 1.5) / 2


def test_the_flow_bound_is_the_largest_where_slow_jobs_queue() -> None:
    """Ten jobs at once, each at most on 1 of 2 GPUs: 100 GPU-seconds take 10 s each; in pairs their mean JCT is 30 s."""
    found = lower_bounds([Work(0.0, 10.0, 10.0)] * 10, 2)
    assert found.alone_mean_seconds == 10.0 and found.queue_mean_seconds == pytest.approx(27.5)
    assert found.mean_jct_seconds == found.flow_mean_seconds == pytest.approx(30.0, rel=1e-3)


def make_record(tokens_per_step: float, steps: float = 10.0, most_gpus: int = 10**6) -> JobRecord:
    (job,) = make_result(make_orders(1), "fifo").jobs
    values = {name: getattr(job, name) for name in JobRecord.__dataclass_fields__}
    return JobRecord(**values | {"tokens_per_step": tokens_per_step, "steps": steps, "most_gpus": most_gpus})


@given(
    st.floats(16, 2e6),
    st.lists(st.floats(16, 2e5), max_size=4),
    st.sampled_from([(1, 1), (2, 1), (8, 1), (16, 2), (24, 3), (32, 4)]),
    st.sampled_from(CostModel.budgets),
)
@example(1e6, [], (32, 4), 16_384)  # two of the largest micro-batches of the whole cluster
def test_no_group_lets_a_job_step_faster_than_its_fastest(tokens: float, others: list[float], size: tuple[int, int], budget: int) -> None:
    gpus, nodes = size
    record = make_record(tokens)
    (work,) = work_of([record], COST, 32, 8)
    members = [Member(n, 1.0) for n in (tokens, *others)]
    step = group_step_seconds(COST, record.base_model, budget * gpus, gpus, nodes, members)[0]
    alone = COST.alone_step_seconds(record.base_model, tokens, gpus, nodes)
    assert work.fastest_seconds <= 10 * min(step, alone) * (1 + 1e-9)
    assert work.gpu_seconds == pytest.approx(10 * tokens * (1 / COST.constants[record.base_model].tokens_per_second + 0.02 / 16_384))
    members_seconds = gpus * COST.micro_batch_seconds(record.base_model, tokens, gpus, nodes, 1)
    assert tokens > budget * gpus or work.gpu_seconds <= 10 * members_seconds * (1 + 1e-9)
