"""What `residual_capacity` promises, on the first jobs of a real trace: bounds, backfill without its three means, its two ablations."""

from __future__ import annotations

import math
from functools import cache

import pytest

from tlora.protocol import JobGroup
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.scheduler import Policy
from tlora.scheduler.settings import Settings
from tlora.scheduler.state import ClusterState
from tlora.sim.machines import ClusterShape
from tlora.sim.records import SimulationResult
from tlora.sim.scenario import Scenario, cost_of, scene_of
from tlora.sim.simulate import simulate

SHAPE = ClusterShape(4, 8)


@cache
def of_policy(name: str) -> SimulationResult:
    return replay(POLICIES[name]())


def replay(policy: Policy, seed: int = 14) -> SimulationResult:
    scenario = Scenario(jobs=80, seed=seed, nodes=SHAPE.nodes, gpus_per_node=SHAPE.gpus_per_node)
    small = [job for job in scene_of(scenario).jobs if job.job.gpus <= SHAPE.num_gpus]
    return simulate(small, SHAPE, policy, cost_of(scenario, "tlora"))


def watched(policy: Policy, seen: list[float]) -> Policy:
    """`policy`, with the largest step over its bound of all groups as they are wanted noted."""

    def decide(state: ClusterState) -> list[JobGroup]:
        wanted = policy(state)
        for group in wanted:
            steps = state.step_seconds_of(group, state.pool.num_nodes(group.gpus))
            bounds = [state.jobs[name].spec.max_slowdown * state.jobs[name].alone_step_seconds for name in group.job_ids]
            seen.extend(step / bound for step, bound in zip(steps, bounds, strict=True))
        return wanted

    return decide


@pytest.mark.parametrize("seed", [14, pytest.param(13, marks=pytest.mark.slow)])
def test_no_group_is_formed_that_breaks_a_members_bound(seed: int) -> None:
    seen: list[float] = []
    result = replay(watched(residual_capacity(), seen), seed)
    assert len(seen) > 100 and max(seen) <= 1 + 1e-6
    assert all(job.state == "done" for job in result.jobs), "somebody starved"
    assert any(len(span.job_ids) > 1 for span in result.spans) and any(job.worst_slowdown < 0.9 for job in result.jobs)


def test_without_its_means_in_order_of_arrival_it_is_backfill() -> None:
    plain = Settings(sharing=False, elastic=False, preemption=False, order="arrival", starvation_factor=math.inf)
    ours, theirs = replay(residual_capacity(plain)), of_policy("backfill")
    assert [(job.job_id, job.started_seconds, job.finished_seconds) for job in ours.jobs] == [
        (job.job_id, job.started_seconds, job.finished_seconds) for job in theirs.jobs
    ]
    assert max(len(span.job_ids) for span in ours.spans) == 1


@pytest.mark.slow
def test_each_means_is_used_and_mean_completion_is_shorter_than_backfills() -> None:
    ours, rigid, theirs = (
        math.fsum(job.finished_seconds - job.submitted_seconds for job in of_policy(name).jobs)
        for name in ("residual_capacity", "residual_capacity-no-growth", "backfill")
    )
    assert ours < theirs and ours != rigid


@pytest.mark.slow
def test_without_sharing_no_group_has_two_jobs() -> None:
    with_sharing, without = of_policy("residual_capacity"), of_policy("residual_capacity-no-sharing")
    assert max(len(span.job_ids) for span in with_sharing.spans) > 1
    assert {len(span.job_ids) for span in without.spans} == {1}
    assert _most_extra_gpus(without) > 0, "growth is still on"


@pytest.mark.slow
def test_without_growth_no_group_has_more_gpus_than_the_job_that_opened_it_asked_for() -> None:
    """Not even after that job has left: who stays keeps the GPUs that the group has, and no more."""
    with_growth, without = of_policy("residual_capacity"), of_policy("residual_capacity-no-growth")
    assert _most_extra_gpus(with_growth) > 0
    assert _most_extra_gpus(without) == 0
    assert max(len(span.job_ids) for span in without.spans) > 1, "sharing is still on"


def _most_extra_gpus(result: SimulationResult) -> int:
    """The most GPUs by which any group exceeds what the job that opened it asked for."""
    asked = {job.job_id: job.gpus for job in result.jobs}
    opener: dict[str, str] = {}
    for span in sorted(result.spans, key=lambda span: span.start_seconds):
        opener.setdefault(span.group_id, span.job_ids[0])
    return max(len(span.gpus) - asked[opener[span.group_id]] for span in result.spans)
