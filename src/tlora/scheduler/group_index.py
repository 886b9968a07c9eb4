"""Groups as they stand: by base and residual capacity, and by nodes where they can grow. Follows the state without looking at every group.

A cache of `ClusterState`: reading it gives the same as building it anew each time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tlora.protocol import JobGroup
from tlora.scheduler.job import Job
from tlora.scheduler.plans import most_capacity
from tlora.scheduler.predictions import Choice, Prediction, Predictions
from tlora.scheduler.state import ClusterState, Group


@dataclass(slots=True, eq=False)
class View:
    """A group between two of its changes: what does not depend on the time. `most_useful` GPUs have samples to work on.

    `choice` are the sizes that it may have, and `wider` those beyond its own that shorten its steps, once they have been worked out.
    """

    group: JobGroup
    group_id: str
    gpus: tuple[int, ...]
    nodes: tuple[str, ...]
    jobs: list[Job]
    slowdowns: list[float]
    changed_at: float
    priority: float  # the highest among its members
    most_useful: int
    residual: float
    kind: str = ""  # the slowest of its GPUs
    choice: Choice | None = None
    wider: tuple[tuple[int, Prediction], ...] | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)


class GroupIndex:
    """See the module."""

    def __init__(self, predictions: Predictions) -> None:
        self._predictions = predictions
        self._version = 0  # of the predictions that `choice` and `wider` rest on
        self._state: ClusterState | None = None
        self._forget()

    def _forget(self) -> None:
        self._known: dict[str, View] = {}
        self._sorted: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)  # base -> residual and group of one node, rising
        self._shared: dict[str, None] = {}
        self._growing: dict[str, dict[str, View]] = {}  # node -> groups on it

    def follow(self, state: ClusterState) -> None:
        """Take in the groups that have changed or ended since the last time: those at the end of `latest`, up to one that has not."""
        if state is not self._state:
            self._state = state
            self._forget()
        changed: list[str] = []
        for name in reversed(state.latest):
            view, known = self._known.get(name), state.groups.get(name)
            if view is not None and known is not None and view.group is known.group:
                break
            changed.append(name)
        for name in reversed(changed):  # in the order of their changes, in which an index made anew has all of them
            if name in self._known:
                self._drop(name, self._known[name])
            if name in state.groups:
                self._add(name, state, state.groups[name])
        self._purge(state)
        if self._version != self._predictions.version:
            self._version = self._predictions.version
            for view in self._known.values():
                view.choice = view.wider = None

    def _purge(self, state: ClusterState) -> None:
        """Where the state has forgotten some that ended, as it does of many at once."""
        if len(self._known) > len(state.groups):
            for name in [name for name in self._known if name not in state.groups]:
                self._drop(name, self._known[name])

    def view(self, group_id: str) -> View:
        return self._known[group_id]

    def shared(self) -> Iterator[str]:
        """Groups of several members."""
        return iter(self._shared)

    def growing_on(self, node: str) -> Mapping[str, View]:
        """Groups with GPUs on the node that have samples for more than theirs."""
        return self._growing.get(node, {})

    def best_fit(self, base: str, need: float, most: int) -> list[str]:
        """Up to `most` groups of the base on one node with a residual of at least `need`, the least residual first: O(log groups)."""
        by_residual = self._sorted[base]
        start = bisect_left(by_residual, (need, ""))
        return [name for _, name in by_residual[start : start + most]]

    def _add(self, name: str, state: ClusterState, found: Group) -> None:
        group = found.group
        if not group.job_ids:
            return
        view = self._known[name] = self._view(state, found)
        if view.num_nodes == 1:
            insort(self._sorted[group.base_model], (view.residual, name))
        if len(group.job_ids) > 1:
            self._shared[name] = None
        if len(group.gpus) < view.most_useful:
            for node in view.nodes:
                self._growing.setdefault(node, {})[name] = view

    def _view(self, state: ClusterState, found: Group) -> View:
        group = found.group
        jobs = [state.jobs[name] for name in group.job_ids]
        return View(
            group=group,
            group_id=group.group_id,
            gpus=group.gpus,
            nodes=tuple(dict.fromkeys([state.pool.node_of[gpu] for gpu in group.gpus])),
            jobs=jobs,
            slowdowns=[seconds / job.alone_step_seconds for seconds, job in zip(found.step_seconds, jobs, strict=True)],
            changed_at=found.changed_at,
            priority=max([job.spec.priority for job in jobs]),
            most_useful=self._predictions.most_useful_gpus(jobs),
            residual=residual_capacity_of(state, found),
            kind=state.kinds.slowest(group.gpus),
        )

    def _drop(self, name: str, view: View) -> None:
        del self._known[name]
        self._shared.pop(name, None)
        if view.num_nodes == 1:
            by_residual = self._sorted[view.group.base_model]
            del by_residual[bisect_left(by_residual, (view.residual, name))]
        if len(view.gpus) < view.most_useful:
            for node in view.nodes:
                del self._growing[node][name]
                if not self._growing[node]:
                    del self._growing[node]


def residual_capacity_of(state: ClusterState, found: Group) -> float:
    """R = u * C(B, G) - sum of needs, in tokens/s, with the largest budget and one member more: what a newcomer may need at most."""
    group = found.group
    members = len(group.job_ids) + 1
    return most_capacity(state.cost_on(group.gpus), group.base_model, len(group.gpus), found.num_nodes, members) - found.need
