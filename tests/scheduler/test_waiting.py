"""The order of those who wait, kept up without looking at all of them."""

from __future__ import annotations

import pytest

from tests.scheduler.mirror import made_spec, made_state
from tlora.protocol import JobGroup, ParallelPlan
from tlora.scheduler.state import ClusterState
from tlora.scheduler.waiting import Waiting, arrival


def submit(state: ClusterState, *names: str, gpus: int = 1, priority: float = 0.0) -> None:
    for name in names:
        state.submit(made_spec(name, gpus, priority=priority))


def start(state: ClusterState, name: str, gpu: int) -> None:
    number = state.groups_opened
    state.place(JobGroup(f"g{number}", "north", (gpu,), ParallelPlan(1, 1024), (name,), (1.0,)))


def in_order(waiting: Waiting, state: ClusterState) -> list[str]:
    """All of them; none is gone, for whoever was taken and still waits is back the next time."""
    waiting.follow(state)
    names: list[str] = []
    while (job := waiting.first()) is not None:
        waiting.take(job)
        names.append(job.spec.job_id)
    return names


@pytest.mark.parametrize("lanes", [True, False])
def test_by_priority_then_by_arrival_whoever_asks_for_how_many(lanes: bool) -> None:
    state, waiting = made_state(8), Waiting(arrival, lanes)
    submit(state, "a", "b")
    submit(state, "c", gpus=2)
    submit(state, "d", gpus=4, priority=1.0)
    assert in_order(waiting, state) == in_order(waiting, state) == ["d", "a", "b", "c"]
    submit(state, "e", priority=1.0)
    assert in_order(waiting, state) == ["d", "e", "a", "b", "c"]


def test_who_starts_or_ends_is_out_and_who_waits_again_is_back_in_its_place() -> None:
    state, waiting = made_state(4), Waiting(arrival)
    submit(state, "a", "b", "c", "d")
    assert in_order(waiting, state) == ["a", "b", "c", "d"]
    start(state, "a", 0)
    state.end_job("c")
    assert in_order(waiting, state) == ["b", "d"]
    start(state, "b", 1)
    submit(state, "e")
    state.end_group("g0")
    assert list(state.pending) == ["d", "e", "a"]
    assert in_order(waiting, state) == ["a", "d", "e"]


def test_who_started_and_waits_again_between_two_looks_is_there_once() -> None:
    state, waiting = made_state(4), Waiting(arrival)
    submit(state, "a", "b")
    waiting.follow(state)
    start(state, "a", 0)
    state.end_group("g0")
    submit(state, "c")
    assert in_order(waiting, state) == ["a", "b", "c"]


def test_lanes_are_left_out_by_their_number_of_gpus() -> None:
    state, waiting = made_state(4), Waiting(arrival)
    submit(state, "a", gpus=4)
    submit(state, "b", gpus=1)
    waiting.follow(state)
    first, second = waiting.first(), waiting.first({(4, 0.0, False)})
    assert first is state.jobs["a"] and second is state.jobs["b"] and waiting.first({(1, 0.0, False), (4, 0.0, False)}) is None


def test_another_state_begins_anew() -> None:
    state, waiting = made_state(4), Waiting(arrival)
    submit(state, "a", "b")
    assert in_order(waiting, state) == ["a", "b"]
    other = made_state(4)
    submit(other, "x")
    assert in_order(waiting, other) == ["x"]
    assert in_order(waiting, state) == ["a", "b"]
