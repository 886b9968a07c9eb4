"""Jobs as they arrive at a back end, and their deadlines."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tlora.job import JobSpec
from tlora.planning.job_profile import ProfiledJob
from tlora.protocol import Action, Event, JobFailed, JobFinished, JobRequest, JobSubmitted, RejectJob
from tlora.wording.numbers import duration_text

Arrival = tuple[float, JobSubmitted | JobRequest]


def arrival_of(spec: JobSpec, base: str, job: ProfiledJob, there: int | None, least: int) -> Arrival:
    """Of a job over the base of that name. `there`: how many GPUs the job can get at most, if that is known."""
    deadline = None if spec.deadline_seconds is None else spec.arrival_seconds + spec.deadline_seconds
    rest = {"priority": spec.priority, "deadline": deadline, "max_slowdown": spec.max_slowdown}
    gpus = max(least, spec.gpus if there is None else min(spec.gpus, there))
    return spec.arrival_seconds, JobSubmitted(spec.name, base, gpus, job.profile, **rest, least_gpus=least)


class Deadlines:
    """Says once of each deadline that it has passed before its job had ended."""

    def __init__(self, arrivals: Iterable[Arrival], say: Callable[[str], None]) -> None:
        self._say, self._ended = say, set[str]()
        submitted = ((at, event.deadline, event.job_id) for at, event in arrivals if isinstance(event, JobSubmitted))
        due = [(deadline, name, at) for at, deadline, name in submitted if deadline is not None]
        self._due = sorted(due, reverse=True)  # the last is the next

    def see(self, seconds: float, item: Event | Action) -> None:
        """What has happened, `seconds` on the back end's clock."""
        while self._due and self._due[-1][0] < seconds:
            deadline, name, arrived = self._due.pop()
            if name not in self._ended:
                self._say(f"{name}: missed its deadline, {duration_text(deadline - arrived)} after its arrival")
        if isinstance(item, JobFinished | JobFailed | RejectJob):
            self._ended.add(item.job_id)
