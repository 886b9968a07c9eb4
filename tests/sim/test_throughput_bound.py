"""The upper bound on tokens/s: a linear program agrees with its closed form, and no simulated policy that keeps the bounds is above it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from tests.scheduler.mirror import BASES, made_cost
from tlora.scheduler.policies import POLICIES
from tlora.shape.cost import CostModel
from tlora.sim.bounds import least_gpu_seconds, throughput_bound
from tlora.sim.machines import ClusterShape
from tlora.sim.mapping import mapped_jobs
from tlora.sim.records import JobRecord
from tlora.sim.scenario import Scenario, cost_of
from tlora.sim.simulate import simulate
from tlora.sim.trace import Trace, TraceJob

COST = made_cost()


PLAIN = JobRecord(
    job_id="a",
    tenant="",
    base_model=BASES[0],
    gpus=1,
    submitted_seconds=0.0,
    started_seconds=0.0,
    finished_seconds=15.0,
    state="done",
    tokens_per_step=1000.0,
    steps=10.0,
    alone_seconds=15.0,
    max_slowdown=1.5,
    windows=0,
    windows_beyond=0,
    regroupings=0,
    gpu_seconds=15.0,
    worst_slowdown=1.0,
    mean_slowdown=1.0,
)


def lone(**others: Any) -> JobRecord:
    """1,000 tokens a step on one GPU: T0 is 1.5 s, of which half a second is the launch."""
    return replace(PLAIN, **others)


def test_company_is_worth_the_launch_that_is_shared_as_far_as_the_bound_allows() -> None:
    """Twice T0 is 3 s: 2.49 s of tokens beside a launch of 0.51 s with one member more."""
    assert least_gpu_seconds(lone(max_slowdown=2.0), COST, 8, 4) == pytest.approx(3.0 / 2490.0)


def test_a_job_may_shrink_within_its_bound() -> None:
    """Four GPUs take 0.55 + 1 s. On two 0.55 + 2 s are within 1.7 times that, and cost less than company at that pace on a node."""
    found = least_gpu_seconds(lone(gpus=4, tokens_per_step=4000.0, most_gpus=4, max_slowdown=1.7), COST, 4, 4)
    assert found < 4 * 1.55 / 4000 and found == pytest.approx(min(2 * 2.55 / 4000, 4 * 1.7 * 1.55 / ((1.7 * 1.55 - 0.56) * 4000)))


def test_no_number_of_gpus_of_a_node_is_cheaper() -> None:
    """The further GPUs of a node make an exchange longer: the least is not with the most of them."""
    constants = replace(COST.constants[BASES[0]], exchange_gpu_seconds=1.0, exchange_between_nodes_seconds=9.0)
    cost = CostModel({BASES[0]: constants}, COST.fill_share)
    longest = 2.0 * cost.alone_step_seconds(BASES[0], 6000.0, 4, 1)
    found = [4 * longest / 2 / 6000]
    for gpus in range(1, 5):
        tokens = min(cost.fill_share * cost.budgets[-1] * gpus, cost.largest_micro_batch(BASES[0], longest, gpus, 1, 2))
        found += [gpus * longest / tokens] if tokens >= 6000 else []
        found += [gpus * alone / 6000.0] if (alone := cost.alone_step_seconds(BASES[0], 6000.0, gpus, 1)) <= longest else []
    job = lone(gpus=4, tokens_per_step=6000.0, most_gpus=4, max_slowdown=2.0)
    assert least_gpu_seconds(job, cost, 4, 4) == pytest.approx(min(found))


def test_a_linear_program_gives_the_same() -> None:
    jobs = [lone(max_slowdown=bound, steps=steps) for bound, steps in ((1.0, 10.0), (1.5, 40.0), (2.0, 20.0), (3.0, 30.0))]
    each = np.array([least_gpu_seconds(job, COST, 8, 4) for job in jobs])
    tokens = np.array([job.steps * job.tokens_per_step for job in jobs])
    found = throughput_bound(jobs, COST, 8, 4, 0.55)
    for share, rate in ((1.0, found.all_work), (0.55, found.cheapest)):
        done = np.append(np.ones(4), 0.0)[None]  # tokens of each job, and T
        solved = linprog([0, 0, 0, 0, 1], [[*each, -8.0]], [0.0], done, [share * tokens.sum()], [(0, own) for own in tokens] + [(0, None)])
        assert solved.status == 0 and rate == pytest.approx(share * tokens.sum() / solved.x[4])
    assert found.cheapest > found.all_work


@pytest.mark.parametrize("seconds", [0.6, 3.0, 40.0])
def test_the_largest_micro_batch_takes_as_long_as_was_asked(seconds: float) -> None:
    cost = cost_of(Scenario(gpu="h200-from-128"), "tlora")
    for gpus, nodes in ((1, 1), (8, 1), (16, 2)):
        tokens = cost.largest_micro_batch("llama-3-8b", seconds, gpus, nodes, 3)
        assert cost.micro_batch_seconds("llama-3-8b", tokens, gpus, nodes, 3) == pytest.approx(seconds)
    assert cost.largest_micro_batch("llama-3-8b", 1e-6, 1, 1, 1) <= 0


@pytest.mark.parametrize("policy", ["backfill", "residual_capacity"])
def test_no_policy_within_the_bounds_does_all_the_work_faster(policy: str) -> None:
    rows = tuple(TraceJob(f"j{index}", 0.0, (1, 2, 8, 4, 16)[index % 5], 3600.0, "", "", "", "") for index in range(40))
    jobs = mapped_jobs(Trace("made", rows), cost_of(Scenario(), "peft"), 3)
    cost = cost_of(Scenario(), "tlora")
    result = simulate(jobs, ClusterShape(2, 8), POLICIES[policy](), cost)
    done = sum(job.steps * job.tokens_per_step for job in result.jobs) / max(job.finished_seconds for job in result.jobs)
    most = throughput_bound(result.jobs, cost_of(Scenario(), "tlora"), 16, 8, 0.55).all_work
    assert 0.5 * most < done <= most
