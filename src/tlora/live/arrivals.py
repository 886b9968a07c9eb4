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
        self._say = say
        self._left = {
            event.job_id: (event.deadline, event.deadline - seconds)
            for seconds, event in arrivals
            if isinstance(event, JobSubmitted) and event.deadline is not None
        }

    def see(self, seconds: float, item: Event | Action) -> None:
        """What has happened, `seconds` on the back end's clock."""
        for name, (deadline, after) in list(self._left.items()):
            if deadline < seconds:
                del self._left[name]
                self._say(f"{name}: missed its deadline, {duration_text(after)} after its arrival")
        if isinstance(item, JobFinished | JobFailed | RejectJob):
            self._left.pop(item.job_id, None)
