"""What users ask comes in the order of its times; a job that waits for hosts is the scheduler's, and so is what is asked of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.cluster.fake_workers import local_backend
from tests.cluster.test_local import PROFILE, job, submitted
from tlora.cluster.asked_queue import AskedQueue
from tlora.cluster.engine_hosts import Demand, Prove
from tlora.cluster.local import LocalBackend
from tlora.protocol import Event, JobRequest, JobSubmitted

LARGE = JobSubmitted("large", "base", 1, PROFILE, least_gpus=3)


class Engine:
    """A keeper of hosts that has four GPUs to give."""

    most_gpus = 4

    def __init__(self, prove: Prove) -> None:
        self.heard: list[Demand] = []

    def want(self, demand: Demand) -> None:
        self.heard.append(demand)

    def start(self) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


def until(backend: LocalBackend, last: Event) -> list[Event]:
    found: list[Event] = []
    while last not in found:
        found += backend.poll()
    return found


def test_an_engine_hears_of_jobs_that_take_more_than_is_there(tmp_path: Path) -> None:
    """Of a base in stages, and of replicas that it can give GPUs to."""
    engine = Engine(lambda *_: None)
    with local_backend(tmp_path, open_keeper=lambda _: engine) as backend:
        backend._hosts_may_come = True
        wide = replace(submitted("wide"), gpus=9)
        for spec in (LARGE, wide):
            backend.submit(spec, job(spec.job_id))
        come = until(backend, replace(wide, gpus=4))
        assert [event for event in come if isinstance(event, JobSubmitted)] == [replace(LARGE, gpus=3), replace(wide, gpus=4)]
        while not engine.heard or engine.heard[-1].waiting != {3: 1, 4: 1}:
            backend._engine_hosts.tell()
        backend.ask(JobRequest("large", "hold"))
        until(backend, JobRequest("large", "hold"))
        while engine.heard[-1].waiting != {4: 1}:
            backend._engine_hosts.tell()


def test_what_is_asked_of_a_job_that_has_ended_is_dropped() -> None:
    asked = AskedQueue()
    asked.put(JobRequest("a", "cancel"), 1.0)
    asked.put(JobRequest("b", "hold"), 0.0)
    asked.put(submitted("c"), 2.0)
    taken = list(asked.take(1.0, lambda job: job, {"b"}.__contains__))
    assert taken == [JobRequest("b", "hold")] and list(asked.jobs) == ["c"] and asked.due_seconds == 2.0
    asked.drop_jobs(["c"])
    assert not asked.jobs and asked.due_seconds == float("inf")
