"""Jobs as they arrive, and their deadlines: each that passes is told of once, while its job has not ended."""

from __future__ import annotations

from tlora.live.arrivals import Deadlines
from tlora.protocol import JobFailed, JobFinished, JobProfile, JobSubmitted, Tick


def submitted(name: str, deadline: float | None) -> JobSubmitted:
    profile = JobProfile(100.0, 10, 64, 1000)
    return JobSubmitted(name, "base", 1, profile, deadline=deadline)


def test_a_deadline_that_passes_before_its_job_has_ended_is_told_of_once() -> None:
    told: list[str] = []
    arrivals = [(at, submitted(name, deadline)) for name, at, deadline in (("late", 1.0, 4.0), ("early", 0.0, 9.0), ("bad", 0.0, 9.0))]
    deadlines = Deadlines([*arrivals, (0.0, submitted("free", None))], told.append)
    deadlines.see(4.0, Tick())
    deadlines.see(5.0, JobFinished("early"))
    assert told == ["late: missed its deadline, 3.0 s after its arrival"]
    deadlines.see(6.0, JobFinished("late"))
    deadlines.see(6.0, JobFailed("bad", "no"))
    deadlines.see(99.0, Tick())
    assert len(told) == 1


def test_an_end_after_the_deadline_is_late() -> None:
    told: list[str] = []
    Deadlines([(0.0, submitted("one", 2.0))], told.append).see(3.0, JobFinished("one"))
    assert told == ["one: missed its deadline, 2.0 s after its arrival"]
