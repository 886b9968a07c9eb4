from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace

import pytest

from tests.scheduler.invariants import check
from tests.sim.answers import answered
from tests.sim.small_clusters import FREE_MOVES, POLICY_CASES, even_cost, made_job
from tlora.cluster.controller import run
from tlora.protocol import Action, Event, GroupReady, JobFinished, JobGroup, JobSubmitted, StepsDone
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.scheduler.state import ClusterState
from tlora.shape.hardware import cost_model
from tlora.sim.arrivals import compressed, first
from tlora.sim.backend import SimulatedCluster
from tlora.sim.conditions import Conditions
from tlora.sim.machines import ClusterShape
from tlora.sim.mapping import BASES, MappedJob, mapped_jobs
from tlora.sim.records import SimulationResult
from tlora.sim.simulate import simulate, simulated_cluster
from tlora.sim.trace import read_trace

SHAPE = ClusterShape(4, 8)
ROUGH = Conditions(seed=5, speed_error=0.15, length_error=0.1, drift=0.1, delay=0.5, mtbf_hours=200.0)


def some_jobs(count: int = 120) -> list[MappedJob]:
    """The first of a trace, so dense that they queue on 32 GPUs; every tenth was cancelled, every eleventh failed."""
    trace = compressed(first(read_trace("synth_sft"), count), 6)
    jobs = mapped_jobs(trace, cost_model("h200", "peft", BASES), seed=0)
    return [replace(job, ends="cancelled" if k % 10 == 0 else "failed" if k % 11 == 0 else "done") for k, job in enumerate(jobs)]


def result_of(policy: str, conditions: Conditions | None = None, jobs: list[MappedJob] | None = None) -> SimulationResult:
    return simulate(jobs or some_jobs(), SHAPE, POLICIES[policy](), cost_model("h200", "tlora", BASES), conditions)


def as_bytes(result: SimulationResult) -> bytes:
    return json.dumps(asdict(replace(result, decision_seconds=0.0, wall_seconds=0.0))).encode()


@pytest.mark.parametrize("policy", POLICY_CASES)
def test_the_same_seed_gives_the_same_bytes(policy: str):
    assert as_bytes(result_of(policy, ROUGH)) == as_bytes(result_of(policy, ROUGH))


@pytest.mark.parametrize("policy", POLICY_CASES)
def test_every_job_ends_in_its_state_also_where_machines_fail(policy: str):
    jobs = some_jobs()
    result = result_of(policy, replace(ROUGH, mtbf_hours=8.0, repair_hours=0.5), jobs)
    assert [(record.job_id, record.state) for record in result.jobs] == [(job.job.job_id, job.ends) for job in jobs]
    assert all(record.finished_seconds > record.started_seconds >= record.submitted_seconds for record in result.jobs)
    assert min(sample.max_gpus for sample in result.samples) < 32
    assert not result.samples[-1].allocated_gpus


def test_errors_change_what_happens_and_the_seed_of_truth_does():
    results = [as_bytes(result_of("backfill", conditions)) for conditions in (None, ROUGH, replace(ROUGH, seed=6))]
    assert len(set(results)) == 3


def test_what_the_scheduler_learns_does_not_change_the_truth():
    cost = cost_model("h200", "tlora", BASES)
    jobs = some_jobs(20)
    before = simulate(jobs, SHAPE, POLICIES["fifo"](), cost)

    def learning(state: ClusterState) -> list[JobGroup]:
        for base in BASES:
            state.cost.observe(base, 1, 1, 1.5, state.now)
        return policy(state)

    policy = POLICIES["fifo"]()
    after = simulate(jobs, SHAPE, learning, cost)
    assert [job.finished_seconds for job in after.jobs] == [job.finished_seconds for job in before.jobs]


def test_the_truth_may_have_other_constants_than_the_belief():
    jobs = some_jobs(20)
    slower = Conditions(cost=cost_model("h200", "tlora", BASES, {"tokens_per_second": 0.8}))
    by_truth = simulate(jobs, SHAPE, POLICIES["fifo"](), cost_model("h200", "tlora", BASES), slower)
    believed = result_of("fifo", None, jobs)
    assert all(true.alone_seconds > job.alone_seconds for true, job in zip(by_truth.jobs, believed.jobs, strict=True))


@pytest.mark.parametrize("policy", POLICY_CASES)
def test_the_events_of_a_run_give_a_fresh_scheduler_the_same_actions(policy: str):
    rows: list[tuple[float, Event | Action]] = []
    cost = cost_model("h200", "tlora", BASES)
    cluster = simulated_cluster(some_jobs(), SHAPE, cost, ROUGH)
    run(Scheduler(POLICIES[policy](), cost), cluster, lambda seconds, item: rows.append((seconds, item)))
    assert len(rows) > 500
    assert answered(Scheduler(POLICIES[policy](), cost_model("h200", "tlora", BASES)), rows) == rows


