"""A worker that somebody else kills again and again: its jobs are suspected, and none fails that gets further in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.fake_workers import STARTED, local_backend
from tests.cluster.test_local import group, job, poll_until, submitted
from tlora.cluster.crash_attribution import FILE, MOST_DEATHS, CrashAttribution
from tlora.cluster.local import LocalBackend
from tlora.errors import CheckpointError
from tlora.live.cluster_run import submit_all
from tlora.protocol import Event, GroupLost, JobFailed, StartGroup
from tlora.worker_protocol import Joined, Report, Stepped


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    made = local_backend(tmp_path)
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


def test_a_job_that_gets_further_between_deaths_does_not_fail_for_them() -> None:
    """Also alone; what was earned before counts no more once it does not get further."""
    known = CrashAttribution()
    for number in range(10 * MOST_DEATHS):
        known.see_steps("a", 1 + number)
        assert known.die(["a"], together=False) == []
    assert [known.die(["a"], together=False) for _ in range(MOST_DEATHS - 1)][-1] == ["a"]


def test_each_death_in_company_makes_the_time_alone_longer() -> None:
    """A job that kills only among others, or now and then, costs ever fewer deaths."""
    known, alone = CrashAttribution(), list[int]()
    for _ in range(3):
        assert known.die(["a", "b"], together=True) == []
        until = known.of["a"].alone_until
        assert until is not None and known.is_alone("a") and known.is_alone("b")
        alone.append(until - known.of["a"].furthest)
        known.see_steps("a", until - 1)
        assert known.is_alone("a")
        known.see_steps("a", until)
        assert not known.is_alone("a")
    assert alone == [4, 16, 64]


def test_a_suspicion_is_forgotten_after_a_long_time_without_another() -> None:
    """Ten times the steps that it costs alone. Each death is held against the job for as long as its own time alone was."""
    known = CrashAttribution()
    known.see_steps("a", 100)
    known.die(["a", "b"], together=True)
    for deaths, far, left in ((0, 104 + 39, 1), (0, 104 + 40, 0), (2, 160 + 159, 2), (0, 160 + 160 + 39, 1), (0, 160 + 160 + 40, 0)):
        for _ in range(deaths):
            known.die(["a"], together=True)
        known.see_steps("a", far)
        assert known.of["a"].suspicions == left
    assert known.of["a"].is_clean and known.of["a"].trusted_at is None and known.of["b"].suspicions == 1
    known.die(["a"], together=True)
    assert known.of["a"].alone_until == 360 + 4, "one that is trusted again is alone for the least time"


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


def test_what_is_held_against_jobs_outlives_the_controller(backend: LocalBackend, tmp_path: Path) -> None:
    """Deaths before and after its restart count together, and a suspect is alone until it has got as far as it must."""
    lose_worker(backend, 0, Stepped("a", 9, 0.1), Stepped("b", 2, 0.1))
    lose_worker(backend, 1)
    backend.abandon()
    said: list[str] = []
    again = local_backend(tmp_path, note=said.append)
    known = again.reconciler.crash_attribution
    assert said == [] and known.of["a"].deaths == 2 and known.is_alone("a") and known.is_alone("b")
    submit_all(again, {name: job(name) for name in "ab"}, [(0.0, submitted(name)) for name in "ab"])
    while not again.reconciler.open >= {"a", "b"}:
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
