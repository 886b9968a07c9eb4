"""The policies by the names under which users choose them. Each is made anew for each scheduler: it may remember what it has worked out.

The last ones are ablations: `residual_capacity` with some of its means switched off, to measure what each is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tlora.scheduler.draft import Draft
from tlora.scheduler.exclusive_baselines import backfill, easy, fifo, las, least_attained, shortest, sjf, srtf
from tlora.scheduler.job import Job
from tlora.scheduler.reservation import Reservation, end_of, reserve
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.scheduler import Policy
from tlora.scheduler.settings import Settings
from tlora.scheduler.shared_baselines import memory_only, tlora_published
from tlora.scheduler.state import ClusterState
from tlora.scheduler.waiting import Key, arrival, rank

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "fifo": fifo,
    "backfill": backfill,
    "easy": easy,
    "sjf": sjf,
    "srtf": srtf,
    "las": las,
    "memory": memory_only,
    "tlora": tlora_published,
    "residual_capacity": residual_capacity,
    "residual_capacity-no-sharing": lambda: residual_capacity(Settings(sharing=False)),
    "residual_capacity-no-growth": lambda: residual_capacity(Settings(elastic=False, reservations=True)),
    "residual_capacity-no-preemption": lambda: residual_capacity(Settings(preemption=False)),
    "residual_capacity-order-only": lambda: residual_capacity(Settings(sharing=False, elastic=False)),
}

LIVE_POLICIES: Mapping[str, Callable[[], Policy]] = {
    "residual_capacity": POLICIES["residual_capacity-no-growth"],
    "residual_capacity-growth": residual_capacity,
    **{name: POLICIES[name] for name in ("fifo", "backfill", "easy", "sjf", "srtf", "las")},
}
"""Of a cluster that trains. What else there is, is there to be compared with."""


def waiting_order(policy: str, state: ClusterState) -> Callable[[Job], Key]:
    """The key of the jobs that wait now under a policy of `LIVE_POLICIES`, the least first. Jobs that starve may start before others."""
    if policy in _ORDERS:
        return _ORDERS[policy]
    levels = state.tenants.levels(state.now)
    return lambda job: rank(job, state.now, Settings(), levels)


def reservation(policy: str, state: ClusterState) -> Reservation | None:
    """What a policy of `LIVE_POLICIES` keeps now for the first of those that wait, where it keeps anything for it."""
    if policy not in _LEAST_KEPT_FOR:
        return None
    wide = [job for name in state.pending if (job := state.jobs[name]).spec.gpus >= _LEAST_KEPT_FOR[policy] and name not in state.held]
    first = min(wide, key=waiting_order(policy, state), default=None)
    return None if first is None else reserve(Draft(state), first, partial(end_of, state, Settings()))


_LEAST_KEPT_FOR = {"easy": 1, "residual_capacity": 2}  # GPUs
_ORDERS: Mapping[str, Callable[[Job], Key]] = {
    "fifo": arrival,
    "backfill": arrival,
    "easy": arrival,
    "sjf": shortest,
    "srtf": shortest,
    "las": least_attained,
}
