from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.sim.small_clusters import BASE, FREE_MOVES, alarm, cluster_of, even_cost, events_of, group_of, made_job, until
from tlora.protocol import (
    Action,
    ChangeGroup,
    Event,
    GpusLost,
    GroupReady,
    JobFailed,
    JobFinished,
    JobRequest,
    JobSubmitted,
    NodeAdded,
    RejectJob,
    StartGroup,
    StepsDone,
    StopGroup,
    Tick,
)
from tlora.shape.memory import BaseMemory
from tlora.shape.moves import MoveCosts
from tlora.shape.token_cost import recompute_factor
from tlora.sim.backend import SimulatedCluster
from tlora.sim.conditions import Conditions
from tlora.sim.machines import ClusterShape, Machines
from tlora.sim.mapping import MappedJob
from tlora.sim.simulate import simulated_cluster

MOVES = Conditions(moves=MoveCosts())
Seen = list[tuple[float, Event]]


def played(cluster: SimulatedCluster, **actions: list[Action]) -> Seen:
    """All events, if these actions are taken when the jobs of these names come, and none else."""
    return list(_played(cluster, actions))


def _played(cluster: SimulatedCluster, actions: dict[str, list[Action]]) -> Iterator[tuple[float, Event]]:
    for seconds, event in events_of(cluster):
        if isinstance(event, JobSubmitted):
            for action in actions.get(event.job_id, []):
                cluster.execute(action)
        yield seconds, event


def told(seen: Seen) -> Seen:
    return [(seconds, event) for seconds, event in seen if not isinstance(event, JobSubmitted)]


def test_a_group_starts_cold_once_on_a_node_and_warm_from_then_on():
    cluster = cluster_of(made_job("a", 100), made_job("b", 100, at=1.0), conditions=MOVES)
    seen = played(cluster, a=[StartGroup(group_of("g0", "a"))], b=[StartGroup(group_of("g1", "b", gpus=(1,)))])
    assert told(seen) == [
        (11.0, GroupReady("g1")),
        (35.4, GroupReady("g0")),
        (111.0, JobFinished("b")),
        (pytest.approx(135.4), JobFinished("a")),
    ]
    a = cluster.jobs["a"].record()
    assert (a.started_seconds, a.finished_seconds, a.windows) == (35.4, pytest.approx(135.4), 10)
    assert a.worst_slowdown == pytest.approx(1.0)  # the start was queueing
    assert a.gpu_seconds == pytest.approx(135.4)


def test_who_joins_takes_its_time_and_the_others_lose_a_micro_batch():
    cluster = cluster_of(made_job("a", 100), made_job("b", 100, at=50.0), conditions=MOVES)
    seen = played(cluster, a=[StartGroup(group_of("g0", "a"))], b=[ChangeGroup(group_of("g0", "a", "b"))])
    a_ends = 51 + (100 - 14.6) * 2  # 14.6 steps by 50, a micro-batch of a second lost, then 2 seconds a step
    assert told(seen) == [
        (35.4, GroupReady("g0")),
        (50.0, StepsDone("a", "g0", pytest.approx(14.6), 1.0)),
        (52.0, GroupReady("g0")),
        (pytest.approx(a_ends), JobFinished("a")),
        (pytest.approx(a_ends + 100 - (a_ends - 52) / 2), JobFinished("b")),
    ]
    a, b = (cluster.jobs[name].record() for name in "ab")
    assert (a.windows, a.windows_beyond, a.regroupings) == (10, 0, 0)
    assert a.worst_slowdown == pytest.approx(2.0)
    assert a.gpu_seconds + b.gpu_seconds == pytest.approx(b.finished_seconds)


def test_a_group_planned_with_layers_recomputed_is_slower():
    cost = even_cost()
    cost.memory[BASE] = BaseMemory((10**9,), 0.0, 1e6, 1e5, num_layers=8)
    cluster = simulated_cluster([made_job("a", 100)], ClusterShape(1, 2, tick_seconds=math.inf), cost, Conditions(moves=FREE_MOVES))
    group = group_of("g0", "a")
    seen = played(cluster, a=[StartGroup(replace(group, plan=replace(group.plan, recomputed_layers=4)))])
    assert told(seen)[-1] == (pytest.approx(100 * recompute_factor(4, 8)), JobFinished("a"))


