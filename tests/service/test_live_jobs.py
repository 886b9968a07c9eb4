"""The service's core alone: what follows from an event, whatever the store and the clock do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tlora.protocol import (
    Action,
    ChangeGroup,
    Event,
    GroupLost,
    JobFailed,
    JobFinished,
    JobGroup,
    JobProfile,
    JobRequest,
    JobSubmitted,
    ParallelPlan,
    StartGroup,
    StepsDone,
    StopGroup,
    Tick,
)
from tlora.service.live_jobs import ChangeStatus, EndJob, LiveJobs, ShowSteps
from tlora.service.machine import Devices

PLACES = Devices("cpu", (0, 1))


def submitted(name: str) -> JobSubmitted:
    return JobSubmitted(name, "base", 1, JobProfile(100.0, 10, 30, 1000))


def group(*names: str, of: str = "g") -> JobGroup:
    return JobGroup(of, "base", (0,), ParallelPlan(1, 256), names, (1.0,) * len(names))


def test_a_job_is_said_to_run_once_and_to_wait_once_it_has_left() -> None:
    jobs = LiveJobs()
    for item in (submitted("a"), StartGroup(group("a"))):
        assert not list(jobs.see(item))
    first = ChangeStatus("a", ("queued",), "running", "trains, steps done: 1", starts=True)
    assert list(jobs.see(StepsDone("a", "g", 1, 0.1))) == [ShowSteps("a", 1), first]
    assert list(jobs.see(StepsDone("a", "g", 2, 0.1))) == [ShowSteps("a", 2)]
    left = ChangeStatus("a", ("running",), "queued", "left its group; it goes on from its checkpoint")
    assert list(jobs.see(ChangeGroup(group()))) == [left] and not list(jobs.see(StopGroup("g")))
    assert list(jobs.snapshot(PLACES, {}).waiting) == ["a"]


def test_ends_are_effects_and_what_has_ended_has_none() -> None:
    jobs = LiveJobs()
    for item in (submitted("a"), submitted("b"), StartGroup(group("a", "b"))):
        jobs.see(item)
    assert list(jobs.see(JobFinished("a"))) == [EndJob("a", "succeeded")]
    assert list(jobs.see(JobFailed("b", "its data"))) == [EndJob("b", "failed", "its data")]
    for name in ("a", "b"):
        jobs.end(name)
        assert not list(jobs.see(StepsDone(name, "g", 9, 0.1)))
    assert not list(jobs.see(GroupLost("g", "gone"))) and not jobs.snapshot(PLACES, {}).waiting


NAMES = st.sampled_from(["a", "b", "c"])
GROUPS = st.builds(lambda names, of: group(*names, of=of), st.lists(NAMES, unique=True), st.sampled_from(["g", "h"]))
ITEMS: st.SearchStrategy[Event | Action] = st.one_of(
    *(st.builds(kind, NAMES) for kind in (submitted, JobFinished)),
    st.builds(JobRequest, NAMES, st.sampled_from(["cancel", "hold", "release"])),
    st.builds(lambda name, steps: StepsDone(name, "g", steps, 0.1), NAMES, st.integers(0, 99)),
    *(st.builds(kind, GROUPS) for kind in (StartGroup, ChangeGroup)),
    st.builds(StopGroup, st.sampled_from(["g", "h"])),
    st.just(Tick()),
)


@given(st.lists(ITEMS, max_size=40))
def test_the_same_events_have_the_same_effects_and_paused_and_ended_jobs_do_not_wait(items: list[Event | Action]) -> None:
    first, second = LiveJobs(), LiveJobs()
    for item in items:
        effects = list(first.see(item))
        assert effects == list(second.see(item))
        for ended in (effect.job_id for effect in effects if isinstance(effect, EndJob)):
            first.end(ended)
            second.end(ended)
        snapshot = first.snapshot(PLACES, {})
        assert snapshot == second.snapshot(PLACES, {})
        if isinstance(item, JobFinished) or (isinstance(item, JobRequest) and item.verb != "release"):
            assert item.job_id not in snapshot.places
        if isinstance(item, JobFinished) or (isinstance(item, JobRequest) and item.verb == "cancel"):
            assert all(item.job_id not in one.job_ids for one in snapshot.groups)
