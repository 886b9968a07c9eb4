"""Groups by base and residual capacity, and what tenants hold: an index that follows the state without looking at every group.

Owns no truth: `ClusterState` does. What is read from it is the same as if it were built anew each time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tlora.protocol import JobGroup
from tlora.scheduler.plans import most_capacity
from tlora.scheduler.state import ClusterState, Group


@dataclass(frozen=True, slots=True)
class _Entry:
    group: JobGroup
    residual: float
    shares: tuple[tuple[str, float], ...]  # tenants of its members, and how many of its GPUs are each one's


class Residuals:
    """`gpus_of` are the GPUs of each tenant: a group's are its members' in equal parts."""

    def __init__(self) -> None:
        self._state: ClusterState | None = None
        self._forget()

    def _forget(self) -> None:
        self._known: dict[str, _Entry] = {}
        self._sorted: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)  # base -> residual and group, rising
        self._shared: dict[str, None] = {}
        self.gpus_of: dict[str, float] = {}

    def follow(self, state: ClusterState) -> None:
        """Take in the groups that have changed or ended since the last time: those at the end of `latest`, up to one that has not."""
        if state is not self._state:
            self._state = state
            self._forget()
        for name in reversed(state.latest):
            entry, found = self._known.get(name), state.groups.get(name)
            if entry is not None and found is not None and entry.group is found.group:
                break
            if entry is not None:
                self._drop(name, entry)
            if found is not None:
                self._add(name, state, found)
        self._purge(state)

    def _purge(self, state: ClusterState) -> None:
        """Where the state has forgotten some that ended, as it does of many at once."""
        if len(self._known) > len(state.groups):
            for name in [name for name in self._known if name not in state.groups]:
                self._drop(name, self._known[name])

    def shared(self) -> Iterator[str]:
        """Groups of several members."""
        return iter(self._shared)

    def best_fit(self, base: str, need: float, most: int) -> list[str]:
        """Up to `most` groups of the base with a residual of at least `need`, the least residual first: O(log groups)."""
        found = self._sorted[base]
        start = bisect_left(found, (need, ""))
        return [name for _, name in found[start : start + most]]

    def _add(self, name: str, state: ClusterState, found: Group) -> None:
        group = found.group
        if not group.job_ids:
            return
        entry = self._known[name] = _Entry(group, residual_capacity_of(state, found), _shares(state, group))
        insort(self._sorted[group.base_model], (entry.residual, name))
        if len(group.job_ids) > 1:
            self._shared[name] = None
        for tenant, gpus in entry.shares:
            self.gpus_of[tenant] = self.gpus_of.get(tenant, 0.0) + gpus

    def _drop(self, name: str, entry: _Entry) -> None:
        del self._known[name]
        self._shared.pop(name, None)
        found = self._sorted[entry.group.base_model]
        del found[bisect_left(found, (entry.residual, name))]
        for tenant, gpus in entry.shares:
            self.gpus_of[tenant] -= gpus
            if self.gpus_of[tenant] < 1e-6:  # a part of a GPU this small is rounding
                del self.gpus_of[tenant]


def residual_capacity_of(state: ClusterState, found: Group) -> float:
    """R = u * C(B, G) - sum of needs, in tokens/s, with the largest budget and one member more: what a newcomer may need at most."""
    group = found.group
    members = len(group.job_ids) + 1
    return most_capacity(state.cost, group.base_model, len(group.gpus), found.num_nodes, members) - found.need


def _shares(state: ClusterState, group: JobGroup) -> tuple[tuple[str, float], ...]:
    each = len(group.gpus) / len(group.job_ids)
    return tuple([(state.jobs[name].spec.tenant, each) for name in group.job_ids])
