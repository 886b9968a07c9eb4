"""Who comes first: urgency, and shares between tenants. Not here: who starves (`starvation.py`), and what anybody gets."""

from __future__ import annotations

from collections.abc import Mapping

from tlora.scheduler.job import Job
from tlora.scheduler.settings import Settings
from tlora.scheduler.state import ClusterState

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
    """What is left of it alone. Of one that runs on beyond the steps told of it, max(told, 0.1 * the time that it has run).

    It then runs on by more than a start takes: what a start or a change of GPUs took is not among its steps.
    """
    told = job.remaining_seconds(now)
    if told > 0.0 or (job.step_seconds and job.overran_seconds(now) <= settings.start_seconds):
        return told
    return max(told, _OVERRUN_SHARE * job.ran_at(now))


def rank(job: Job, now: float, settings: Settings, excess: Mapping[str, float]) -> tuple[float, ...]:
    """The key of those that wait, the least first: priority; urgency; residual capacity alone.

    `excess` tells of tenants how many times their share of the GPUs they have: their jobs count as so many times less urgent.
    """
    if settings.order == "arrival":
        return -job.spec.priority, job.number
    own = urgency(job, now, settings) / excess.get(job.spec.tenant, 1.0)
    residual = job.spec.profile.tokens_per_step / job.alone_step_seconds - job.need
    return -job.spec.priority, -own, residual, job.number


def excess_of_tenants(state: ClusterState, gpus_of: Mapping[str, float]) -> dict[str, float]:
    """How many times its share of the cluster a tenant has, where that is more than once. Shares are equal between those with jobs here.

    GPU-seconds are counted as they are spent: what was spent before is not held against anybody.
    """
    tenants = {*gpus_of, *(state.jobs[name].spec.tenant for name in state.pending)}
    if len(tenants) < 2:
        return {}
    share = state.num_gpus / len(tenants)
    return {tenant: gpus / share for tenant, gpus in gpus_of.items() if gpus > share}
