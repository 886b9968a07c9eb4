"""What each tenant has used of the cluster, and which tenants come first for it. Not here: which of a tenant's jobs comes first
(`waiting.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

DAY_SECONDS = 86400.0
_LEAST_LEVEL = -10  # below 1/1024 of its share a tenant has as good as nothing
_NOTHING = 1e-6  # GPUs, or GPU-seconds: less is rounding


@dataclass(slots=True)
class _Used:
    """`gpu_seconds` are decayed to `seen_at`; it holds `gpus` since."""

    gpu_seconds: float
    gpus: float
    seen_at: float


@dataclass(slots=True)
class Tenants:
    """GPU-seconds of each tenant, decayed: one that was used `age` seconds ago counts 2^(-age / half_life). `open_jobs` are each one's
    jobs that wait or run; those that are held do not count.
    """

    half_life_seconds: float = DAY_SECONDS
    open_jobs: dict[str, int] = field(default_factory=dict[str, int])
    _used: dict[str, _Used] = field(default_factory=dict[str, _Used])

    def add_job(self, tenant: str) -> None:
        self.open_jobs[tenant] = self.open_jobs.get(tenant, 0) + 1

    def drop_job(self, tenant: str) -> None:
        self.open_jobs[tenant] -= 1
        if not self.open_jobs[tenant]:
            del self.open_jobs[tenant]

    def hold_gpus(self, tenant: str, more: float, now: float) -> None:
        """From now on its jobs hold so many GPUs more, or fewer."""
        if more:
            used = self._settle(tenant, now)
            used.gpus += more
            if used.gpus < _NOTHING:
                used.gpus = 0.0

    def recall(self, tenant: str, gpu_seconds: float, now: float) -> None:
        """What it had used before this scheduler began, decayed to now."""
        self._settle(tenant, now).gpu_seconds += gpu_seconds

    def used_at(self, now: float) -> dict[str, float]:
        """GPU-seconds of all tenants that have any; those that have faded are forgotten."""
        used_by_tenant = {tenant: self._at(used, now) for tenant, used in self._used.items()}
        for tenant, gpu_seconds in list(used_by_tenant.items()):
            if gpu_seconds < _NOTHING:
                del used_by_tenant[tenant]
                if not self._used[tenant].gpus:
                    del self._used[tenant]
        return used_by_tenant

    def levels(self, now: float) -> Mapping[str, int]:
        """Of each tenant with open jobs: floor(log2(used / share)), the share being the mean of theirs. The least comes first; below 0 it
        has had less than its share. Empty where one tenant is alone, or none has used anything.

        Tenants within a factor of two count as equal: between them the order within a tenant decides.
        """
        if len(self.open_jobs) < 2:
            return {}
        used = {tenant: self._at(self._used[tenant], now) if tenant in self._used else 0.0 for tenant in self.open_jobs}
        share = sum(used.values()) / len(used)
        if share < _NOTHING:
            return {}
        least = 2.0**_LEAST_LEVEL
        return {tenant: math.floor(math.log2(max(gpu_seconds / share, least))) for tenant, gpu_seconds in used.items()}

    def _settle(self, tenant: str, now: float) -> _Used:
        used = self._used.setdefault(tenant, _Used(0.0, 0.0, now))
        used.gpu_seconds, used.seen_at = self._at(used, now), now
        return used

    def _at(self, used: _Used, now: float) -> float:
        """d/dt used = gpus - used * ln 2 / half_life."""
        fades = math.log(2) / self.half_life_seconds * (now - used.seen_at)
        return used.gpu_seconds * math.exp(-fades) - used.gpus * self.half_life_seconds / math.log(2) * math.expm1(-fades)
