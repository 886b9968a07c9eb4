"""One decision of the residual-capacity policy in the making: its draft, what jobs and GPUs are worth, and which groups it may touch.

Values are rates: a job is worth its urgency times its speed in units of its speed alone, so that what is short weighs most. Decides
nothing by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from tlora.scheduler.draft import Draft
from tlora.scheduler.pace import Pace, Paces
from tlora.scheduler.residuals import Residuals
from tlora.scheduler.settings import Settings
from tlora.scheduler.state import ClusterState, Job
from tlora.scheduler.urgency import is_starving, urgency

_NODES_LOOKED_AT = 16  # in one decision, where there are more; others at the next, as the first of them goes round
_WIDER_TRIED = 3  # sizes beyond the best so far: the first GPU beyond one, or beyond a node, costs more than it brings


@dataclass(frozen=True, slots=True)
class View:
    """A group as a decision finds it. `urgency` and `priority` are the highest among its members, `starving` is whether one of them is.

    `rested`: it has been left alone for the minimum residence time. `share`: GPUs that are its due (`Decision.target`).
    """

    group_id: str
    gpus: tuple[int, ...]
    num_nodes: int
    jobs: list[Job]
    slowdowns: list[float]
    value: float
    urgency: float
    priority: float
    starving: bool
    rested: bool
    share: int | None

    @property
    def beyond_share(self) -> int:
        return 0 if self.share is None else max(0, len(self.gpus) - self.share)


class Decision:
    """`touched` are the groups that it has changed: none changes twice in one decision."""

    def __init__(self, state: ClusterState, settings: Settings, paces: Paces, residuals: Residuals) -> None:
        self.state, self.settings, self.residuals = state, settings, residuals
        self.draft = Draft(state)
        self.touched: set[str] = set()
        self.node_size = max(1, state.node_size)
        self._paces = paces
        self._price = settings.delay_price * len(state.jobs) / max(1, state.num_gpus)
        self._sizes = _sizes(self.node_size, state.num_gpus)
        self._urgency: dict[int, float] = {}
        self._target: dict[tuple[int, ...], int | None] = {}
        self._views: dict[str, View] = {}
        self._on_node: dict[str, list[str]] = {}

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def urgency(self, job: Job) -> float:
        found = self._urgency.get(job.number)
        if found is None:
            found = self._urgency[job.number] = urgency(job, self.state.now, self.settings)
        return found

    def is_starving(self, job: Job) -> bool:
        return is_starving(job, self.state.now, self.settings)

    def value(self, jobs: Sequence[Job], slowdowns: Iterable[float]) -> float:
        """What it is worth that they run as fast: sum of urgency / slowdown."""
        return sum([self.urgency(job) / slowdown for job, slowdown in zip(jobs, slowdowns, strict=True)])

    def seconds_saved(self, jobs: Sequence[Job], before: Sequence[float], after: Sequence[float]) -> float:
        """By the jobs together until they end, if slowdowns go from `before` to `after`."""
        now = self.state.now
        return sum([job.remaining_seconds(now) * (old - new) for job, old, new in zip(jobs, before, after, strict=True)])

    # -- how many GPUs -------------------------------------------------------------------------------------------------

    def pace(self, jobs: Sequence[Job], gpus: int, nodes: int | None = None) -> Pace | None:
        """Of `jobs` in one group on `gpus` GPUs, on as few nodes as can be or on `nodes`; None where a bound or memory forbids it."""
        return self._paces.of(jobs, gpus, nodes or self.nodes_for(gpus))

    def most_useful_gpus(self, jobs: Sequence[Job]) -> int:
        return sum([self._paces.most_useful_gpus(job) for job in jobs])

    def nodes_for(self, gpus: int) -> int:
        return -(-gpus // self.node_size)

    def sizes(self, jobs: Sequence[Job]) -> list[int]:
        """Numbers of GPUs on which `jobs` may run together, rising: their bounds are kept, and each GPU has samples to work on."""
        asked = sum(job.spec.gpus for job in jobs)
        most = self.most_useful_gpus(jobs)
        tried = self._sizes if asked in self._sizes or asked > self.state.num_gpus else sorted((*self._sizes, asked))
        return [gpus for gpus in tried if gpus <= most and self.pace(jobs, gpus) is not None]

    def target(self, jobs: Sequence[Job]) -> int | None:
        """Their share of the GPUs: where the mean of slowdown * (1 + price * GPUs / jobs) is least; None if they can run on none.

        The first term is their own time, the second that of all others, who wait for the GPUs that these have meanwhile.
        """
        key = tuple([job.number for job in jobs])
        if key not in self._target:
            self._target[key] = self._cheapest(jobs)
        return self._target[key]

    def _cheapest(self, jobs: Sequence[Job]) -> int | None:
        best, least, wider = None, math.inf, 0
        most, each = self.most_useful_gpus(jobs), self._price / len(jobs)
        for gpus in self._sizes:
            if gpus > most or wider == _WIDER_TRIED:
                break
            pace = self.pace(jobs, gpus)
            if pace is None:
                continue
            cost = sum(pace.slowdowns) * (1 + each * gpus)
            if cost < least:
                best, least, wider = gpus, cost, 0
            else:
                wider += 1
        if best is None and jobs[0].spec.gpus <= self.state.num_gpus:
            return jobs[0].spec.gpus if len(jobs) == 1 else None
        return best

    # -- groups --------------------------------------------------------------------------------------------------------

    def groups_on(self, node: str) -> list[View]:
        """Groups with GPUs on the node that this decision has not touched, in the order of their GPUs."""
        names = self._on_node.get(node)
        if names is None:
            on = self.state.group_on
            names = self._on_node[node] = list(dict.fromkeys([on[gpu] for gpu in self.state.nodes[node].gpus if gpu in on]))
        return [self.view(name) for name in names if name not in self.touched]

    def view(self, group_id: str) -> View:
        found = self._views.get(group_id)
        if found is None:
            found = self._views[group_id] = self._view(group_id)
        return found

    def _view(self, group_id: str) -> View:
        state = self.state
        found = state.groups[group_id]
        jobs = [state.jobs[name] for name in found.group.job_ids]
        slowdowns = [seconds / job.alone_step_seconds for seconds, job in zip(found.step_seconds, jobs, strict=True)]
        return View(
            group_id=group_id,
            gpus=found.group.gpus,
            num_nodes=found.num_nodes,
            jobs=jobs,
            slowdowns=slowdowns,
            value=self.value(jobs, slowdowns),
            urgency=max([self.urgency(job) for job in jobs]),
            priority=max([job.spec.priority for job in jobs]),
            starving=any(self.is_starving(job) for job in jobs),
            rested=state.now - found.changed_at >= self.settings.min_residence_seconds,
            share=self.target(jobs),
        )

    def gives_way(self, view: View, job: Job, starving: bool) -> bool:
        """Whether the group may be slowed down or stopped for `job`, which waits: lower in priority, or far less urgent."""
        if view.priority != job.spec.priority:
            return view.priority < job.spec.priority
        return not view.starving and (starving or view.urgency * self.settings.preemption_ratio <= self.urgency(job))

    # -- what is done --------------------------------------------------------------------------------------------------

    def open(self, jobs: Sequence[Job], gpus: tuple[int, ...]) -> None:
        """A new group on GPUs that the draft has taken; `pace` allows it on so many."""
        pace = self.pace(jobs, len(gpus), self.state.num_nodes(gpus)) or self.pace(jobs, len(gpus))
        assert pace is not None, f"{[job.spec.job_id for job in jobs]} cannot run on {len(gpus)} GPUs"
        self.touched.add(self.draft.open(jobs, gpus, pace.plan).group_id)

    def change(self, group_id: str, jobs: Sequence[Job], gpus: tuple[int, ...], pace: Pace) -> None:
        """Other members or GPUs; GPUs that come are taken here, those that go are given back."""
        before = self.state.groups[group_id].group.gpus
        self.draft.give_back([gpu for gpu in before if gpu not in gpus])
        self.draft.take([gpu for gpu in gpus if gpu not in before])
        self.draft.change(group_id, jobs, gpus, pace.plan)
        self.touched.add(group_id)

    def stop(self, group_id: str) -> None:
        self.draft.stop(group_id)
        self.touched.add(group_id)

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def nodes_to_try(self) -> list[str]:
        """All nodes, or 16 of many, beginning elsewhere in each decision."""
        return self._some(list(self.state.nodes))

    def nodes_with_free(self) -> list[str]:
        """Nodes on which GPUs are free now, 16 at most."""
        return self._some([name for name in self.state.nodes if self.draft.free_of(name)])

    def _some(self, names: list[str]) -> list[str]:
        if len(names) <= _NODES_LOOKED_AT:
            return names
        start = (self.state.jobs_submitted + self.state.groups_opened) * _NODES_LOOKED_AT % len(names)
        return list(islice(names[start:] + names[:start], _NODES_LOOKED_AT))


def _sizes(node_size: int, num_gpus: int) -> list[int]:
    """Numbers of GPUs that are considered: any within a node; whole nodes beyond, 2, 3, 4, 6, 8, 12, 16, ... of them."""
    found = list(range(1, min(node_size, num_gpus) + 1))
    nodes = 2
    while nodes * node_size <= num_gpus:
        found.append(nodes * node_size)
        if 3 * nodes // 2 * node_size <= num_gpus:
            found.append(3 * nodes // 2 * node_size)
        nodes *= 2
    return found
