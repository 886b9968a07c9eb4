"""The policies by the names under which users choose them. Each is made anew for each scheduler: it may remember what it has worked out.

The last ones are ablations: `residual_capacity` with some of its means switched off, to measure what each is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tlora.scheduler.exclusive_baselines import backfill, fifo, las, least_attained, shortest, sjf, srtf
from tlora.scheduler.job import Job
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.scheduler import Policy
from tlora.scheduler.settings import Settings
from tlora.scheduler.shared_baselines import memory_only, tlora_published
from tlora.scheduler.state import ClusterState
from tlora.scheduler.urgency import rank
from tlora.scheduler.waiting import Key, arrival

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "fifo": fifo,
    "backfill": backfill,
    "sjf": sjf,
    "srtf": srtf,
    "las": las,
    "memory": memory_only,
    "tlora": tlora_published,
    "residual_capacity": residual_capacity,
    "residual_capacity-no-sharing": lambda: residual_capacity(Settings(sharing=False)),
    "residual_capacity-no-growth": lambda: residual_capacity(Settings(elastic=False)),
    "residual_capacity-no-preemption": lambda: residual_capacity(Settings(preemption=False)),
    "residual_capacity-order-only": lambda: residual_capacity(Settings(sharing=False, elastic=False)),
}

LIVE_POLICIES: Mapping[str, Callable[[], Policy]] = {
    "residual_capacity": POLICIES["residual_capacity-no-growth"],
    "residual_capacity-growth": residual_capacity,
    **{name: POLICIES[name] for name in ("fifo", "backfill", "sjf", "srtf", "las")},
}
"""Of a cluster that trains. What else there is, is there to be compared with."""


def waiting_order(policy: str, state: ClusterState) -> Callable[[Job], Key]:
    """The key of the jobs that wait now under a policy of `LIVE_POLICIES`, the least first. Jobs that starve may start before others."""
    if policy in _ORDERS:
        return _ORDERS[policy]
    levels = state.tenants.levels(state.now)
    return lambda job: rank(job, state.now, Settings(), levels)


_ORDERS: Mapping[str, Callable[[Job], Key]] = {
    "fifo": arrival,
    "backfill": arrival,
    "sjf": shortest,
    "srtf": shortest,
    "las": least_attained,
}
