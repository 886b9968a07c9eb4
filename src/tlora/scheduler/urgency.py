"""Which job comes first. Not here: what tenants have used (`tenants.py`), which jobs starve (`starvation.py`), and what a job gets."""

from __future__ import annotations

from collections.abc import Mapping

from tlora.scheduler.job import Job
from tlora.scheduler.settings import Settings

_MOST_PRESSED = 10.0  # times as urgent as without a deadline
_OVERRUN_SHARE = 0.1  # of the time that it has run, a job that goes on beyond its steps is taken to need once more


def urgency(job: Job, now: float, settings: Settings) -> float:
    """(patience + age) / (remaining time alone * GPUs ** width_exponent), age since its submission; times remaining / slack where a
    deadline is near.

    Slack is the time until the deadline less what remains. Where it is gone the factor is 10, as it is where little is left.
    """
    remaining = max(remaining_seconds(job, now, settings), 1.0)
    own = (settings.patience_seconds + now - job.submitted_at) / (remaining * job.spec.gpus**settings.width_exponent)
    deadline = job.spec.deadline
    if deadline is None:
        return own
    slack = deadline - now - remaining
    return own * (min(max(remaining / slack, 1.0), _MOST_PRESSED) if slack > 0 else _MOST_PRESSED)


def remaining_seconds(job: Job, now: float, settings: Settings) -> float:
    """What is left of it alone. Of one that runs on beyond its declared steps, max(what they leave, 0.1 * the time that it has run).

    It then runs on by more than a start takes: what a start or a change of GPUs took is not among its steps.
    """
    planned = job.remaining_seconds(now)
    if planned > 0.0 or (job.step_seconds and job.overran_seconds(now) <= settings.start_seconds):
        return planned
    return max(planned, _OVERRUN_SHARE * job.ran_at(now))


def rank(job: Job, now: float, settings: Settings, levels: Mapping[str, int]) -> tuple[float, ...]:
    """The key of those that wait, the least first: priority; its tenant's level (`Tenants.levels`); urgency; residual capacity alone."""
    if settings.order == "arrival":
        return -job.spec.priority, job.number
    residual = job.spec.profile.tokens_per_step / job.alone_step_seconds - job.need
    return -job.spec.priority, levels.get(job.spec.tenant, 0), -urgency(job, now, settings), residual, job.number
