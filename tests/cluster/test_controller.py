"""The loop, its record, and a record played again."""

from __future__ import annotations

from pathlib import Path

from tests.sim.answers import answered
from tlora.cluster.controller import run
from tlora.cluster.event_log import EventLog
from tlora.protocol import (
    Action,
    Event,
    JobFinished,
    JobGroup,
    JobProfile,
    JobSubmitted,
    ParallelPlan,
    RejectJob,
    StartGroup,
    StopGroup,
    Tick,
)
from tlora.sim.trace import read_event_log

SUBMITTED = JobSubmitted("a", "base", 1, JobProfile(100.0, 10, 30, 1000, (0, 1, 2)))
GROUP = JobGroup("g0", "base", (0,), ParallelPlan(1, 1024), ("a",), (2.5,))


class Scripted:
    """A back end that tells `batches` one after the other, a second each."""

    def __init__(self, batches: list[list[Event]]) -> None:
        self.batches, self.seconds, self.executed = batches, 0.0, list[Action]()

    def now(self) -> float:
        return self.seconds

    def poll(self) -> list[Event]:
        self.seconds += 1.0
        return self.batches.pop(0) if self.batches else []

    def execute(self, action: Action) -> None:
        self.executed.append(action)


class Simple:
    """Starts what arrives, stops what ends, and answers a tick by what it has counted: its answers depend on its past."""

    def __init__(self) -> None:
        self.handled: list[tuple[Event, float]] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        self.handled.append((event, now))
        match event:
            case JobSubmitted():
                return [StartGroup(GROUP)]
            case JobFinished():
                return [StopGroup("g0"), RejectJob("b", f"{len(self.handled)} events")]
            case _:
                return []


def incident() -> list[list[Event]]:
    return [[SUBMITTED, Tick()], [Tick()], [JobFinished("a")]]


def test_each_event_is_handled_and_its_actions_executed_before_the_next() -> None:
    backend, scheduler, seen = Scripted(incident()), Simple(), list[tuple[float, Event | Action]]()
    run(scheduler, backend, lambda seconds, item: seen.append((seconds, item)))
    assert scheduler.handled == [(SUBMITTED, 1.0), (Tick(), 1.0), (Tick(), 2.0), (JobFinished("a"), 3.0)]
    assert backend.executed == [StartGroup(GROUP), StopGroup("g0"), RejectJob("b", "4 events")]
    assert [item for _, item in seen] == [SUBMITTED, StartGroup(GROUP), Tick(), Tick(), JobFinished("a"), *backend.executed[1:]]
    assert [seconds for seconds, _ in seen] == [1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 3.0]


def test_without_events_nothing_is_done() -> None:
    backend = Scripted([])
    run(Simple(), backend)
    assert backend.executed == []


def test_an_incident_is_played_again_from_its_log(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    run(Simple(), Scripted(incident()), log.write)
    log.close()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"seconds": 4.0, "ty')  # torn by a crash
    rows = read_event_log(tmp_path / "events.jsonl")
    assert len(rows) == 7 and answered(Simple(), rows) == rows
    assert answered(Simple(), rows[2:]) != rows[2:]