@pytest.mark.parametrize(("joins", "beyond"), [(1, 0), (2, 1)])
def test_one_join_in_a_window_is_tolerated_and_two_are_not(joins: int, beyond: int):
    # a's bound is met exactly by its steps of 2 seconds beside b; c and d pause the group for a micro-batch each, and leave at once.
    jobs = [made_job("a", 100), made_job("b", 100), *[alarm(40.0 + k) for k in range(joins)]]
    cluster = cluster_of(*jobs, conditions=Conditions(moves=replace(FREE_MOVES, join_micro_batches=1.0)))
    together = [ChangeGroup(group_of("g0", "a", "b"))]
    joining: dict[str, list[Action]] = {}
    for alarm_job in jobs[2:]:
        name = alarm_job.job.job_id
        joining[name] = [ChangeGroup(group_of("g0", "a", "b", name)), ChangeGroup(group_of("g0", "a", "b"))]
    list(_played(cluster, {"a": [StartGroup(group_of("g0", "a"))], "b": [*together], **joining}))
    assert cluster.jobs["a"].record().windows_beyond == beyond


def test_a_move_costs_checkpoint_and_join_and_the_step_under_way_and_counts_in_the_window():
    moves = replace(FREE_MOVES, join_seconds=2.0, checkpoint_seconds=1.0)
    cluster = cluster_of(made_job("a", 100), made_job("b", 1000), alarm(11.5), conditions=Conditions(moves=moves))
    actions: dict[str, list[Action]] = {
        "a": [StartGroup(group_of("g0", "a"))],
        "b": [StartGroup(group_of("g1", "b", gpus=(1,)))],
        "alarm at 11.5": [StopGroup("g0"), ChangeGroup(group_of("g1", "b", "a", gpus=(1,)))],
    }
    seen = list(_played(cluster, actions))
    assert (14.5, StepsDone("a", "g1", 9.0, 2.0)) in seen  # from 2 on it ran in g0, where starts take no time and joins do
    assert (14.5, GroupReady("g1")) in seen
    assert (pytest.approx(14.5 + 91 * 2), JobFinished("a")) in seen
    a = cluster.jobs["a"]
    assert (a.regroupings, a.windows) == (1, 10)
    # 9.5 + 3 + 2 seconds for the first window, 20 for each of the others
    assert a.slowdown_sum == pytest.approx(1.45 + 9 * 2.0)


def test_waiting_between_two_groups_is_queueing_and_in_no_window():
    """The second one begins on a worker that stands."""
    cluster = cluster_of(made_job("a", 100), alarm(50.0), alarm(500.0), conditions=MOVES)
    actions: dict[str, list[Action]] = {
        "a": [StartGroup(group_of("g0", "a"))],
        "alarm at 50.0": [StopGroup("g0")],
        "alarm at 500.0": [StartGroup(group_of("g1", "a"))],
    }
    seen = list(_played(cluster, actions))
    assert (502.0, StepsDone("a", "g1", 14.0, 1.0)) in seen  # 14.6 steps were done, whole ones are kept
    assert (pytest.approx(502.0 + 86), JobFinished("a")) in seen
    a = cluster.jobs["a"].record()
    assert (a.windows, a.regroupings, a.worst_slowdown) == (10, 1, pytest.approx(1.06))
    assert [(span.group_id, span.start_seconds, span.end_seconds) for span in cluster.spans] == [
        ("g0", 0.0, 50.0),
        ("g1", 500.0, pytest.approx(588.0)),
    ]


