"""What a forecast costs: it looks at the head of a long queue, makes no decision once it is late, and ends where no job can start."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from tests.scheduler.mirror import made_scheduler, made_spec
from tlora.protocol import JobGroup
from tlora.scheduler.forecast import MOST_STARTS, forecast
from tlora.scheduler.policies import LIVE_POLICIES, waiting_order
from tlora.scheduler.scheduler import Policy, Scheduler
from tlora.scheduler.state import ClusterState

COUNT = 3000


@dataclass
class Counted:
    """A policy, with the number of jobs that each of its decisions is about."""

    policy: Policy
    jobs: list[int] = field(default_factory=list[int])

    def __call__(self, state: ClusterState) -> list[JobGroup]:
        self.jobs.append(len(state.jobs))
        return self.policy(state)


def long_queue(policy: str, *nodes: int) -> Scheduler:
    """The later a job came, the shorter it is and, of each hundred, the higher its priority."""
    scheduler = made_scheduler(LIVE_POLICIES[policy](), *nodes)
    specs = [made_spec(f"j{n}", steps=2 * COUNT - n, priority=n // 100, max_slowdown=1.0, tenant="ab"[n % 2]) for n in range(COUNT)]
    for spec in specs[:-1]:
        scheduler.state.submit(spec)
    scheduler.handle(specs[-1], 1.0)
    return scheduler


@pytest.mark.parametrize(
    "policy", [pytest.param(name, marks=[] if name in ("fifo", "residual_capacity") else pytest.mark.slow) for name in LIVE_POLICIES]
)
def test_only_the_head_of_a_long_queue_is_looked_at_and_the_others_follow_in_the_policys_order(policy: str) -> None:
    state = long_queue(policy, 4).state
    order = waiting_order(policy, state)
    counted = Counted(LIVE_POLICIES[policy]())
    starts = forecast(state, counted, 30.0, order)
    assert max(counted.jobs) < 500 and len(starts) == len(state.pending) == COUNT - 4
    assert {start.job_id for start in starts} == set(state.pending)
    assert [start.at < math.inf for start in starts] == [True] * MOST_STARTS + [False] * (COUNT - 4 - MOST_STARTS)
    foreseen = [state.jobs[start.job_id].spec.priority for start in starts[:MOST_STARTS]]
    assert foreseen == sorted(foreseen, reverse=True), "the highest priority came last"
    behind = [order(state.jobs[start.job_id]) for start in starts[MOST_STARTS:]]
    assert behind == sorted(behind)


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_one_that_is_late_decides_nothing_and_names_all_in_the_policys_order(policy: str) -> None:
    state = long_queue(policy, 4).state
    counted = Counted(LIVE_POLICIES[policy]())
    order = waiting_order(policy, state)
    starts = forecast(state, counted, 30.0, order, lambda: True)
    assert not counted.jobs and all(start.at == math.inf for start in starts)
    assert [start.job_id for start in starts] == sorted(state.pending, key=lambda name: order(state.jobs[name]))


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_on_a_cluster_without_gpus_it_ends_after_a_few_decisions(policy: str) -> None:
    counted = Counted(LIVE_POLICIES[policy]())
    scheduler = made_scheduler(lambda state: [])
    for n in range(5):
        scheduler.state.submit(made_spec(f"j{n}"))
    starts = forecast(scheduler.state, counted, 30.0)
    assert len(counted.jobs) < 10 and [start.at for start in starts] == [math.inf] * 5
