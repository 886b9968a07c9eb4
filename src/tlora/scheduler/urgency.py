"""Who comes first: urgency, who is starving, and shares between tenants. Not here: what anybody gets."""

from __future__ import annotations

from collections.abc import Mapping

from tlora.scheduler.settings import Settings
from tlora.scheduler.state import ClusterState, Job

_MOST_PRESSED = 10.0  # times as urgent as without a deadline


def urgency(job: Job, now: float, settings: Settings) -> float:
    """(patience + age) / remaining time alone, both since its submission; times remaining / slack where a deadline is near.

    Slack is the time until the deadline less what remains. Where it is gone the factor is 10, as it is where little is left.
    """
    remaining = max(job.remaining_seconds(now), 1.0)
    own = (settings.patience_seconds + now - job.submitted_at) / remaining
    deadline = job.spec.deadline
    if deadline is None:
        return own
    slack = deadline - now - remaining
    return own * (min(max(remaining / slack, 1.0), _MOST_PRESSED) if slack > 0 else _MOST_PRESSED)


def is_starving(job: Job, now: float, settings: Settings) -> bool:
    """Whether it is later than it would be alone by `starvation_factor` times its whole time alone, short ones taken for longer."""
    done = job.steps_at(now) * job.alone_step_seconds
    whole = max(job.spec.profile.steps * job.alone_step_seconds, settings.min_residence_seconds)
    return now - job.submitted_at - done > settings.starvation_factor * whole


def rank(job: Job, now: float, settings: Settings, excess: Mapping[str, float]) -> tuple[float, ...]:
    """The key of those that wait, the least first: priority; who is starving, in order of arrival; urgency; residual capacity alone.

    `excess` tells of tenants how many times their share of the GPUs they have: their jobs count as so many times less urgent.
    """
    if settings.order == "arrival":
        return -job.spec.priority, job.number
    if is_starving(job, now, settings):
        return -job.spec.priority, 0.0, 0.0, 0.0, job.number
    own = urgency(job, now, settings) / excess.get(job.spec.tenant, 1.0)
    residual = job.spec.profile.tokens_per_step / job.alone_step_seconds - job.need
    return -job.spec.priority, 1.0, -own, residual, job.number


def excess_of_tenants(state: ClusterState, gpus_of: Mapping[str, float]) -> dict[str, float]:
    """How many times its share of the cluster a tenant has, where that is more than once. Shares are equal between those with jobs here.

    GPU-seconds are counted as they are spent: what was spent before is not held against anybody.
    """
    tenants = {*gpus_of, *(state.jobs[name].spec.tenant for name in state.pending)}
    if len(tenants) < 2:
        return {}
    share = state.num_gpus / len(tenants)
    return {tenant: gpus / share for tenant, gpus in gpus_of.items() if gpus > share}
