"""What the cluster reports becomes what a user sees: for what a job waits just now, and what runs where."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.served import until
from tlora.protocol import (
    ChangeGroup,
    GpusUnheard,
    JobDelayed,
    JobGroup,
    JobProfile,
    JobRequest,
    JobSubmitted,
    ParallelPlan,
    StartGroup,
    StepsDone,
)
from tlora.service.database.store import default_url, open_store
from tlora.service.database.writer import Writer
from tlora.service.job_status_writer import JobStatusWriter
from tlora.service.live_state import LiveState
from tlora.service.machine import Devices
from tlora.service.waiting_queue import QueuePlace


class Seen:
    """Outcomes over an empty store."""

    def __init__(self, directory: Path) -> None:
        self._engine = open_store(default_url(directory))
        self._writer = Writer(self._engine)
        self.live, self.forgotten = LiveState(2), list[str]()
        self.outcomes = JobStatusWriter(directory, self._writer, self.live, self.forgotten.append)
        self.outcomes.begin(Devices("cpu", (0,)))

    def submit(self, *names: str) -> None:
        for name in names:
            self.outcomes.see(JobSubmitted(name, "base", 1, JobProfile(10.0, 5, 20, 100)))

    def waits(self, name: str, status: str, *words: str) -> None:
        """Sooner or later, without anything else happening, that is what it waits for."""
        until(lambda: all(word in (self.live.waiting_for(name, status) or "") for word in words))

    def close(self) -> None:
        self._writer.close()
        self._engine.dispose()


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Seen]:
    found = Seen(tmp_path)
    yield found
    found.close()


def group(*names: str) -> JobGroup:
    return JobGroup("g", "base", (0,), ParallelPlan(1, 1024), names, (1.0,) * len(names))


def test_the_last_change_is_shown_also_where_many_came_at_once(seen: Seen) -> None:
    seen.submit(*[f"j{number}" for number in range(50)])
    seen.waits("j49", "queued", "49 jobs wait before it")
    for number in range(48):
        seen.outcomes.see(JobRequest(f"j{number}", "cancel"))
    seen.waits("j49", "queued", "1 job waits before it")
    assert len(seen.forgotten) == 48


def test_a_jobs_data_is_read_until_it_has_been_read(seen: Seen) -> None:
    seen.outcomes.reading("a", 500, 1.0)
    seen.waits("a", "preparing", "its data is being read: 500 rows, 100%")
    assert "read" not in (seen.live.waiting_for("a", "queued") or ""), "whatever the picture still shows"
    seen.outcomes.read("a")
    until(lambda: not seen.live.snapshot.reading)
    seen.outcomes.wait_for("a", "room on the server's disk")
    seen.waits("a", "preparing", "room on the server's disk")


def test_a_paused_job_is_in_nobodys_way(seen: Seen) -> None:
    seen.submit("first", "second")
    seen.outcomes.see(JobRequest("first", "hold"))
    seen.waits("second", "queued", "it is the next")
    assert seen.live.waiting_for("first", "paused") == "paused"
    seen.outcomes.see(JobRequest("first", "release"))
    seen.waits("first", "queued", "1 job waits before it")


def test_a_report_that_comes_after_the_pause_does_not_make_it_run(seen: Seen) -> None:
    """Else a job that is resumed would be taken for one that runs already, and never be said to."""
    seen.submit("a")
    seen.outcomes.see(StartGroup(group("a")))
    seen.waits("a", "queued", "to load the base")
    seen.outcomes.see(StepsDone("a", "g", 1, 0.1))
    until(lambda: "a" not in seen.live.snapshot.waiting)
    for event in (JobRequest("a", "hold"), ChangeGroup(group()), StepsDone("a", "g", 2, 0.1), JobRequest("a", "release")):
        seen.outcomes.see(event)
    seen.waits("a", "queued", "it is the next")
    seen.outcomes.see(ChangeGroup(group("a")))
    seen.waits("a", "queued", "to load the base")


def test_a_running_job_that_does_not_go_on_says_what_it_waits_for(seen: Seen) -> None:
    seen.submit("a", "b")
    for event in (StartGroup(group("a", "b")), StepsDone("a", "g", 1, 0.1), StepsDone("b", "g", 1, 0.1)):
        seen.outcomes.see(event)
    until(lambda: not seen.live.snapshot.waiting)
    assert seen.live.waiting_for("a", "running") is None
    seen.outcomes.see(JobDelayed("a", "room on the disk"))
    seen.waits("a", "running", "room on the disk")
    assert seen.live.waiting_for("b", "running") is None
    seen.outcomes.see(GpusUnheard((0,), "the end of its lease"))
    seen.waits("b", "running", "the end of its lease")
    seen.outcomes.see(GpusUnheard((0,), ""))
    seen.outcomes.see(StepsDone("a", "g", 2, 0.1))
    until(lambda: not seen.live.snapshot.waiting)


def test_a_job_that_leaves_its_group_before_its_first_step_waits_again(seen: Seen) -> None:
    """As when the base's speed is measured with the first jobs, and bounds do not hold with so many."""
    seen.submit("a", "b")
    seen.outcomes.see(StartGroup(group("a", "b")))
    seen.waits("b", "queued", "to load the base")
    seen.outcomes.see(ChangeGroup(group("a")))
    seen.waits("b", "queued", "it is the next")


def test_those_that_wait_are_shown_in_the_order_of_the_policy_with_its_reasons(seen: Seen) -> None:
    seen.submit("a", "b", "c")
    soon = time.time() + 600.0
    seen.outcomes.see_queue({"c": QueuePlace(1, "", soon), "a": QueuePlace(2, "no GPU is free", None)})
    seen.waits("c", "queued", "it is the next; expected to start in about 10 min")
    seen.waits("a", "queued", "1 job waits before it; no GPU is free")
    seen.waits("b", "queued", "2 jobs wait before it")
    assert list(seen.live.snapshot.waiting) == ["c", "a", "b"]
    assert seen.live.queue_place("c", "queued") == (1, soon) and seen.live.queue_place("b", "queued") == (3, None)
    assert seen.live.queue_place("c", "running") == (None, None)
    seen.outcomes.see(JobRequest("c", "cancel"))
    seen.waits("a", "queued", "it is the next")
