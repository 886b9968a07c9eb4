"""The policies by the names under which users choose them. Each is made anew for each scheduler: it may remember what it has worked out.

The last ones are ablations: `residual_capacity` with some of its means switched off, to measure what each is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tlora.scheduler.exclusive_baselines import backfill, fifo, las, sjf, srtf
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.scheduler import Policy
from tlora.scheduler.settings import Settings
from tlora.scheduler.shared_baselines import memory_only, tlora_published

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
