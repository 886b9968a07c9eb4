"""The log of a cluster that was stopped and started again: one file, one course of time, each job once."""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sim.small_clusters import cluster_of, even_cost, made_job
from tlora.cluster.controller import run
from tlora.cluster.event_log import EventLog
from tlora.errors import ConfigError
from tlora.protocol import Action, Event, GroupFound, JobFinished, JobGroup, JobSubmitted, NodeAdded, ParallelPlan, Tick, to_json
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.sim.machines import ClusterShape
from tlora.sim.mapping import logged_jobs
from tlora.sim.simulate import simulate
from tlora.sim.trace import read_event_log

JOBS = (made_job("a", 100), made_job("b", 50, at=10.0), made_job("c", 20, at=1000.0))


class StopError(Exception):
    """As a signal ends a controller, at whatever it is."""


def run_until(path: Path, until: float) -> None:
    """JOBS from their beginning, as whoever starts the same command again has them; what happens after `until` seconds is not seen."""
    with closing(EventLog(path)) as log:

        def note(seconds: float, item: Event | Action) -> None:
            if seconds > until:
                raise StopError
            log.write(seconds, item)

        run(Scheduler(POLICIES["fifo"](), even_cost()), cluster_of(*JOBS), note)


def written(path: Path, *rows: tuple[float, Event | Action]) -> list[tuple[float, Event | Action]]:
    """What is read after one more run that tells `rows`."""
    with closing(EventLog(path)) as log:
        for seconds, item in rows:
            log.write(seconds, item)
    return read_event_log(path)


def test_two_runs_are_one_log_and_each_job_is_replayed_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with pytest.raises(StopError):
        run_until(path, 60.0)
    before = read_event_log(path)
    run_until(path, 1e9)
    rows = read_event_log(path)
    stopped_at = before[-1][0]
    assert rows[: len(before)] == before and stopped_at == 60.0
    assert all(earlier <= later for (earlier, _), (later, _) in itertools.pairwise(rows))
    orders = [(seconds, item.job_id) for seconds, item in rows if isinstance(item, JobSubmitted)]
    assert orders == [(0.0, "a"), (10.0, "b"), (60.0, "a"), (70.0, "b"), (1060.0, "c")]
    jobs = logged_jobs(rows, even_cost())
    assert [(job.submit_seconds, job.job.job_id) for job in jobs] == [(0.0, "a"), (10.0, "b"), (1060.0, "c")]
    result = simulate(jobs, ClusterShape(1, 2), POLICIES["fifo"](), even_cost())
    assert [job.state for job in result.jobs] == ["done"] * 3


def test_a_deadline_is_on_the_clock_of_the_log(tmp_path: Path) -> None:
    path, order = tmp_path / "events.jsonl", replace(JOBS[0].job, deadline=30.0)
    written(path, (0.0, order), (100.0, Tick()))
    rows = written(path, (1.0, replace(order, job_id="z")))
    assert rows[0] == (0.0, order) and rows[-1] == (101.0, replace(order, job_id="z", deadline=130.0))


def test_the_time_without_a_controller_is_left_out(tmp_path: Path) -> None:
    """The back end's clock has gone on; so have the times of the jobs that were found."""
    path, order = tmp_path / "events.jsonl", replace(JOBS[0].job, deadline=150.0, submitted_at=10.0)
    written(path, (0.0, NodeAdded("n", (0,))), (100.0, Tick()))
    group = JobGroup("g0", order.base_model, (0,), ParallelPlan(1, 1024), ("a",), (1.0,))
    with closing(EventLog(path, began_at_seconds=130.0)) as log:
        log.write(131.0, GroupFound(group, (order,)))
    found = replace(order, deadline=120.0, submitted_at=-20.0)
    assert read_event_log(path)[-1] == (101.0, GroupFound(group, (found,)))


@pytest.mark.parametrize("cut", [1, 2, 20, 39])
def test_a_line_that_a_kill_has_torn_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    written(path, (0.0, NodeAdded("n", (0,))), (5.0, Tick()))
    whole = path.read_bytes()
    path.write_bytes(whole + json.dumps({"seconds": 7.0, **to_json(JobFinished("a"))}).encode()[:cut])
    assert [seconds for seconds, _ in written(path, (1.0, Tick()))] == [0.0, 5.0, 6.0]
    assert path.read_bytes().startswith(whole)


@pytest.mark.parametrize("text", ["", "\n", '{"seconds": 7.0, "ty'])
def test_a_log_in_which_nothing_stands_begins_at_0(tmp_path: Path, text: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(text)
    assert written(path, (1.0, Tick())) == [(1.0, Tick())]


@pytest.mark.parametrize("line", ["jobs,gpus", "[1]", '{"type": "Tick"}', '{"seconds": NaN}', '{"seconds": true}', '{"seconds": "1"}'])
def test_a_file_that_is_no_log_is_refused_and_left_as_it_is(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{line}\nand a rest")
    with pytest.raises(ConfigError, match=r"events\.jsonl.* last line .*another file"):
        EventLog(path)
    assert path.read_text() == f"{line}\nand a rest"
