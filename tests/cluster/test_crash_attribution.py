"""A worker that somebody else kills again and again: its jobs are suspected, and none fails that gets further in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.fake_workers import STARTED, FakeCrew
from tests.cluster.test_local import group, job, machine, poll_until, submitted
from tlora.cluster import local
from tlora.cluster.crash_attribution import FILE, MOST_DEATHS, CrashAttribution
from tlora.cluster.local import LocalBackend
from tlora.errors import CheckpointError
from tlora.live.cluster_run import submit_all
from tlora.protocol import Event, GroupLost, JobFailed, StartGroup
from tlora.worker_protocol import Joined, Report, Stepped


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalBackend:
    monkeypatch.setattr(local, "WorkerPool", FakeCrew)
    made = LocalBackend(machine(tmp_path))
    submit_all(made, {name: job(name) for name in "ab"}, [(0.0, submitted(name)) for name in "ab"])
    made.poll(), made.poll()
    return made


def lose_worker(backend: LocalBackend, number: int, *said: Report) -> list[Event]:
    """A worker that lets in whom it is told to, says so much, and is killed: what is told of that."""
    backend.execute(StartGroup(group(f"g{number}", 0, "a", "b")))
    worker = STARTED[-1]
    worker.obey()
    worker.say(*said, None)
    return poll_until(backend, GroupLost)


def test_a_job_that_gets_further_between_deaths_does_not_fail_for_them(backend: LocalBackend) -> None:
    """Each death in company leaves it alone for more steps; it takes one of them at a time, as the other does when it is its turn."""
    for number in range(10 * MOST_DEATHS):
        events = lose_worker(backend, number, Stepped("a", 1 + number, 0.1), Stepped("b", 1 + number, 0.1))
        assert not any(isinstance(event, JobFailed) for event in events), number
    assert {"a", "b"} <= backend._reconciler.open


def test_a_checkpoint_that_is_ahead_of_the_last_report_is_progress(backend: LocalBackend) -> None:
    """Steps are reported once a second: a worker that dies before has told none of what its job has saved."""
    for number in range(2 * MOST_DEATHS):
        backend.execute(StartGroup(group(f"g{number}", 0, "a", "b")))
        worker = STARTED[-1]
        told = [command.job.name for command in worker.commands if hasattr(command, "job")]
        worker.commands.clear()
        for name in told:
            worker.say(Joined(name, 10 * number))
        worker.say(None)
        events = poll_until(backend, GroupLost)
        assert not any(isinstance(event, JobFailed) for event in events), number


def test_three_deaths_without_a_new_step_are_enough(backend: LocalBackend) -> None:
    """Also after many with one: what was earned before counts no more."""
    for number in range(3):
        lose_worker(backend, number, Stepped("a", 1 + number, 0.1))
    failed: list[JobFailed] = []
    for number in range(3, 2 + MOST_DEATHS):  # the last of those before is the first
        failed += [event for event in lose_worker(backend, number, Stepped("a", 3, 0.1)) if isinstance(event, JobFailed)]
    assert [event.job_id for event in failed] == ["a"] and "3 workers in a row" in failed[0].reason


def test_what_is_held_against_jobs_outlives_the_controller(backend: LocalBackend, tmp_path: Path) -> None:
    """Deaths before and after its restart count together, and a suspect is alone until it has got as far as it must."""
    lose_worker(backend, 0, Stepped("a", 9, 0.1), Stepped("b", 2, 0.1))
    lose_worker(backend, 1)
    backend.abandon()
    said: list[str] = []
    again = LocalBackend(machine(tmp_path), said.append)
    known = again._reconciler.crash_attribution
    assert said == [] and known.of["a"].deaths == 2 and known.is_alone("a") and known.is_alone("b")
    submit_all(again, {name: job(name) for name in "ab"}, [(0.0, submitted(name)) for name in "ab"])
    while not again._reconciler.open >= {"a", "b"}:
        again.poll()
    events = lose_worker(again, 2)
    assert JobFailed in {type(event) for event in events}, "the third death in a row"
    again.abandon()


def test_a_damaged_file_of_it_is_told_and_a_full_disk_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_attribution, said = CrashAttribution(), list[str]()
    crash_attribution.die(["a"], together=True)
    with monkeypatch.context() as patch:
        patch.setattr("tlora.durable.write_file", full)
        crash_attribution.keep(tmp_path)
    assert crash_attribution.changed and not (tmp_path / FILE).exists()
    crash_attribution.keep(tmp_path)
    again = CrashAttribution()
    again.recall(tmp_path, said.append)
    assert again.of == crash_attribution.of and said == [] and not crash_attribution.changed
    (tmp_path / FILE).write_text('{"a": {"deaths": "many"}}')
    again = CrashAttribution()
    again.recall(tmp_path, said.append)
    assert again.of == {} and len(said) == 1 and FILE in said[0]


def full(*_: object) -> None:
    raise CheckpointError("no space")