class Unreliable:
    """A cluster whose news come late, twice and out of order, submissions too."""

    def __init__(self, cluster: SimulatedCluster, seed: int) -> None:
        self.cluster, self._dice = cluster, random.Random(seed)
        self._held: list[Event] = []
        self.now, self.execute = cluster.now, cluster.execute

    def poll(self) -> list[Event]:
        """What comes anew, some of it held back, some twice; and some of what was held back."""
        dice = self._dice
        fresh = self.cluster.poll()
        late, self._held = self._held, []
        told: list[Event] = []
        for event in fresh:
            if dice.random() < 0.3 and isinstance(event, JobFinished | StepsDone | GroupReady | JobSubmitted):
                self._held.append(event)
            else:
                told += [event] * (1 + (dice.random() < 0.3))
        for event in late:
            if dice.random() < 0.5 and fresh:
                self._held.append(event)
            else:
                told += [event] * (1 + (dice.random() < 0.3))
        dice.shuffle(told)
        return told or (self.poll() if fresh or self._held else [])


@pytest.mark.parametrize("policy", POLICY_CASES)
def test_late_and_repeated_news_lose_no_job(policy: str):
    jobs = some_jobs(60)
    cost = cost_model("h200", "tlora", BASES)
    for seed in range(3):
        cluster = simulated_cluster(jobs, SHAPE, cost, Conditions())
        scheduler = Scheduler(POLICIES[policy](), cost)
        run(scheduler, Unreliable(cluster, seed))
        assert [job.state for job in cluster.jobs.values()] == [job.ends for job in jobs]
        check(scheduler.state)
        assert not scheduler.state.jobs and not scheduler.state.groups
        assert all(math.isfinite(job.finished_seconds) for job in cluster.jobs.values())


def test_rows_that_were_cancelled_or_failed_end_so():
    trace = first(read_trace("synth_sft"), 200)
    ends = {"COMPLETED": "done", "CANCELLED": "cancelled", "FAILED": "failed"}
    found = [job.ends for job in mapped_jobs(trace, cost_model("h200", "peft", BASES), seed=0)]
    assert found == [ends[row.state] for row in trace.jobs]
    assert set(found) == {"done", "cancelled", "failed"}


@pytest.mark.parametrize(("half_life_seconds", "first"), [(1e6, "b2"), (100.0, "a2")])
def test_the_half_life_decides_for_how_long_a_tenants_usage_counts(half_life_seconds: float, first: str) -> None:
    """a had the GPU for 1,000 s, then b for 200 s: b has used less, unless what a had has faded."""
    orders = [("a1", 1000, 0.0), ("b1", 200, 500.0), ("a2", 100, 1100.0), ("b2", 100, 1100.0)]
    jobs = [made_job(name, steps, at, gpus=2, tokens=2000.0) for name, steps, at in orders]
    jobs = [replace(each, job=replace(each.job, tenant=each.job.job_id[0], max_slowdown=1.0)) for each in jobs]
    conditions = Conditions(moves=FREE_MOVES, usage_half_life_seconds=half_life_seconds)
    result = simulate(jobs, ClusterShape(1, 2), POLICIES["residual_capacity"](), even_cost(), conditions)
    assert [job.state for job in result.jobs] == ["done"] * 4
    second = sorted(result.jobs, key=lambda job: job.finished_seconds)[2]
    assert second.job_id == first


@pytest.mark.parametrize("policy", ["easy", "residual_capacity-no-growth"])
def test_a_wide_job_starts_when_what_ran_before_it_has_ended(policy: str):
    """One small job a minute comes behind it for hours; those that end in time use the GPU that is free."""
    jobs = [made_job("runs", 4000), made_job("wide", 4000, at=1.0, gpus=2)]
    jobs += [replace(made_job(f"small{minute}", 6000, at=60.0 * minute), ends="done") for minute in range(1, 120)]
    jobs += [made_job("short", 1000, at=30.0)]
    jobs = [replace(job, job=replace(job.job, max_slowdown=1.0)) for job in jobs]
    result = simulate(jobs, ClusterShape(1, 2), POLICIES[policy](), even_cost(), Conditions(moves=FREE_MOVES))
    started, finished = ({record.job_id: getattr(record, key) for record in result.jobs} for key in ("started_seconds", "finished_seconds"))
    assert started["short"] < 60.0 and finished["short"] < finished["runs"]
    assert finished["runs"] <= started["wide"] <= finished["runs"] + 1.0
    assert min(started[f"small{minute}"] for minute in range(1, 120)) >= finished["wide"]