def test_a_group_that_grows_trains_on_until_the_base_is_on_the_gpu_that_comes():
    cluster = cluster_of(made_job("a", 200), alarm(100.9), conditions=MOVES)
    actions: dict[str, list[Action]] = {
        "a": [StartGroup(group_of("g0", "a"))],
        "alarm at 100.9": [ChangeGroup(group_of("g0", "a", gpus=(0, 1)))],
    }
    seen = list(_played(cluster, actions))
    # 75.5 steps by 110.9, 10 seconds later, of which 75 are kept; the move takes 14 seconds, then half a second a step
    assert told(seen) == [
        (35.4, GroupReady("g0")),
        (100.9, StepsDone("a", "g0", pytest.approx(65.5), 1.0)),
        (pytest.approx(124.9), GroupReady("g0")),
        (pytest.approx(124.9 + 125 / 2), JobFinished("a")),
    ]
    a = cluster.jobs["a"].record()
    assert (a.regroupings, a.worst_slowdown) == (1, pytest.approx(2.2))  # 5.5 steps of a second, the change, 5 of half a second
    assert a.gpu_seconds == pytest.approx(100.9 + 2 * (a.finished_seconds - 100.9))


@pytest.mark.parametrize("gpus", [(0,), (1,)])
def test_a_group_that_shrinks_goes_on_after_checkpoint_and_join(gpus: tuple[int, ...]):
    cluster = cluster_of(made_job("a", 200, gpus=2), alarm(85.4), conditions=MOVES)
    actions: dict[str, list[Action]] = {
        "a": [StartGroup(group_of("g0", "a", gpus=(0, 1)))],
        "alarm at 85.4": [ChangeGroup(group_of("g0", "a", gpus=gpus))],
    }
    seen = list(_played(cluster, actions))
    assert seen[-1] == (pytest.approx(85.4 + 3 + 100), JobFinished("a"))
    assert (pytest.approx(85.4 + 3), GroupReady("g0")) in seen


@pytest.mark.parametrize(("gpus", "seconds"), [((0, 1), 1.0), ((1,), 11.0), ((2, 3), 11.0), ((0, 2), 11.0), ((1, 0), 11.0)])
def test_a_worker_goes_on_with_one_of_its_gpus_on_its_node_and_a_base_that_is_whole(gpus: tuple[int, ...], seconds: float):
    """Else another one starts. Both nodes have run the base before; in the last case it is in parts."""
    cost, moves = even_cost(), replace(FREE_MOVES, warm_start_seconds=10.0, checkpoint_seconds=1.0)
    if gpus == (1, 0):
        cost.memory[BASE] = BaseMemory((10**15, 10**9), 0.0, 1.0, 1.0)
    jobs = [made_job("b", 10), made_job("a", 200, at=50.0), alarm(100.5)]
    cluster = simulated_cluster(jobs, ClusterShape(2, 2, tick_seconds=math.inf), cost, Conditions(moves=moves))
    actions: dict[str, list[Action]] = {
        "b": [StartGroup(group_of("g0", "b", gpus=(2,)))],
        "a": [StartGroup(group_of("g1", "a", gpus=(0,)))],
        "alarm at 100.5": [StopGroup("g0"), ChangeGroup(group_of("g1", "a", gpus=gpus))],
    }
    list(_played(cluster, actions))
    assert cluster.jobs["a"].record().paused_seconds == pytest.approx(seconds)


