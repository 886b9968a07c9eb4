"""What reports of step times teach the scheduler: which of them count, and that slowdowns stay ratios where a machine is slow."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.cases import in_every_run
from tests.scheduler.invariants import check
from tests.scheduler.mirror import Mirror, made_cost, made_scheduler, made_spec, tell
from tests.scheduler.timeline import made_timeline, slowdowns
from tests.sim.small_clusters import BASE, POLICY_CASES, even_cost, made_job
from tlora.protocol import Event, GroupReady, JobFinished, JobGroup, NodeAdded, ParallelPlan, StepsDone, Tick
from tlora.scheduler.group_index import GroupIndex, residual_capacity_of
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.predictions import Predictions
from tlora.scheduler.scheduler import Scheduler
from tlora.scheduler.state import ClusterState
from tlora.shape.cost import CostModel
from tlora.sim.backend import SimulatedCluster
from tlora.sim.conditions import Conditions
from tlora.sim.machines import ClusterShape
from tlora.sim.simulate import simulated_cluster

READY = GroupReady("g0")


def report(steps: float, seconds: float = 3.0, job: str = "a", group: str = "g0") -> StepsDone:
    """Of a job of `made_spec`, whose step is predicted to take 1.5 s alone."""
    return StepsDone(job, group, steps, seconds)


def times_corrected(scheduler: Scheduler, *events: Event) -> int:
    """By reports of twice the predicted time each that counts does."""
    for event in events:
        scheduler.handle(event, 1.0)
    return scheduler.state.cost.times_corrected


# -- which reports count -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "events"),
    [
        pytest.param(0, [report(10), report(20), report(30)], id="its group is not ready"),
        pytest.param(0, [READY, report(10)], id="the first has what was before in it"),
        pytest.param(0, [report(10), READY, report(20)], id="the first since it is ready"),
        pytest.param(1, [READY, report(10), report(20)], id="the second"),
        pytest.param(2, [READY, report(10), report(20), report(30)], id="each that follows"),
        pytest.param(0, [READY, report(10), report(10), report(10)], id="the same again"),
        pytest.param(1, [READY, report(10), report(10), report(20), report(20)], id="each once"),
        pytest.param(0, [READY, report(10), report(5)], id="an older one"),
        pytest.param(0, [READY, report(10), READY, report(20)], id="what was changed was not told before"),
        pytest.param(0, [READY, report(10), report(20, group="g7"), report(20, job="b")], id="of nobody in it"),
        pytest.param(0, [READY, report(10), *(report(20 + k, bad) for k, bad in enumerate((0.0, -1.0, math.inf, math.nan)))], id="no time"),
    ],
)
def test_a_report_counts_if_it_is_new_and_of_a_ready_group(count: int, events: list[Event]) -> None:
    scheduler = made_scheduler(POLICIES["fifo"](), 1)
    scheduler.handle(made_spec("a", steps=1000), 0.0)
    assert times_corrected(scheduler, *events) == count


def test_a_group_that_changes_says_nothing_until_it_is_ready_again() -> None:
    scheduler = made_scheduler(POLICIES["memory"](), 1)
    scheduler.handle(made_spec("a", steps=1000), 0.0)
    assert times_corrected(scheduler, READY, report(10), made_spec("b", steps=1000), report(20), report(30)) == 0
    assert times_corrected(scheduler, READY, report(40), report(1, job="b")) == 0
    assert times_corrected(scheduler, report(50, 9.0)) == 1


def test_a_report_of_a_time_in_which_a_member_ended_says_nothing() -> None:
    scheduler = made_scheduler(POLICIES["memory"](), 1)
    for name in ("a", "b"):
        scheduler.handle(made_spec(name, steps=1000), 0.0)
    assert times_corrected(scheduler, READY, report(10), JobFinished("b"), report(20)) == 0
    assert times_corrected(scheduler, report(30)) == 1


def test_in_another_group_it_begins_anew() -> None:
    scheduler = made_scheduler(POLICIES["fifo"](), 1)
    scheduler.handle(made_spec("a", steps=1000), 0.0)
    times_corrected(scheduler, READY, report(10))
    scheduler.state.place(JobGroup("g0", "north", (), ParallelPlan(1, 1024), (), ()))
    scheduler.handle(Tick(), 2.0)
    assert times_corrected(scheduler, GroupReady("g1"), report(20, group="g1")) == 0
    assert times_corrected(scheduler, report(30, group="g1")) == 1


# -- what follows ----------------------------------------------------------------------------------------------------------


def learn(scheduler: Scheduler, factor: float, reports: int = 300, base: str = "north") -> None:
    """Everybody of the base reports that steps take `factor` times what the constants say."""
    state, constants = scheduler.state, ClusterState(CostModel(scheduler.state.cost.constants))
    constants.jobs = state.jobs
    for name in state.groups:
        scheduler.handle(GroupReady(name), state.now)
    for _ in range(reports):
        for name in list(state.groups_of_base[base]):
            known = state.groups[name]
            for job, seconds in zip(known.group.job_ids, constants.step_seconds_of(known.group, known.num_nodes), strict=True):
                scheduler.handle(StepsDone(job, name, state.jobs[job].steps_reported + 1e-3, factor * seconds), state.now)


def test_a_truth_that_is_as_believed_changes_nothing() -> None:
    timeline = made_timeline(4)
    timeline.tell(*(made_spec(f"j{k}", 1 + k % 3, steps=100_000) for k in range(8)))
    before = {name: job.alone_step_seconds for name, job in timeline.scheduler.state.jobs.items()}
    groups = dict(timeline.mirror.groups)
    learn(timeline.scheduler, 1 + 1e-9)
    assert timeline.scheduler.state.cost.times_corrected == 0 and timeline.mirror.groups == groups
    assert before == {name: job.alone_step_seconds for name, job in timeline.scheduler.state.jobs.items()}


@pytest.mark.parametrize("factor", [0.7, 1.5])
def test_a_slow_or_fast_machine_changes_times_and_no_slowdown(factor: float) -> None:
    timeline = made_timeline(2, 2)
    timeline.tell(*(made_spec(f"j{k}", 1 + k % 3, tokens=200.0, steps=100_000, max_slowdown=4.0) for k in range(8)))
    timeline.until(1200.0)
    state = timeline.scheduler.state
    assert max(len(known.group.job_ids) for known in state.groups.values()) > 1, "nobody shares"
    ratios, jobs, groups = (
        slowdowns(timeline.scheduler),
        {name: replace(job) for name, job in state.jobs.items()},
        dict(timeline.mirror.groups),
    )
    learn(timeline.scheduler, factor)
    assert slowdowns(timeline.scheduler) == pytest.approx(ratios, rel=0.02)
    for name, job in state.jobs.items():
        assert job.alone_step_seconds == pytest.approx(factor * jobs[name].alone_step_seconds, rel=0.03)
        assert job.need == pytest.approx(jobs[name].need / factor, rel=0.03)
        assert job.remaining_seconds(state.now) == pytest.approx(factor * jobs[name].remaining_seconds(state.now), rel=0.03)
        assert job.step_seconds == pytest.approx(factor * jobs[name].step_seconds, rel=0.03)
    for known in state.groups.values():
        assert known.need == pytest.approx(sum(state.jobs[name].need for name in known.group.job_ids))
    check(state)
    timeline.tell(Tick())
    assert timeline.mirror.groups == groups, "groups change because the whole machine is slower"


def test_progress_until_then_is_counted_at_the_old_pace() -> None:
    scheduler = made_scheduler(POLICIES["fifo"](), 1, 1)
    for name in ("a", "b"):
        scheduler.handle(made_spec(name, steps=1000), 0.0)
    for event in (READY, report(10), report(20)):
        scheduler.handle(event, 150.0)
    job = scheduler.state.jobs["b"]
    assert job.step_seconds > 1.55 and job.steps_at(150.0) == 100.0 and job.service_at(150.0) == 150.0
    assert job.steps_at(150.0 + job.step_seconds) == pytest.approx(101.0)


def test_who_is_the_shortest_is_asked_anew_of_those_that_wait() -> None:
    scheduler = made_scheduler(POLICIES["sjf"](), 1)
    scheduler.handle(made_spec("a", steps=1000), 0.0)
    scheduler.handle(made_spec("north", steps=100), 0.0)
    scheduler.handle(made_spec("south", steps=120, base_model="south"), 0.0)
    learn(scheduler, 1.5)
    scheduler.handle(JobFinished("a"), 1.0)
    assert [name for name, job in scheduler.state.jobs.items() if job.status == "placed"] == ["south"]


@pytest.mark.parametrize("factor", in_every_run([0.6, 1.6], 1))
@pytest.mark.parametrize("name", POLICY_CASES)
def test_after_a_correction_a_policy_wants_what_one_does_that_has_seen_nothing_before(name: str, factor: float) -> None:
    policy = POLICIES[name]()
    asked = 0

    def compared(state: ClusterState) -> list[JobGroup]:
        nonlocal asked
        wanted = policy(state)
        if state.cost.times_corrected:
            asked += 1
            assert wanted == POLICIES[name]()(state)
        return wanted

    scheduler, mirror = Scheduler(compared, made_cost()), Mirror()
    for node in range(3):
        tell(scheduler, mirror, NodeAdded(f"n{node}", tuple(range(4 * node, 4 * node + 4))), 0.0)
    for k in range(40):
        bound = (1.2, 1.5, 2.0, 6.0)[k % 4]
        spec = made_spec(f"j{k}", (1, 2, 4)[k % 3], (100.0, 800.0, 3000.0)[k // 2 % 3], 400 + 37 * k, base_model=("north", "south")[k % 2])
        tell(scheduler, mirror, replace(spec, max_slowdown=bound), 10.0 * k)
    learn(scheduler, factor)
    for k in range(0, 40, 3):
        tell(scheduler, mirror, JobFinished(f"j{k}"), 4000.0 + 700 * k)
        tell(scheduler, mirror, Tick(), 4350.0 + 700 * k)
    assert asked > 20


def test_one_node_and_several_nodes_have_speeds_of_their_own() -> None:
    scheduler = made_scheduler(POLICIES["fifo"](), 2, 2, 2)
    for name, gpus in (("a", 2), ("b", 4)):
        scheduler.handle(made_spec(name, gpus, tokens=4000.0, steps=100_000), 0.0)
    jobs = scheduler.state.jobs
    constants = {name: job.step_seconds for name, job in jobs.items()}
    factors = {"a": 1.0, "b": 1.5}  # networks between nodes are what nobody measured
    for group in ("g0", "g1"):
        scheduler.handle(GroupReady(group), 0.0)
    for step in range(1, 4000):
        for name, group in (("a", "g0"), ("b", "g1")):
            scheduler.handle(StepsDone(name, group, float(step), factors[name] * constants[name]), float(step))
    for name, job in jobs.items():
        assert job.step_seconds == pytest.approx(factors[name] * constants[name], rel=0.07)
        assert job.step_seconds == job.alone_step_seconds


def test_what_is_kept_of_groups_is_worked_out_anew() -> None:
    timeline = made_timeline(4)
    timeline.tell(*(made_spec(f"j{k}", tokens=100.0, steps=100_000, max_slowdown=4.0) for k in range(6)))
    state, predictions = timeline.scheduler.state, Predictions()
    index = GroupIndex(predictions)
    for reports in (2, 300):
        learn(timeline.scheduler, 1.5, reports)
        predictions.follow(state)
        index.follow(state)
        for name, known in state.groups.items():
            view = index.view(name)
            assert view.residual == residual_capacity_of(state, known)
            assert view.slowdowns == [slowdowns(timeline.scheduler)[job] for job in known.group.job_ids]


# -- in a cluster ------------------------------------------------------------------------------------------------------------


def slow(cost: CostModel, factor: float) -> CostModel:
    """A machine on which everything takes `factor` times as long."""
    times = ("launch_seconds", "member_seconds", "exchange_seconds", "exchange_between_nodes_seconds")
    return CostModel(
        {
            base: replace(
                found, tokens_per_second=found.tokens_per_second / factor, **{name: factor * getattr(found, name) for name in times}
            )
            for base, found in cost.constants.items()
        },
        cost.fill_share,
    )


def cluster_of(factor: float) -> SimulatedCluster:
    """16 GPUs, on which 40 jobs queue; it reports, as its times are others than the scheduler believes."""
    sizes = (1, 2, 1, 4, 1, 8)
    jobs = [made_job(f"j{k}", 20_000 + 3000 * (k % 7), 400.0 * k, sizes[k % 6], 1000.0 * sizes[k % 6], "done") for k in range(40)]
    return simulated_cluster(jobs, ClusterShape(4, 4), even_cost(), Conditions(cost=slow(even_cost(), factor)))


def play(cluster: SimulatedCluster, scheduler: Scheduler, until: float = math.inf) -> None:
    while cluster.now() < until and (events := cluster.poll()):
        for event in events:
            for action in scheduler.handle(event, cluster.now()):
                cluster.execute(action)


@pytest.mark.parametrize("policy", ["fifo", "residual_capacity"])
def test_a_machine_of_which_the_constants_are_off_by_half_is_predicted_within_five_percent(policy: str) -> None:
    cluster, scheduler = cluster_of(1.5), Scheduler(POLICIES[policy](), even_cost())
    play(cluster, scheduler, 60_000.0)
    state = scheduler.state
    running = [job for job in state.jobs.values() if job.group_id is not None and state.groups[job.group_id].ready]
    assert len(running) > 3
    expected = {job.spec.job_id: job.seen_at + (job.spec.profile.steps - job.steps_done) * job.step_seconds for job in running}
    for job in running:
        true = cluster.jobs[job.spec.job_id]
        assert job.step_seconds == pytest.approx(true.step_seconds, rel=0.05)
        assert job.step_seconds / job.alone_step_seconds == pytest.approx(true.step_seconds / true.alone_step_seconds, rel=0.05)
    if policy == "fifo":  # nothing changes for them until they end
        play(cluster, scheduler)
        for name, seconds in expected.items():
            found = cluster.jobs[name]
            assert seconds - 60_000 == pytest.approx(found.finished_seconds - 60_000, rel=0.05)
    assert state.cost.constants[BASE] == even_cost().constants[BASE]
