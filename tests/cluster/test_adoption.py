"""What a back end makes of workers that it finds: reports of jobs in no group, and groups that cannot both be taken over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fake_workers import FakeCrew, FakeProcess, local_backend
from tests.cluster.test_local import group, job, poll_until, submitted
from tlora.cluster.local import LocalBackend
from tlora.cluster.reconciler import Reconciler
from tlora.cluster.remote_worker import RemoteWorker
from tlora.engine.worker_reconciler import WorkerReconciler
from tlora.protocol import (
    BaseMeasured,
    BaseSpeed,
    GroupFound,
    GroupLost,
    JobFailed,
    JobFinished,
    JobGroup,
    JobRequest,
    JobSubmitted,
    Tick,
)
from tlora.worker_protocol import (
    Delayed,
    DesiredState,
    Envelope,
    Failed,
    Finished,
    HeldJob,
    Hello,
    Join,
    Joined,
    Load,
    Loaded,
    Measured,
    Report,
    Stepped,
)


class FoundCrew(FakeCrew):
    """Workers of an earlier controller, which say what they have."""

    hellos: tuple[tuple[JobGroup | None, tuple[HeldJob, ...]], ...] = ()
    said: tuple[Report | None, ...] = ()  # by the first; None: it has ended

    @classmethod
    def read_records(cls, directory: Path) -> dict[tuple[int, ...], Any]:
        return {(gpu,): None for gpu in range(len(cls.hellos))}

    def find(self, records: Any) -> None:
        for gpu, (found, jobs) in enumerate(self.hellos):
            load = self._loads("models/base")
            worker = self.workers[gpu] = RemoteWorker((gpu,), load, FakeProcess(), self._epoch)
            worker.attach(Hello(f"earlier {gpu}", (gpu,), {}, load, True, found, jobs, 1, 7, 0), lambda _: None)
            if gpu == 0:
                for number, report in enumerate(self.said):
                    self.inbox.put((worker, None if report is None else Envelope(number + 1, 7, report)))


@pytest.fixture
def find(tmp_path: Path) -> Callable[..., LocalBackend]:
    def make(*hellos: tuple[JobGroup | None, tuple[HeldJob, ...]], said: tuple[Report | None, ...] = ()) -> LocalBackend:
        return local_backend(tmp_path, type("Found", (FoundCrew,), {"hellos": hellos, "said": said}))

    return make


def test_a_job_that_failed_as_it_was_paused_has_failed(find: Callable[..., LocalBackend]) -> None:
    """Its worker was told to let it go, and its end was not taken when the controller was killed."""
    end = HeldJob("a", 3, 0, resident=False)
    backend = find((group("g0", 0, "b"), (HeldJob("b", 4, 2, resident=True), end)), said=(Failed("a", "its data", 3),))
    for name in "ab":
        backend.submit(submitted(name), job(name), at_seconds=-1.0)
    backend.ask(JobRequest("a", "hold"))
    events = poll_until(backend, JobFailed)
    told = [event for event in events if isinstance(event, GroupFound | JobSubmitted | JobRequest | JobFailed)]
    assert [type(event) for event in told] == [GroupFound, JobSubmitted, JobRequest, JobFailed] and told[-1] == JobFailed("a", "its data")
    assert backend.reconciler.open == {"b"}


def test_an_end_that_was_recorded_and_not_acknowledged_is_void(find: Callable[..., LocalBackend]) -> None:
    """The controller before was killed between the two: the job is not open any more, and its worker says once more how it ended."""
    end = HeldJob("a", 3, 0, resident=False)
    backend = find((group("g0", 0, "a", "b"), (HeldJob("b", 4, 2, resident=True), end)), said=(Finished("a", {}, 3), Finished("b", {}, 4)))
    backend.submit(submitted("b"), job("b"), at_seconds=-1.0)
    events = poll_until(backend, JobFinished)
    assert [event.job_id for event in events if isinstance(event, JobFinished)] == ["b"]
    assert backend.worker_pool.workers[0].jobs == {} and not backend.reconciler.open


def test_a_worker_that_was_told_to_stop_is_not_held_against_its_jobs(find: Callable[..., LocalBackend]) -> None:
    """The controller before wanted its group on other GPUs, and was killed. One of its jobs is in, one on its way in; nobody says how far
    they have got.
    """
    worker_reconciler, wanted = WorkerReconciler((0,)), (Join(job("a").spec, attempt=3), Join(job("b").spec, attempt=4))
    worker_reconciler.hear_want(DesiredState(1, 1, Load("models/base", "o", "cpu", 0.0), group("g0", 0, "a", "b"), wanted))
    worker_reconciler.hear_report(Loaded())
    worker_reconciler.hear_report(Joined("a", 2))
    worker_reconciler.reports.clear()  # these are taken
    worker_reconciler.hear_want(DesiredState(1, 2, Load("models/base", "o", "cpu", 0.0), stop=True))
    backend = find((group("g0", 0, "a", "b"), tuple(worker_reconciler.held)), said=(*worker_reconciler.reports, None))
    for name in "ab":
        backend.submit(submitted(name), job(name), at_seconds=-1.0)
    events = [*backend.poll(), *backend.poll()]
    assert any(isinstance(event, GroupFound) for event in events) and any(isinstance(event, GroupLost) for event in events)
    assert all(suspect.is_clean for suspect in backend.reconciler.crash_attribution.of.values())


def test_what_a_job_waits_for_is_told_to_the_next_controller_until_it_goes_on() -> None:
    worker_reconciler, load = WorkerReconciler((0,)), Load("models/base", "o", "cpu", 0.0)
    wanted = tuple(Join(job(name).spec, attempt=1) for name in "ab")
    worker_reconciler.hear_want(DesiredState(1, 1, load, group("g0", 0, "a", "b"), wanted))
    for report in (Joined("a", 0), Joined("b", 0), Delayed("a", "room"), Delayed("b", "room"), Stepped("b", 1, 0.1)):
        worker_reconciler.hear_report(report)
    worker_reconciler.reports.clear()
    worker_reconciler.hear_want(DesiredState(2, 1, load, group("g0", 0, "a", "b"), wanted))
    assert worker_reconciler.reports == [Delayed("a", "room", 1)]


@pytest.mark.parametrize("end", [Finished("a", {}, 3), Failed("a", "its data", 3)])
def test_an_end_that_is_told_before_its_job_is_submitted_is_not_lost(find: Callable[..., LocalBackend], end: Report) -> None:
    """A server submits what it knows of, and some later, as their base has to be looked at: their worker forgets what was taken."""
    told = HeldJob("a", 3, 0, resident=False)
    backend = find((group("g0", 0, "a", "b"), (HeldJob("b", 4, 2, resident=True), told)), said=(end, Finished("b", {}, 4)))
    backend.submit(submitted("b"), job("b"), at_seconds=-1.0)
    events = poll_until(backend, JobFinished)
    backend.submit(submitted("a"), job("a"), at_seconds=-1.0)
    ended = JobFinished("a") if isinstance(end, Finished) else JobFailed("a", "its data")
    events = poll_until(backend, type(ended))
    assert [event for event in events if not isinstance(event, Tick)] == [replace(submitted("a"), submitted_at=-1.0), ended]
    assert not backend.reconciler.open
    backend.forget("a")
    backend.submit(submitted("a"), job("a"))  # another of that name
    assert [event for event in backend.poll() if not isinstance(event, Tick)] == [submitted("a")] and backend.reconciler.open == {"a"}


def test_an_end_that_is_told_while_its_job_is_being_submitted_is_not_lost(find: Callable[..., LocalBackend]) -> None:
    """Another thread submits it just before it is heard."""
    backend = find((None, (HeldJob("a", 3, 0, resident=False),)), said=(Finished("a", {}, 3),))
    backend.poll()
    backend.submit(submitted("a"), job("a"), at_seconds=-1.0)
    backend.advance()
    events = poll_until(backend, JobFinished)
    assert [event for event in events if not isinstance(event, Tick)] == [replace(submitted("a"), submitted_at=-1.0), JobFinished("a")]


def test_an_earlier_end_is_not_that_of_a_new_job_of_its_name(find: Callable[..., LocalBackend]) -> None:
    backend = find(
        (group("g0", 0, "a", "b"), (HeldJob("b", 4, 2, resident=True), HeldJob("a", 3, 0, resident=False))),
        said=(Finished("a", {}, 3), Finished("b", {}, 4)),
    )
    backend.submit(submitted("b"), job("b"), at_seconds=-1.0)
    poll_until(backend, JobFinished)
    backend.submit(submitted("a"), job("a"))
    assert [event for event in backend.poll() if not isinstance(event, Tick)] == [submitted("a")] and backend.reconciler.open == {"a"}


def test_two_groups_of_one_name_are_not_both_taken_over(find: Callable[..., LocalBackend]) -> None:
    """One job had arrived on the new GPU and the other not yet, when the controller was killed."""
    held = [HeldJob("a", 3, 2, resident=True), HeldJob("b", 2, 1, resident=True), HeldJob("b", 4, 2, resident=True)]
    backend = find((group("g0", 0, "a", "b"), tuple(held[:2])), (group("g0", 1, "a", "b"), (held[2],)))
    for name in "ab":
        backend.submit(submitted(name), job(name), at_seconds=-1.0)
    events = backend.poll()
    (found,) = [event for event in events if isinstance(event, GroupFound)]
    assert found.steps == (2,), "what its worker has done of it by now"
    assert found.group.job_ids == ("b",) and backend.reconciler.groups == {"g0": found.group}, "its attempt is the later one"
    assert not backend.worker_pool.workers[1].stopping
    assert [event.job_id for event in events if isinstance(event, JobSubmitted)] == ["a"], "it waits, and goes on from its checkpoint"


def test_bases_may_be_added_while_one_is_told_to_be_measured(tmp_path: Path) -> None:
    """A server's operator adds them in another thread."""

    class Grown(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            bases["more"] = "models/more"
            return super().__eq__(other)

    bases: dict[str, str] = {"base": Grown("models/base")}
    reconciler = Reconciler(bases, lambda _, __: None, {}, 1)
    worker = RemoteWorker((0,), Load("models/base", "o", "cpu", 0.0), FakeProcess(), 1)
    reconciler.hear(worker, Measured("CPU", BaseSpeed(1000.0, 0.01, 0.0, 0.001)))
    assert reconciler.events == [BaseMeasured("base", "CPU", BaseSpeed(1000.0, 0.01, 0.0, 0.001))]
