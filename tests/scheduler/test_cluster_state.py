"""What the scheduler believes: nodes that come and go, progress between reports, who waits, and the check that finds what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.scheduler.invariants import check
from tests.scheduler.mirror import made_spec, made_state
from tlora.protocol import JobGroup, ParallelPlan, StepsDone
from tlora.scheduler.state import ClusterState


def place(state: ClusterState, group_id: str, gpus: tuple[int, ...], *names: str) -> None:
    for name in names:
        if name not in state.jobs:
            state.submit(made_spec(name, steps=100))
    weights = tuple(state.jobs[name].weight for name in names)
    state.place(JobGroup(group_id, "north", gpus, ParallelPlan(len(gpus), 2048 * len(gpus)), names, weights))
    check(state)


# -- nodes -----------------------------------------------------------------------------------------------------------------


def test_a_node_that_is_told_of_twice_is_there_once() -> None:
    state = made_state(4)
    state.add_node("n0", "r0", (0, 1, 2, 3))
    state.add_node("n0", "r0", (2, 3, 4))
    check(state)
    assert (state.pool.num_gpus, state.pool.num_free, state.pool.node_size, state.pool.nodes["n0"].gpus) == (5, 5, 5, (0, 1, 2, 3, 4))


def test_gpus_that_are_lost_end_their_groups_and_may_come_back() -> None:
    state = made_state(4, 2)
    place(state, "g0", (0, 1), "a")
    place(state, "g1", (2, 4), "b", "c")
    assert state.lose_gpus((4, 5, 99)) == ["g1"]
    check(state)
    assert (state.pool.num_gpus, state.pool.num_free, state.pool.node_size, state.pool.most_gpus) == (4, 2, 4, 6)
    assert list(state.pending) == ["b", "c"] and list(state.groups) == ["g0"]
    assert state.lose_gpus((4,)) == []
    state.add_node("n1", "r0", (4, 5))
    check(state)
    assert state.pool.num_free == 4


def test_a_node_that_is_to_be_left_is_empty_at_once_or_when_its_groups_have_ended() -> None:
    state = made_state(4, 2)
    place(state, "g0", (0, 1), "a")
    place(state, "g1", (4,), "b")
    assert state.drain_node("n0", finish=True) == [] and state.drain_node("n9", finish=False) == []
    check(state)
    assert (state.pool.num_gpus, state.pool.num_free, state.pool.node_size) == (4, 1, 2) and list(state.groups) == ["g0", "g1"]
    state.end_job("a")
    state.end_group("g0")
    check(state)
    assert (state.pool.num_gpus, state.pool.nodes["n0"].gpus) == (2, ())
    state.add_node("n0", "r0", (0, 1, 2, 3))
    assert state.drain_node("n1", finish=False) == ["g1"] and list(state.pending) == ["b"]
    check(state)
    assert (state.pool.num_gpus, state.pool.num_free, state.pool.node_size, state.pool.draining) == (4, 4, 4, {"n1"})


# -- jobs ------------------------------------------------------------------------------------------------------------------


def test_need_is_what_the_bound_asks_for() -> None:
    state = made_state(8)
    state.submit(made_spec("a", 2, tokens=2000.0, max_slowdown=2.0))
    job = state.jobs["a"]
    assert job.alone_step_seconds == pytest.approx(0.5 + 0.05 + 1.0)  # launch, exchange, tokens
    assert job.need == job.weight == pytest.approx(2000.0 / (2 * 1.55))
    state.submit(made_spec("b", max_slowdown=math.inf))
    assert state.jobs["b"].need == 0 < state.jobs["b"].weight
    assert [job.number for job in state.jobs.values()] == [0, 1]


def test_progress_is_predicted_between_reports() -> None:
    state = made_state(1)
    place(state, "g0", (0,), "a")
    job = state.jobs["a"]
    assert job.step_seconds == 1.5
    assert job.steps_at(15.0) == 10.0 and job.remaining_seconds(15.0) == 135.0 and job.service_at(15.0) == 15.0
    assert job.steps_at(1e9) == 100.0
    state.now = 30.0
    state.see_steps(StepsDone("a", "g0", 12.0, 2.5))
    assert job.steps_at(30.0) == 12.0 and job.service_gpu_seconds == 30.0
    state.see_steps(StepsDone("a", "g0", 1e6, 2.5))
    assert job.steps_done == 100.0


def test_a_job_has_made_no_steps_while_its_group_was_loaded() -> None:
    """A job of 100 steps is not nearly done because its GPU took as long to start."""
    state = made_state(1)
    place(state, "g0", (0,), "a")
    job, state.now = state.jobs["a"], 140.0
    state.make_ready("g0")
    assert job.steps_at(140.0) == 0.0 and job.steps_at(155.0) == 10.0 and job.service_at(155.0) == 155.0
    state.now = 155.0
    state.see_steps(StepsDone("a", "g0", 12.0, 2.5))
    state.now = 170.0
    state.make_ready("g0")
    assert job.steps_at(170.0) == 22.0, "a job that was reported goes on while another joins"


@pytest.mark.parametrize("steps", [math.inf, math.nan, -math.inf, -1.0])
def test_a_report_of_steps_that_cannot_be_hides_none_that_follows(steps: float) -> None:
    state = made_state(1)
    place(state, "g0", (0,), "a")
    state.see_steps(StepsDone("a", "g0", 5.0, 1.5))
    state.see_steps(StepsDone("a", "g0", steps, 1.5))
    assert state.jobs["a"].steps_done == 5.0
    state.see_steps(StepsDone("a", "g0", 6.0, 1.5))
    assert state.jobs["a"].steps_done == 6.0


def test_reports_of_a_group_that_a_job_has_left_count_nothing() -> None:
    state = made_state(2)
    place(state, "g0", (0,), "a")
    state.end_group("g0")
    state.see_steps(StepsDone("a", "g0", 50.0, 1.0))
    assert state.jobs["a"].steps_done == 0.0
    place(state, "g1", (1,), "a")
    state.see_steps(StepsDone("a", "g0", 50.0, 1.0))
    assert state.jobs["a"].steps_done == 0.0


def test_what_was_done_is_kept_when_a_job_waits_again() -> None:
    state = made_state(2)
    place(state, "g0", (0, 1), "a")
    state.submit(made_spec("b"))
    state.now = 2 * state.jobs["a"].step_seconds
    state.end_group("g0")
    job = state.jobs["a"]
    assert (job.steps_done, job.status, job.group_id, job.step_seconds) == (2.0, "pending", None, 0.0)
    assert list(state.pending) == ["b", "a"]
    assert job.service_gpu_seconds == pytest.approx(2 * state.now) == job.service_at(1e6)
    place(state, "g1", (0,), "a")
    assert job.times_unqueued == 2


def test_members_share_and_whoever_stays_has_more_when_one_leaves() -> None:
    state = made_state(1)
    place(state, "g0", (0,), "a", "b")
    known, a = state.groups["g0"], state.jobs["a"]
    assert known.need == pytest.approx(a.need + state.jobs["b"].need)
    assert known.step_seconds == [a.step_seconds] * 2 and a.step_seconds > 1.5 and a.gpu_share == 0.5
    state.now = a.step_seconds
    state.end_job("b")
    check(state)
    assert (a.steps_done, a.step_seconds, a.gpu_share, known.need) == (1.0, 1.5, 1.0, a.need)
    state.end_job("a")
    assert known.group.job_ids == () and state.emptied == ["g0", "g0"] and known.step_seconds == []


def test_a_group_without_jobs_ends() -> None:
    state = made_state(1)
    place(state, "g0", (0,), "a")
    state.place(replace(state.groups["g0"].group, job_ids=(), weights=()))
    check(state)
    assert not state.groups and list(state.pending) == ["a"] and state.groups_opened == 1


# -- the check -------------------------------------------------------------------------------------------------------------


def broken(state: ClusterState, how: str) -> None:
    first, second = state.groups["g0"], state.groups["g1"]
    match how:
        case "shared GPU":
            second.group = replace(second.group, gpus=(0,))
        case "free GPU":
            state.pool.nodes["n0"].free.insert(0, 0)
        case "free count":
            state.pool.num_free += 1
        case "index":
            state.pool.nodes_by_free = {9: {"n0": None}}
        case "two groups":
            second.group = replace(second.group, job_ids=("a", "c"), weights=(1.0, 1.0))
        case "lost job":
            del state.pending["d"]
        case "lost GPU":
            state.pool.num_gpus += 1
        case "other base":
            state.jobs["a"].spec = replace(state.jobs["a"].spec, base_model="south")
        case "memory":
            first.group = replace(first.group, plan=ParallelPlan(1, 10**6))
        case "status":
            state.jobs["a"].status = "pending"
        case _:
            first.group = replace(first.group, gpus=())


HOW: dict[str, str | None] = {
    "shared GPU": "GPU 0 is g1's and g0's",
    "free GPU": "n0 is not among the nodes of 3 free GPUs",
    "free count": "3 free GPUs counted, 2 there",
    "index": None,
    "two groups": "a is in g0 and g1",
    "lost job": "a job is neither waiting nor in a group",
    "lost GPU": None,
    "other base": None,
    "memory": "g0 does not fit into a GPU's memory",
    "status": None,
    "no GPU": None,
}


@pytest.mark.parametrize("how", HOW)
def test_the_check_finds_what_is_wrong(how: str) -> None:
    state = made_state(4)
    place(state, "g0", (0,), "a", "b")
    place(state, "g1", (1,), "c")
    state.submit(made_spec("d"))
    check(state)
    broken(state, how)
    with pytest.raises((AssertionError, KeyError), match=HOW[how]):
        check(state)