@pytest.mark.parametrize("loads", [50.0, 1000.0])
def test_a_failure_while_a_gpu_comes_sends_jobs_back_to_their_last_checkpoint_and_after_it_to_that_of_the_change(loads: float):
    conditions, failure = lost_gpu()
    moves = replace(conditions.moves, warm_start_seconds=loads, cold_start_seconds=1.0)
    late = alarm(failure - 100.0)
    cluster = cluster_of(made_job("a", 20000), late, conditions=replace(conditions, moves=moves))
    actions: dict[str, list[Action]] = {
        "a": [StartGroup(group_of("g0", "a", gpus=(0,)))],
        late.job.job_id: [ChangeGroup(group_of("g0", "a", gpus=(0, 1)))],
    }
    assert any(isinstance(event, GpusLost) for _, event in _played(cluster, actions))
    assert cluster.jobs["a"].steps == (math.floor(failure - 50.0 - 1.0) if loads == 50.0 else failure // 600.0 * 600.0 - 1.0)


def test_workers_stand_after_their_groups_until_others_take_one_of_their_gpus_or_it_is_lost():
    machines = Machines(ClusterShape(2, 2), Conditions(moves=MoveCosts()))
    found = [machines.start_seconds("base", gpus, "") for gpus in [(0, 1), (1, 0), (0,), (1,), (0,), (2,), (0, 1), (0, 1)]]
    assert found == [35.4, 0.0, 10.0, 10.0, 0.0, 35.4, 10.0, 0.0]
    assert [machines.start_seconds("other", gpus, "") for gpus in [(0, 1), (0, 1)]] == [35.4, 0.0]
    conditions, failure = lost_gpu()
    machines = Machines(ClusterShape(1, 2), replace(conditions, moves=MoveCosts()))
    assert machines.start_seconds("base", (0, 1), "") == 35.4 and machines.next_at == failure
    machines.fail_or_repair()
    assert machines.start_seconds("base", (0, 1), "") == 10.0


def test_rows_end_in_the_state_that_they_had():
    jobs = [made_job("a", 10, ends="cancelled"), made_job("b", 20, ends="failed")]
    cluster = cluster_of(*jobs)
    seen = played(cluster, a=[StartGroup(group_of("g0", "a"))], b=[StartGroup(group_of("g1", "b", gpus=(1,)))])
    ends = [(seconds, event) for seconds, event in seen if isinstance(event, JobRequest | JobFailed)]
    assert ends == [(10.0, JobRequest("a", "cancel")), (20.0, JobFailed("b", "it failed in the trace"))]
    assert [cluster.jobs[name].record().state for name in "ab"] == ["cancelled", "failed"]


def lost_gpu() -> tuple[Conditions, float]:
    """A conditions under which GPU 0 is lost once while jobs of some hours run, and nothing else is; and the time of it."""
    moves = replace(FREE_MOVES, checkpoint_interval_seconds=600.0)
    for seed in range(100_000):
        conditions = Conditions(seed, mtbf_hours=5.0, repair_hours=1.0, moves=moves)
        first, what = conditions.failure("0", 0)
        if 5000 < first < 9000 and not 0.25 <= what < 0.5 and min(conditions.failure("0", 1)[0], conditions.failure("1", 0)[0]) > 40000:
            return conditions, first
    raise AssertionError("no seed has such a failure")


def test_a_loss_sends_jobs_back_to_their_last_checkpoint_and_the_gpus_come_back():
    conditions, failure = lost_gpu()
    cluster = cluster_of(made_job("a", 20000), conditions=conditions)
    events = events_of(cluster)
    until(events, JobSubmitted)
    cluster.execute(StartGroup(group_of("g0", "a")))
    seconds, event = until(events, GpusLost)
    assert seconds == failure and isinstance(event, GpusLost) and 0 in event.gpus
    kept = 600 * (failure // 600)  # a step takes a second
    assert cluster.jobs["a"].steps == kept
    cluster.execute(StopGroup("g0"))  # as the scheduler does with groups on lost GPUs
    assert until(events, NodeAdded) == (failure + 3600, NodeAdded("n0", event.gpus, "r0"))
    cluster.execute(StartGroup(group_of("g1", "a")))
    assert until(events, StepsDone)[1] == StepsDone("a", "g1", kept, 1.0)
    assert until(events, JobFinished)[0] == pytest.approx(failure + 3600 + 20000 - kept)
    assert cluster.jobs["a"].record().steps == 20000
    assert {sample.max_gpus for sample in cluster.samples} == {2, 2 - len(event.gpus)}


def test_to_start_again_at_the_moment_of_a_loss_is_queueing():
    conditions, failure = lost_gpu()
    conditions = replace(conditions, moves=replace(conditions.moves, cold_start_seconds=100.0))
    cluster = cluster_of(made_job("a", 20000), nodes=2, conditions=conditions)
    events = events_of(cluster)
    until(events, JobSubmitted)
    cluster.execute(StartGroup(group_of("g0", "a")))
    until(events, GpusLost)
    cluster.execute(StartGroup(group_of("g1", "a", gpus=(2,))))
    assert until(events, GroupReady)[0] == failure + 100
    until(events, JobFinished)
    a = cluster.jobs["a"].record()
    assert (a.windows_beyond, a.regroupings) == (0, 0)
    assert a.worst_slowdown < 2


def test_a_group_asked_for_on_lost_gpus_is_not_started():
    conditions, failure = lost_gpu()
    cluster = cluster_of(made_job("a", 20000), alarm(failure + 1), conditions=conditions)
    seen = list(_played(cluster, {f"alarm at {failure + 1}": [StartGroup(group_of("g0", "a"))]}))
    assert not any(isinstance(event, GroupReady) for _, event in seen)
    assert cluster.jobs["a"].record().state == "unfinished"


def test_actions_that_come_too_late_do_nothing():
    cluster = cluster_of(made_job("a", 10), alarm(20.0))
    late: list[Action] = [ChangeGroup(group_of("g7", "a")), StopGroup("g7"), StopGroup("g0"), StartGroup(group_of("g1", "a"))]
    seen = list(_played(cluster, {"a": [StartGroup(group_of("g0", "a"))], "alarm at 20.0": late}))
    assert (10.0, JobFinished("a")) in seen
    assert cluster.jobs["a"].record().finished_seconds == 10.0


def test_a_rejected_job_is_over():
    cluster = cluster_of(made_job("a", 10))
    assert len(played(cluster, a=[RejectJob("a", "too large")])) == 1
    record = cluster.jobs["a"].record()
    assert (record.state, record.finished_seconds, math.isnan(record.started_seconds)) == ("rejected", 0.0, True)


def ticks(seen: Seen) -> list[float]:
    return [seconds for seconds, event in seen if isinstance(event, Tick)]


def test_it_ticks_while_somebody_waits_and_a_while_after_a_change():
    jobs: list[MappedJob] = [made_job("a", 5000), made_job("b", 100, at=3000.0), made_job("c", 100, at=4000.0)]
    cluster = cluster_of(*jobs, tick_seconds=60.0)
    actions: dict[str, list[Action]] = {
        "a": [StartGroup(group_of("g0", "a"))],
        "c": [StartGroup(group_of("g1", "b", "c", gpus=(1,)))],
    }
    assert ticks(list(_played(cluster, actions))) == [
        *[60.0, 180.0, 420.0, 900.0],  # after the start, each twice as long after the one before
        *[3060.0, 3180.0, 3420.0, 3900.0],  # b waits for c
        *[4060.0, 4180.0],  # after c came
        *[4260.0, 4380.0, 4620.0],  # after both ended; a ends at 5,000
    ]


def test_an_action_in_answer_to_a_tick_brings_the_next_one_soon():
    cluster = cluster_of(made_job("a", 1000), made_job("b", 100), tick_seconds=60.0)
    found: list[float] = []
    for seconds, event in events_of(cluster):
        if isinstance(event, Tick):
            found.append(seconds)
            if seconds == 180.0:
                cluster.execute(StartGroup(group_of("g0", "a", "b")))
    assert found[:4] == [60.0, 180.0, 240.0, 360.0]


def test_without_ticks_and_without_hope_it_ends():
    assert ticks(played(cluster_of(made_job("a", 10)))) == []
    cluster = cluster_of(made_job("a", 10), tick_seconds=60.0)
    assert ticks(played(cluster)) == [60.0, 180.0, 420.0, 900.0]
    assert cluster.jobs["a"].record().state == "unfinished"
    assert cluster.poll() == []


def test_samples_are_what_runs_between_changes():
    cluster = cluster_of(made_job("a", 100, tokens=500.0), made_job("b", 10, at=20.0, gpus=2))
    played(cluster, a=[StartGroup(group_of("g0", "a", gpus=(0, 1)))])
    seen = [(s.seconds, s.waiting_jobs, s.running_jobs, s.allocated_gpus, s.useful_share, s.tokens_per_second) for s in cluster.samples]
    assert seen == [(0.0, 0, 1, 2, 1.0, 2000.0), (20.0, 1, 1, 2, 1.0, 2000.0), (25.0, 1, 0, 2, 0.0, 0.0)]


def test_longer_steps_and_slower_groups_are_true_and_reported():
    conditions = Conditions(seed=1, speed_error=0.15, length_error=0.1, drift=0.2, moves=FREE_MOVES)
    cluster = cluster_of(made_job("a", 20000), conditions=conditions)
    seen = played(cluster, a=[StartGroup(group_of("g0", "a"))])
    record = cluster.jobs["a"].record()
    assert record.tokens_per_step == 1000 * conditions.length_of("a")
    assert record.alone_seconds / record.steps == pytest.approx(
        conditions.length_of("a") * conditions.speed_of("a") * conditions.drift_at(0.0, BASE)
    )
    reports = [event for _, event in seen if isinstance(event, StepsDone)]
    assert len(reports) == record.finished_seconds // 1800
    assert len({report.step_seconds for report in reports}) == len(reports)  # it drifts
    assert [report.steps for report in reports] == sorted(report.steps for report in reports)


def test_in_a_group_speeds_are_the_mean_by_tokens():
    conditions = Conditions(seed=1, speed_error=0.15, moves=FREE_MOVES)
    cluster = cluster_of(made_job("a", 100), made_job("b", 100), conditions=conditions)
    seen = played(cluster, a=[StartGroup(group_of("g0", "a"))], b=[ChangeGroup(group_of("g0", "a", "b"))])
    slower = (conditions.speed_of("a") + conditions.speed_of("b")) / 2
    assert min(seconds for seconds, event in seen if isinstance(event, JobFinished)) == pytest.approx(200 * slower)


def test_a_job_is_submitted_cancelled_held_and_released_at_any_time():
    cluster = cluster_of(made_job("a", 100), made_job("b", 100))
    seen: Seen = []
    for seconds, event in events_of(cluster):
        seen.append((seconds, event))
        match event:
            case JobSubmitted("b"):
                cluster.execute(StartGroup(group_of("g0", "a", "b")))
                cluster.ask(JobRequest("b", "hold"), at_seconds=20.0)
                cluster.ask(JobRequest("a", "cancel"), at_seconds=50.0)
            case JobRequest(verb="hold"):
                cluster.execute(ChangeGroup(group_of("g0", "a")))
            case JobRequest(verb="cancel"):
                cluster.execute(StopGroup("g0"))
                cluster.ask(JobRequest("b", "release"), at_seconds=60.0)
                cluster.submit(made_job("late", 5, at=55.0))
            case JobRequest(verb="release"):
                cluster.execute(StartGroup(group_of("g1", "b")))
            case JobFinished("b"):
                cluster.ask(JobRequest("b", "release"))  # it has ended: nothing is to be told
            case _:
                pass
    kinds = JobRequest | JobFinished | JobSubmitted
    assert [(seconds, event) for seconds, event in seen if isinstance(event, kinds)][2:] == [
        (20.0, JobRequest("b", "hold")),
        (50.0, JobRequest("a", "cancel")),
        (55.0, JobSubmitted("late", BASE, 1, made_job("late", 5).job.profile, max_slowdown=2.0)),
        (60.0, JobRequest("b", "release")),
        (150.0, JobFinished("b")),  # 10 steps in company, 90 alone
    ]
    a, b = cluster.jobs["a"].record(), cluster.jobs["b"].record()
    assert (a.state, a.finished_seconds, a.steps) == ("cancelled", 50.0, pytest.approx(40.0))
    assert (b.state, b.steps, b.regroupings) == ("done", 100.0, 1)
    assert cluster.poll() == []
    cluster.submit(made_job("last", 1, at=1000.0))
    cluster.ask(JobRequest("last", "cancel"))
    assert [type(event) for event in (*cluster.poll(), *cluster.poll())] == [JobSubmitted, JobRequest]
