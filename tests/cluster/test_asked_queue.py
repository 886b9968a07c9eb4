"""What users ask comes in the order of its times; what is asked of a job that waits for hosts is not lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.fake_workers import local_backend
from tests.cluster.test_local import PROFILE, job, submitted
from tlora.cluster import asked_queue
from tlora.cluster.asked_queue import AskedQueue
from tlora.cluster.local import LocalBackend
from tlora.protocol import Event, JobRequest, JobSubmitted, NodeAdded

LARGE = JobSubmitted("large", "base", 1, PROFILE, least_gpus=3)
HOST = NodeAdded("b", (1000,))


def waiting(directory: Path, monkeypatch: pytest.MonkeyPatch) -> LocalBackend:
    """Of two GPUs, where hosts come by themselves, with a job whose base takes three."""
    monkeypatch.setattr(asked_queue, "AGAIN_SECONDS", 0.01)
    said: list[str] = []
    made = local_backend(directory, note=said.append)
    made._hosts_may_come = made._wide._takes_what_comes = True
    made.submit(LARGE, job("large"))
    while not any("waits for workers of other hosts" in line for line in said):
        made.advance()
    return made


def until(backend: LocalBackend, last: Event) -> list[JobSubmitted | JobRequest]:
    """The jobs and requests that come up to the event."""
    found: list[Event] = []
    while last not in found:
        found += backend.poll()
    return [event for event in found if isinstance(event, JobSubmitted | JobRequest)]


def test_a_job_that_is_held_while_it_waits_for_hosts_comes_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verbs = ("hold", "release", "hold")
    with waiting(tmp_path, monkeypatch) as backend:
        for verb in verbs:
            backend.ask(JobRequest("large", verb))  # type: ignore[arg-type]
            backend.advance()
        backend.worker_pool.remote_hosts.events.append(HOST)
        come = until(backend, JobRequest("large", "hold"))
        while len(come) < 4:
            come += until(backend, JobRequest("large", "hold"))
        assert come == [replace(LARGE, gpus=3), *(JobRequest("large", verb) for verb in verbs)]


def test_a_job_that_is_cancelled_while_it_waits_for_hosts_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancel = JobRequest("large", "cancel")
    with waiting(tmp_path, monkeypatch) as backend:
        backend.ask(JobRequest("large", "hold"))
        backend.ask(cancel)
        assert until(backend, cancel) == [cancel] and backend.unfinished == 0
        backend.worker_pool.remote_hosts.events.append(HOST)
        backend.forget("large")
        small = submitted("large")
        backend.submit(small, job("large"))  # the name is free, and what was asked of its last bearer is forgotten
        assert until(backend, small) == [small]
        backend.seal()
        backend.ask(cancel)
        assert until(backend, cancel) == [cancel] and backend.poll() == []


def test_what_was_asked_of_a_waiting_job_comes_before_what_is_asked_once_it_has_come() -> None:
    """A job that was held while it waited and is released as it comes is not held again."""
    asked, open_jobs = AskedQueue(), set[str]()
    hold, release, large = JobRequest("large", "hold"), JobRequest("large", "release"), submitted("large")
    asked.put(large, 0.0)
    assert list(asked.take(0.0, lambda job: None, open_jobs.__contains__)) == []
    asked.put(hold, 0.5)
    assert list(asked.take(0.5, lambda job: None, open_jobs.__contains__)) == [] and list(asked.jobs) == ["large"]
    coming = asked.take(1.0, lambda job: job, open_jobs.__contains__)
    assert next(coming) == large
    open_jobs.add("large")
    asked.put(release, 0.0)
    assert list(coming) == [hold, release]


def test_what_is_asked_of_a_job_that_has_ended_is_dropped() -> None:
    asked = AskedQueue()
    asked.put(JobRequest("a", "cancel"), 1.0)
    asked.put(JobRequest("b", "hold"), 0.0)
    asked.put(submitted("c"), 2.0)
    taken = list(asked.take(1.0, lambda job: job, {"b"}.__contains__))
    assert taken == [JobRequest("b", "hold")] and list(asked.jobs) == ["c"] and asked.due_seconds == 2.0
    asked.drop_jobs(["c"])
    assert not asked.jobs and asked.due_seconds == float("inf")
