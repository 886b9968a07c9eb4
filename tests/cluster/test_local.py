"""What the local back end tells its workers, and what it makes of their answers: with workers that do nothing by themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fake_workers import STARTED, FakeWorker, local_backend
from tlora.cluster.crash_attribution import MOST_DEATHS
from tlora.cluster.local import LocalBackend
from tlora.cluster.reconciler import LocalJob
from tlora.engine.messages import SetPlan
from tlora.errors import ConfigError
from tlora.job import JobSpec
from tlora.live.cluster_run import submit_all
from tlora.protocol import (
    BaseMeasured,
    BaseSpeed,
    ChangeGroup,
    Event,
    GroupLost,
    GroupReady,
    JobDelayed,
    JobFailed,
    JobFinished,
    JobGroup,
    JobProfile,
    JobRequest,
    JobSubmitted,
    MemoryFound,
    NodeAdded,
    ParallelPlan,
    RejectJob,
    StartGroup,
    StepsDone,
    StopGroup,
    Tick,
)
from tlora.worker_protocol import Delayed, Ending, Failed, Finished, Left, Measured, Memory, Refused, Stepped

PROFILE = JobProfile(100.0, 10, 30, 1000)


def job(name: str) -> LocalJob:
    return LocalJob(JobSpec.model_validate({"name": name, "data": "d.jsonl"}))


LARGE = JobSpec.model_validate({"name": "large", "data": "d.jsonl", "r": 64})


def submitted(name: str, base: str = "base", gpus: int = 1) -> JobSubmitted:
    return JobSubmitted(name, base, gpus, PROFILE)


def group(name: str, gpu: int, *jobs: str, base: str = "base", budget: int = 1024) -> JobGroup:
    return JobGroup(name, base, (gpu,), ParallelPlan(1, budget), jobs, tuple(1.0 for _ in jobs))


def test_workers_are_told_the_options_of_the_machine(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "deterministic": True,
        "dtype": "bfloat16",
        "base_precision": "fp8",
        "layout": "streamed",
        "unused_weights": "ignore",
        "recompute": 3,
        "memory_limit": 10**9,
        "report_to": ("trackio",),
        "calibrate": True,
    }
    with local_backend(tmp_path, **options) as made:
        submit_all(made, {"a": job("a")}, [(0.0, submitted("a"))])
        made.poll(), made.poll()
        made.execute(StartGroup(group("g", 0, "a")))
        told = STARTED[0].load
    assert {name: getattr(told, name) for name in options} == options


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LocalBackend]:
    """With a, b and c just submitted."""
    names = ("a", "b", "c")
    with local_backend(tmp_path) as made:
        submit_all(made, {name: job(name) for name in names}, [(0.0, submitted(name)) for name in names])
        assert made.poll() == [NodeAdded("local", (0, 1))]
        assert made.poll() == [submitted(name) for name in names]
        yield made


def running(backend: LocalBackend, *groups: JobGroup) -> list[FakeWorker]:
    """These groups on fresh workers, ready."""
    for one in groups:
        backend.execute(StartGroup(one))
    for worker in STARTED:
        worker.obey()
    ready: list[Event] = []
    while len(ready) < len(groups):
        ready += backend.poll()
    assert sorted(ready, key=str) == [GroupReady(one.group_id) for one in sorted(groups, key=str)]
    return list(STARTED)


def test_a_group_is_ready_when_its_base_is_loaded_and_all_are_in(backend: LocalBackend) -> None:
    backend.execute(StartGroup(group("g0", 1, "a", "b", budget=512)))
    (worker,) = STARTED
    assert worker.gpu == 1 and worker.load.base_model == "models/base" and worker.load.output_dir.endswith("/jobs")
    assert worker.commands[0] == SetPlan(512, {"a": 1.0, "b": 1.0}) and worker.asked == ["+a", "+b"]
    worker.obey()
    assert backend.poll() == [GroupReady("g0")]


def test_an_expected_base_is_loaded_by_a_gpu_that_is_free_and_its_group_finds_it(backend: LocalBackend) -> None:
    backend.execute(StartGroup(group("g0", 0, "a", base="other")))
    for name in ("base", "base", "other", "unknown"):
        backend.expect(name, LARGE)
    backend.execute(StartGroup(group("g0", 0, "a", base="other")))  # settles
    assert [(worker.gpu, worker.load.base_model) for worker in STARTED] == [(0, "models/other"), (1, "models/base")]
    backend.execute(StartGroup(group("g1", 1, "b")))
    for worker in STARTED:
        worker.obey()
    found = backend.poll()
    while len(found) < 2:
        found += backend.poll()
    assert len(STARTED) == 2 and {GroupReady("g0"), GroupReady("g1")} == set(found)


def test_a_worker_that_loads_hears_of_the_jobs_that_may_come_as_far_as_their_kernels_differ(backend: LocalBackend) -> None:
    backend.execute(StartGroup(group("g0", 0, "a", base="other")))
    small, dropout = (LARGE.model_copy(update=changed) for changed in ({"r": 8}, {"r": 8, "lora_dropout": 0.1}))
    for spec in (small, small, LARGE, small, dropout, dropout):
        backend.expect("base", spec)
    backend.execute(StartGroup(group("g0", 0, "a", base="other")))  # settles
    worker = next(worker for worker in STARTED if worker.gpu == 1)
    want = worker.worker_reconciler.want
    assert want is not None and want.expected == (small, LARGE, dropout) and not want.jobs
    worker.obey()
    backend.advance()
    backend.expect("base", LARGE.model_copy(update={"r": 128}))
    backend.execute(StartGroup(group("g1", 1, "b")))
    want = worker.worker_reconciler.want
    assert want is not None and want.expected == () and [join.job.name for join in want.jobs] == ["b"]


def test_a_bases_speed_is_told_once_by_each_name_that_it_has(tmp_path: Path) -> None:
    twins = {"base": "models/base", "twin": "models/base", "other": "models/other"}
    with local_backend(tmp_path, base_models=twins) as made:
        submit_all(made, {"a": job("a"), "b": job("b")}, [(0.0, submitted("a")), (0.0, submitted("b"))])
        made.poll(), made.poll()
        first, second = running(made, group("g0", 0, "a"), group("g1", 1, "b"))
        speed = BaseSpeed(1000.0, 0.01, 0.0, 0.001)
        first.say(Measured("H200", speed))
        assert made.poll() == [BaseMeasured("base", "H200", speed), BaseMeasured("twin", "H200", speed)]
        second.say(Measured("H200", speed), Stepped("b", 1, 0.5))
        assert made.poll() == [StepsDone("b", "g1", 1, 0.5)]
        changed = replace(speed, launch_seconds=0.02)
        second.say(Memory((20 << 30,)))
        assert made.poll() == [MemoryFound((1,), (20 << 30,))]
        second.say(Memory((1, 2)))  # of GPUs that it has not: void
        second.say(Measured("H200", changed))
        assert made.poll() == [BaseMeasured("base", "H200", changed), BaseMeasured("twin", "H200", changed)]


def test_a_job_joins_its_next_group_when_the_last_has_let_it_go(backend: LocalBackend) -> None:
    first, second = running(backend, group("g0", 0, "a", "b"), group("g1", 1, "c"))
    backend.execute(ChangeGroup(group("g1", 1, "c", "b")))  # the gain first: the order of actions must not matter
    assert second.asked == []
    backend.execute(ChangeGroup(group("g0", 0, "a")))
    assert first.asked == ["-b"] and second.asked == []
    first.say(Stepped("b", 4, 0.5))  # still there, and no longer of g0
    first.obey()
    assert backend.poll() == [GroupReady("g0")]
    assert second.asked == ["+b"]
    second.obey()
    assert backend.poll() == [GroupReady("g1")]
    second.say(Stepped("b", 7, 0.25))
    assert backend.poll() == [StepsDone("b", "g1", 7, 0.25)]


def test_a_worker_outlives_its_group_and_keeps_who_stays(backend: LocalBackend) -> None:
    (worker,) = running(backend, group("g0", 0, "a", "b"))
    backend.execute(StopGroup("g0"))
    assert worker.asked == ["-a", "-b"]
    backend.execute(StartGroup(group("g1", 0, "b", "c")))
    assert worker.asked == ["-a", "-b", "+c"]
    worker.obey()
    worker.say()
    backend.advance()
    assert worker.asked == ["+b"]
    worker.obey()
    assert backend.poll() == [GroupReady("g1")] and [worker] == STARTED


def test_another_base_takes_another_worker(backend: LocalBackend) -> None:
    (worker,) = running(backend, group("g0", 0, "a"))
    backend.execute(StopGroup("g0"))
    backend.execute(StartGroup(group("g1", 0, "b", base="other")))
    assert worker.stopping and [worker] == STARTED
    worker.say(Left("a", 3, None), None)
    backend.advance()
    (_, second) = STARTED
    assert second.load.base_model == "models/other" and second.asked == ["+b"]


def test_a_job_follows_its_group_to_another_gpu(backend: LocalBackend) -> None:
    (worker,) = running(backend, group("g0", 0, "a"))
    backend.execute(ChangeGroup(group("g0", 1, "a")))
    (_, second) = STARTED
    assert worker.asked == ["-a"] and second.asked == []
    worker.obey()
    backend.advance()
    assert second.asked == ["+a"]


def test_ended_jobs_are_told_once_and_never_join_again(backend: LocalBackend) -> None:
    (worker,) = running(backend, group("g0", 0, "a", "b"))
    worker.say(Finished("a", {}), Failed("b", "its data"), Failed("b", "its data"))
    assert backend.poll() == [JobFinished("a"), JobFailed("b", "its data")]
    backend.execute(ChangeGroup(group("g0", 0, "a", "c")))
    assert worker.asked == ["+c"]
    worker.obey()
    assert backend.poll() == [GroupReady("g0")]
    worker.say(Finished("c", {}))
    assert backend.poll() == [JobFinished("c")]
    assert backend.poll() == [] and worker.stopping


def poll_until(backend: LocalBackend, kind: type[Event]) -> list[Event]:
    events: list[Event] = []
    while not any(isinstance(event, kind) for event in events):
        events += backend.poll()
    return events


def test_a_killed_worker_loses_its_group_and_its_jobs_wait(backend: LocalBackend) -> None:
    first, _ = running(backend, group("g0", 0, "a"), group("g1", 1, "c"))
    first.say(None)
    assert backend.poll() == [GroupLost("g0", "the worker of GPU 0 was killed by signal 9")]
    backend.execute(ChangeGroup(group("g0", 0, "a")))  # decided before the loss was heard: void
    backend.execute(StopGroup("g0"))
    assert len(STARTED) == 2
    backend.execute(StartGroup(group("g2", 0, "b", "a")))
    assert STARTED[2].asked == ["+b", "+a"], "it was alone: there is nobody to tell it from"


def test_after_a_death_each_job_runs_alone_until_it_is_past_the_place(backend: LocalBackend) -> None:
    (worker,) = running(backend, group("g0", 0, "a", "b"))
    worker.say(Stepped("a", 7, 0.1), Stepped("b", 2, 0.1), None)
    assert backend.poll()[-1] == GroupLost("g0", "the worker of GPU 0 was killed by signal 9")
    backend.execute(StartGroup(group("g1", 0, "a", "c", "b")))
    worker = STARTED[-1]
    assert worker.asked == ["+a"]
    worker.obey()
    worker.say(Stepped("a", 10, 0.1))
    backend.advance()
    assert worker.asked == []
    worker.say(Stepped("a", 11, 0.1))  # 4 further than what was known of it
    backend.advance()
    assert worker.asked == ["-a"], "b is next, when a has left"
    worker.obey()
    backend.advance()
    assert worker.asked == ["+b"]
    worker.obey()
    worker.say(Stepped("b", 6, 0.1))
    backend.advance()
    assert worker.asked == ["+a", "+c"]
    worker.obey()
    assert GroupReady("g1") in poll_until(backend, GroupReady)


def test_only_jobs_that_were_computed_are_suspected(backend: LocalBackend) -> None:
    """The worker has written down whom it computed when it died; those who were on their way in may have taken the memory."""
    (worker,) = running(backend, group("g0", 0, "a", "b"))
    backend.execute(ChangeGroup(group("g0", 0, "a", "b", "c")))
    assert worker.asked == ["+c"]
    worker.remote.in_flight = frozenset({"a"})
    worker.say(Stepped("a", 7, 0.1), None)
    while not isinstance(backend.poll()[-1], GroupLost):
        pass
    assert [name for name in "abc" if backend.reconciler.crash_attribution.is_alone(name)] == ["a", "c"]


def test_a_job_that_is_refused_waits_until_somebody_has_gone(backend: LocalBackend) -> None:
    """The group is ready without it; a new plan is worth another try."""
    (worker,) = running(backend, group("g0", 0, "a", "b"))
    backend.execute(ChangeGroup(group("g0", 0, "a", "b", "c")))
    worker.commands.clear()
    for _ in range(2):  # which is told once
        worker.say(Delayed("c", "memory"))
    assert backend.poll() == [JobDelayed("c", "memory")]
    worker.say(Refused("c", "no memory"))
    assert backend.poll() == [GroupReady("g0")] and worker.asked == []
    worker.say(Stepped("a", 3, 0.1))
    backend.poll()
    assert worker.asked == []
    worker.say(Finished("a", {}))
    assert backend.poll() == [JobFinished("a")] and worker.asked == ["+c"]
    worker.commands.clear()
    worker.say(Refused("c", "no memory"))
    backend.advance()
    assert worker.asked == []
    backend.execute(ChangeGroup(group("g0", 0, "b", "c", budget=256)))
    assert worker.asked == ["+c"]


def test_reports_of_an_earlier_attempt_are_void(backend: LocalBackend) -> None:
    (worker,) = running(backend, group("g0", 0, "a", "b"))
    backend.execute(StopGroup("g0"))
    worker.obey()
    backend.advance()
    for report in (Stepped("a", 9, 0.1, 1), Finished("a", {}, 1), Failed("a", "late", 1), Left("a", 9, None, 1), Refused("a", "late", 1)):
        worker._tell(report)
    backend.ask(JobRequest("c", "cancel"))
    assert backend.poll() == [JobRequest("c", "cancel")] and {"a", "b"} <= backend.reconciler.open


def test_reports_are_acknowledged_when_the_caller_comes_back(backend: LocalBackend) -> None:
    """Until then it may not have recorded them."""
    (worker,) = running(backend, group("g0", 0, "a", "b"))
    worker.say(Finished("a", {}))
    end = worker._seq
    assert backend.poll() == [JobFinished("a")] and worker.taken == end - 1
    worker.say(Finished("b", {}))
    assert backend.poll() == [JobFinished("b")] and worker.taken >= end


def test_a_suspect_in_a_group_that_runs_has_it_to_itself_for_a_while(backend: LocalBackend) -> None:
    first, second = running(backend, group("g0", 0, "a", "b"), group("g1", 1, "c"))
    first.say(None)
    backend.poll()
    backend.execute(ChangeGroup(group("g1", 1, "c", "a")))
    assert second.asked == ["-c"]
    second.obey()
    backend.advance()
    assert second.asked == ["+a"]
    second.obey()
    second.say(Stepped("a", 4, 0.1))
    backend.advance()
    assert second.asked == ["+c"]


def test_a_worker_that_others_end_lets_its_jobs_go_first(backend: LocalBackend) -> None:
    """SIGTERM from outside: nobody joins it any more, and no job is blamed."""
    (worker,) = running(backend, group("g0", 0, "a"))
    worker.say(Ending("signal 15"), Left("a", 5, "checkpoint-5"), None)
    assert isinstance(backend.poll()[0], GroupLost) and worker.asked == []
    assert all(suspect.is_clean for suspect in backend.reconciler.crash_attribution.of.values())


def test_a_job_that_kills_its_workers_fails(backend: LocalBackend) -> None:
    """Also one that takes steps, but none that it had not taken before; and only when it was alone."""
    (worker,) = running(backend, group("g0", 0, "a", "b"))
    worker.say(Stepped("a", 3, 0.1), None)
    events: list[Event] = []
    for number in range(1, MOST_DEATHS):
        while not isinstance(events[-1] if events else None, GroupLost):
            events += backend.poll()
        assert not any(isinstance(event, JobFailed) for event in events)
        events.clear()
        backend.execute(StartGroup(group(f"g{number}", 0, "a", "b")))
        assert STARTED[-1].asked == ["+a"]
        STARTED[-1].obey()
        STARTED[-1].say(Stepped("a", 2, 0.1), Stepped("a", 3, 0.1), None)
    events = backend.poll()
    assert [type(event) for event in events] == [StepsDone, StepsDone, JobFailed, GroupLost]
    assert isinstance(events[2], JobFailed) and events[2].job_id == "a" and "3 workers in a row" in events[2].reason
    backend.execute(StartGroup(group("g9", 0, "b")))
    assert STARTED[-1].asked == ["+b"]


def test_a_base_that_kills_its_workers_costs_no_more_of_them(backend: LocalBackend) -> None:
    """The jobs have not begun, so none is tried alone."""
    for number in range(MOST_DEATHS):
        backend.execute(StartGroup(group(f"g{number}", 0, "a", "b")))
        assert STARTED[-1].asked == ["+a", "+b"]
        STARTED[-1].say(None)
        events = backend.poll()
    assert [type(event) for event in events] == [JobFailed, JobFailed, GroupLost]


def test_cancelled_and_rejected_jobs_end_the_day(tmp_path: Path) -> None:
    arrivals = [(1000.0, JobRequest("a", "cancel")), (0.0, submitted("a")), (0.0, submitted("b"))]
    with local_backend(tmp_path, tick_seconds=1e6) as backend:
        submit_all(backend, {name: job(name) for name in "ab"}, arrivals)
        assert backend.poll() + backend.poll() == [NodeAdded("local", (0, 1)), submitted("a"), submitted("b")]
        backend.execute(RejectJob("b", "too large"))
        backend._start -= 1000.0
        assert backend.poll() == [JobRequest("a", "cancel")]
        assert backend.poll() == [] and backend.poll() == []


def test_time_passes_by_ticks(tmp_path: Path) -> None:
    with local_backend(tmp_path, tick_seconds=0.01) as backend:
        backend.submit(submitted("a"), job("a"), at_seconds=0.035)
        backend.poll()
        found: list[Event] = []
        while submitted("a") not in found:
            found += backend.poll()
        assert 1 <= found.count(Tick()) <= 4


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        (submitted("nobody"), ("'nobody'", "'a'", "same name")),
        (submitted("a", gpus=3), ("'a'", "3 GPUs", "Ask for at most 2")),
        (submitted("a", base="gpt"), ("'a'", "'gpt'", "base, other")),
        (submitted("A"), ("'A'", "'a'", "Rename one")),
    ],
)
def test_jobs_that_cannot_run_here_are_refused(tmp_path: Path, spec: JobSubmitted, facts: tuple[str, ...]) -> None:
    with local_backend(tmp_path) as backend:
        if spec.job_id == "A":
            backend.submit(submitted("a"), job("a"))
        with pytest.raises(ConfigError) as refused:
            backend.submit(spec, job("A" if spec.job_id == "A" else "a"))
    assert all(fact in str(refused.value) for fact in facts), refused.value


def test_what_is_asked_of_an_unknown_job_or_too_late_is_refused(tmp_path: Path) -> None:
    with local_backend(tmp_path) as backend:
        with pytest.raises(ConfigError, match="'a'.*Submit it first"):
            backend.ask(JobRequest("a", "hold"))
        with pytest.raises(ConfigError, match="'a'.*Give its spec"):
            submit_all(backend, {}, [(0.0, submitted("a"))])
        backend.seal()
        with pytest.raises(ConfigError, match="'a'.*sealed"):
            backend.submit(submitted("a"), job("a"))


def test_jobs_come_and_go_at_any_time_from_any_thread(tmp_path: Path) -> None:
    """The back end waits for what users ask; a cancellation asked for before its job arrives is told after it."""
    with local_backend(tmp_path, tick_seconds=1e6) as backend:
        backend.poll()
        asking = threading.Thread(target=lambda: backend.submit(submitted("a"), job("a")))
        asking.start()
        assert backend.poll() == [submitted("a")]
        asking.join()
        (worker,) = running(backend, group("g0", 0, "a"))
        backend.ask(JobRequest("a", "hold"))
        backend.submit(submitted("b"), job("b"), at_seconds=1000.0)
        backend.ask(JobRequest("b", "cancel"))
        assert backend.poll() == [JobRequest("a", "hold")]
        backend.execute(StopGroup("g0"))
        assert worker.asked == ["-a"]
        worker.obey()
        backend.ask(JobRequest("a", "release"))
        assert backend.poll() == [JobRequest("a", "release")]
        backend.execute(StartGroup(group("g1", 0, "a")))
        assert worker.asked == ["+a"]
        worker.obey()
        assert backend.poll() == [GroupReady("g1")]
        backend.seal()
        backend._start -= 1000.0
        assert backend.poll() == [submitted("b"), JobRequest("b", "cancel")]
        worker.say(Finished("a", {}))
        assert backend.poll() == [JobFinished("a")] and backend.poll() == []


def test_an_output_directory_has_one_back_end(backend: LocalBackend, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in use by another controller"):
        local_backend(tmp_path)
    backend.close()
    local_backend(tmp_path).close()


def test_what_has_ended_can_be_forgotten_and_its_name_is_free(tmp_path: Path) -> None:
    with local_backend(tmp_path) as backend:
        backend.submit(submitted("a"), job("a"))
        seen: list[Event] = []
        while submitted("a") not in seen:
            seen += backend.poll()
        backend.forget("a")  # which has not ended
        with pytest.raises(ConfigError, match="already"):
            backend.submit(submitted("a"), job("a"))
        backend.ask(JobRequest("a", "cancel"))
        while JobRequest("a", "cancel") not in seen:
            seen += backend.poll()
        backend.forget("a")
        backend.forget("a")
        with pytest.raises(ConfigError, match="Submit it first"):
            backend.ask(JobRequest("a", "cancel"))
        backend.submit(submitted("a"), job("a"))
        assert submitted("a") in backend.poll()
