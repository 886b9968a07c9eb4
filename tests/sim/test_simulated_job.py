from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.small_clusters import made_job
from tlora.sim.simulated_job import SimulatedJob


def job_of(steps: int = 1000, alone: float = 1.0, max_slowdown: float = 2.0) -> SimulatedJob:
    job = made_job("a", steps)
    found = SimulatedJob(job.job, "done", 0.0, 1000.0, alone, 1.0)
    found.bound_seconds = 10 * max_slowdown * alone * (1 + 1e-9)
    return found


def run(job: SimulatedJob, steps: float, step_seconds: float, micro_batch_seconds: float = 0.0) -> None:
    job.step_seconds = step_seconds
    job.run(steps * step_seconds, micro_batch_seconds)


def test_a_million_steps_of_one_speed_are_a_hundred_thousand_equal_windows():
    job = job_of()
    run(job, 1_000_000, 1.5)
    assert (job.windows, job.windows_beyond, job.steps) == (100_000, 0, 1_000_000)
    assert job.slowdown_sum / job.windows == pytest.approx(1.5)


def test_a_window_over_two_speeds_is_their_mix():
    job = job_of()
    run(job, 5, 1.0)
    run(job, 5, 3.2)
    assert (job.windows, job.windows_beyond) == (1, 1)  # 21 seconds of 20
    assert job.worst_slowdown == pytest.approx(2.1)


@pytest.mark.parametrize(("micro_batch_seconds", "beyond"), [(0.9, 10), (1.1, 0)])
def test_a_window_may_be_late_by_one_micro_batch(micro_batch_seconds: float, beyond: int):
    job = job_of()
    run(job, 100, 2.1, micro_batch_seconds)  # 21 seconds of 20
    assert job.windows_beyond == beyond


def test_standing_still_counts_once_it_has_run():
    job = job_of()
    job.stand(100.0)
    run(job, 10, 1.0)
    assert job.worst_slowdown == pytest.approx(1.0)
    job.go_on(0.0)
    job.stand(15.0)
    run(job, 10, 1.0)
    assert (job.worst_slowdown, job.windows_beyond) == (pytest.approx(2.5), 1)


def test_windows_with_a_move_are_told_from_those_without():
    job = job_of(max_slowdown=2.0)
    job.stand(3.0)  # before its first run: the start of its group
    job.go_on(3.0)
    run(job, 10, 1.0)
    run(job, 5, 1.0)
    job.stand(40.0)
    run(job, 15, 1.0)  # the second window takes 50 s, the third 10
    run(job, 10, 3.0)  # and the fourth 30, without a move
    record = job.record()
    assert (record.windows, record.windows_beyond, record.windows_with_moves, record.windows_with_moves_beyond) == (4, 2, 1, 1)
    assert (record.group_seconds, record.paused_seconds) == (100.0, 40.0)


def test_steps_that_are_undone_are_made_good_in_the_same_window():
    job = job_of()
    run(job, 9.5, 1.0)
    job.undo(9.0)
    assert (job.steps, job.windows) == (9.0, 0)
    run(job, 1, 1.0)
    assert (job.windows, job.worst_slowdown) == (1, pytest.approx(1.05))


@given(st.lists(st.tuples(st.integers(1, 37), st.sampled_from([0.5, 1.0, 1.75, 2.5]), st.floats(0, 12)), min_size=1, max_size=12))
def test_windows_are_those_of_single_steps(stretches: list[tuple[int, float, float]]):
    job = job_of()
    job.go_on(0.0)
    times: list[float] = []
    for steps, step_seconds, still in stretches:
        job.stand(still)
        run(job, steps, step_seconds)
        times += [step_seconds + still, *[step_seconds] * (steps - 1)]
    windows = [math.fsum(times[first : first + 10]) for first in range(0, len(times) - 9, 10)]
    assert job.windows == len(windows)
    assert job.slowdown_sum == pytest.approx(math.fsum(windows) / 10)
    sure = [seconds for seconds in windows if abs(seconds - 20) > 1e-3]
    assert sum(seconds > 20 for seconds in sure) <= job.windows_beyond <= sum(seconds > 20 for seconds in sure) + len(windows) - len(sure)
    if windows:
        assert job.worst_slowdown == pytest.approx(max(windows) / 10)
