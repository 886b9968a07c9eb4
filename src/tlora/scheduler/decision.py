"""One decision of the residual-capacity policy in the making: its draft, what jobs and GPUs are worth, and which groups it may touch.

Values are rates: a job is worth its urgency times its speed in units of its speed alone, so that what is short weighs most. Decides
nothing by itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from tlora.scheduler.draft import Draft, may_lie_apart
from tlora.scheduler.group_index import GroupIndex, View
from tlora.scheduler.job import Job
from tlora.scheduler.predictions import Prediction, Predictions
from tlora.scheduler.reservation import Reservation, end_alone, end_of, reserve
from tlora.scheduler.settings import Settings
from tlora.scheduler.state import ClusterState
from tlora.scheduler.waiting import remaining_seconds, urgency

_MOST_LOOKED_AT = 4096  # nodes in one decision, over all jobs that wait; a look takes about 1 us
_NODES_LOOKED_AT = 16  # in one decision, where there are more; others at the next, as the first of them goes round
_T = TypeVar("_T")


class NodeGroups(NamedTuple):
    """The groups of a node: `narrow` are on it alone, `wide` are on others too, with their GPUs here.

    `worth` is that of the narrow ones, `urgency` the highest of them, inf if one has not rested; `priority` is that of all, None if they
    differ; `starving`: a job in a narrow one is; `below_share`: the tenant of one is.
    """

    narrow: tuple[View, ...]
    wide: tuple[tuple[View, int], ...]
    worth: float
    urgency: float
    priority: float | None
    starving: bool
    below_share: bool


class Decision:
    """`touched` are the groups that it has changed: none changes twice in one decision. What it has worked out it remembers."""

    def __init__(
        self,
        state: ClusterState,
        settings: Settings,
        predictions: Predictions,
        index: GroupIndex,
        starving: Sequence[Job] = (),
        levels: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`levels`: as `Tenants.levels` has them."""
        self.state, self.settings, self.index, self.starving = state, settings, index, starving
        self._levels = levels
        self.reservations: list[Reservation] = []
        self._kept_for: Job | None = None
        self._kept: Collection[str] = ()
        self.draft = Draft(state)
        self.touched: set[str] = set()
        self.node_size = max(1, state.pool.node_size)
        self._predictions = predictions
        self._price = settings.delay_price * (len(state.jobs) - len(state.held)) / max(1, state.pool.num_gpus)
        self._nodes: list[str] | None = None
        self._without_narrow: set[str] | None = None
        self._looks_left = _MOST_LOOKED_AT
        self._urgency: dict[int, float] = {}
        self._starving = {job.number for job in starving}
        self._worth: dict[str, float] = {}
        self._over_share: dict[str, list[View]] = {}
        self._standing: dict[str, NodeGroups] = {}
        self._rested: dict[str, list[tuple[float, str, View]]] = {}

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def urgency(self, job: Job) -> float:
        known = self._urgency.get(job.number)
        if known is None:
            known = self._urgency[job.number] = urgency(job, self.state.now, self.settings)
        return known

    def is_starving(self, job: Job) -> bool:
        """Whether it goes before all others of its priority."""
        return job.number in self._starving

    def is_below_share(self, job: Job) -> bool:
        """Whether its tenant has had less than its share, and another one more."""
        return self._levels.get(job.spec.tenant, 0) < 0

    def keep_room_for(self, job: Job) -> list[int]:
        """Keep the nodes on which it will soonest find room from jobs at their share, where it is the first below its own to find no
        place. Else each of its chances would be taken by the next of them. Returns the free GPUs there, which are taken.
        """
        if self._kept_for is not None or not self.is_below_share(job):
            return []
        nodes = self.soonest_nodes(job)
        if nodes:
            self._kept_for, self._kept = job, nodes
        return self.take_free(nodes)

    def is_kept_from(self, node: str, job: Job) -> bool:
        """Whether the node is kept for another one that comes first, is to be left, or is not heard as a whole."""
        kept = self.state.pool.is_avoided(node) or self.is_kept_for_share(node, job)
        return kept or any(node in kept.nodes and kept.job is not job for kept in self.reservations)

    def is_kept_for_share(self, node: str, job: Job) -> bool:
        """Whether it is kept for another one that is below its share."""
        return (
            node in self._kept
            and self._kept_for is not None
            and self._kept_for.spec.priority >= job.spec.priority
            and not self.is_below_share(job)
        )

    def hold_for(self, job: Job, starves: bool = False) -> list[int]:
        """Keep room for a job that has found none, where it is one for which that is done. Returns free GPUs that were taken for that, to
        be given back at the end of the decision.
        """
        held = self.keep_room_for(job)
        if not self.settings.reservations:
            return held + (self.take_free(self.soonest_nodes(job)) if starves else [])
        if starves or (job.spec.gpus > 1 and not self.reservations):
            reservation = reserve(self.draft, job, partial(end_of, self.state, self.settings))
            if reservation is not None:
                self.reservations.append(reservation)
        return held

    def backfill(self, job: Job) -> bool:
        """Start it on GPUs that are kept for another, where its predicted end does not put that one off. Whether it was."""
        for kept in self.reservations:
            gpus = kept.choose(self.draft, job, end_alone(self.state, self.settings, job)) if self.predict([job], job.spec.gpus) else None
            if gpus is not None:
                self.open([job], gpus)
                return True
        return False

    def may_join(self, view: View, jobs: Sequence[Job], prediction: Prediction) -> bool:
        """Whether a group of these `jobs`, one more than there are, puts off none for which GPUs of its node are kept."""
        ends = [self.remaining_seconds(job) * slowdown for job, slowdown in zip(jobs, prediction.slowdowns, strict=True)]
        until, before = self.state.now + max(ends), end_of(self.state, self.settings, view.group)
        return not any(view.nodes[0] in kept.nodes and before <= kept.at < until for kept in self.reservations)

    def soonest_nodes(self, job: Job) -> list[str]:
        """Nodes that can hold it, those freest now; none where the GPUs that are there are too few for it, as some are lost."""
        gpus, nodes, memory = job.spec.gpus, self.state.pool.lasting_nodes, self.state.memory
        roomy = {name: len(node.gpus) for name, node in nodes.items()}
        if job.least_room:
            roomy = {name: sum(memory.has_room(gpu, job.least_room) for gpu in node.gpus) for name, node in nodes.items()}
        freest = sorted(nodes, key=lambda name: (-len(self.draft.free_for(name, job.least_room)), name))
        holding = [name for name in freest if roomy[name] >= gpus][:1]
        if holding or job.spec.on_one_host or (gpus <= self.node_size and not job.least_room):
            return holding
        whole, rest = divmod(gpus, self.node_size)
        chosen = [name for name in freest if roomy[name] == self.node_size][:whole]
        chosen += [name for name in freest if name not in chosen and roomy[name] >= rest][: rest > 0]
        if len(chosen) < self.nodes_for(gpus) and may_lie_apart(self.state.pool, job):
            chosen = [name for name in freest if roomy[name]]
        return chosen if sum(roomy[name] for name in chosen) >= gpus else []

    def take_free(self, nodes: Iterable[str]) -> list[int]:
        """Their free GPUs, which are no longer free in this decision."""
        gpus = [gpu for name in nodes for gpu in self.draft.free_of(name)]
        self.draft.take(gpus)
        return gpus

    def value(self, jobs: Sequence[Job], slowdowns: Iterable[float]) -> float:
        """What it is worth that they run as fast: sum of urgency / slowdown."""
        return sum([self.urgency(job) / slowdown for job, slowdown in zip(jobs, slowdowns, strict=True)])

    def seconds_saved(self, jobs: Sequence[Job], before: Sequence[float], after: Sequence[float], delay_seconds: float = 0.0) -> float:
        """By the jobs together until they end, if slowdowns go from `before` to `after`, in so many seconds from now."""
        pairs = zip(jobs, before, after, strict=True)
        return sum([max(0.0, self.remaining_seconds(job) - delay_seconds / old) * (old - new) for job, old, new in pairs])

    def remaining_seconds(self, job: Job) -> float:
        return remaining_seconds(job, self.state.now, self.settings)

    # -- how many GPUs -------------------------------------------------------------------------------------------------

    def predict(self, jobs: Sequence[Job], gpus: int, nodes: int | None = None, kind: str = "") -> Prediction | None:
        """Of `jobs` in one group on `gpus` GPUs, by default of the slowest kind on as few nodes as can be; None where it may not."""
        return self._predictions.of(jobs, gpus, nodes or self.nodes_for(gpus), kind=kind)

    def predict_on(self, jobs: Sequence[Job], gpus: tuple[int, ...]) -> Prediction | None:
        """The same of these very GPUs."""
        state = self.state
        return self._predictions.of(jobs, len(gpus), state.pool.num_nodes(gpus), state.rooms.on(jobs, gpus), state.kinds.slowest(gpus))

    def can_have(self, jobs: Iterable[Job], gpus: Iterable[int]) -> bool:
        """Whether each of the GPUs has room for each of the jobs."""
        state = self.state
        if not state.memory.is_uneven:
            return True
        least = max([job.least_room for job in jobs], default=0.0)
        return all(state.memory.has_room(gpu, least) for gpu in gpus)

    def nodes_for(self, gpus: int) -> int:
        return -(-gpus // self.node_size)

    def sizes(self, jobs: Sequence[Job]) -> Sequence[int]:
        """Numbers of GPUs on which `jobs` may run together, rising: their bounds are kept, and each GPU has samples to work on."""
        return self._predictions.choice(jobs).sizes

    def target(self, jobs: Sequence[Job]) -> int | None:
        """Their share of the GPUs: where the mean of slowdown * (1 + price * GPUs / jobs) is least; None if they can run on none.

        The first term is their own time, the second that of all others, which wait for the GPUs that these have meanwhile.
        """
        best = self._predictions.choice(jobs).cheapest(self._price / len(jobs))
        if best is None and jobs[0].spec.gpus <= self.state.pool.num_gpus:
            return jobs[0].spec.gpus if len(jobs) == 1 else None
        return best

    def sizes_alone(self, job: Job) -> Sequence[int]:
        """Numbers of GPUs on which it may begin by itself, rising: up to its share or, without growth, as many as it asks for."""
        if not self.settings.elastic:
            return [job.spec.gpus]
        target = self.target([job])
        return [gpus for gpus in self.sizes([job]) if target is not None and gpus <= target]

    # -- groups --------------------------------------------------------------------------------------------------------

    def groups_on(self, node: str) -> list[View]:
        """Groups with GPUs on the node that this decision has not touched, in the order of their GPUs."""
        view, touched = self.index.view, self.touched
        return [view(name) for name in self.state.pool.groups_on(node) if name not in touched]

    def over_share(self, node: str) -> list[View]:
        """Untouched groups on the node with more GPUs than their share, those first that have most beyond it."""
        views = self._over_share.get(node)
        if views is None:
            view_of = self.index.view
            views = [view for name in self.state.pool.groups_on(node) if self.beyond_share(view := view_of(name))]
            if len(views) > 1:
                views.sort(key=lambda view: (-self.beyond_share(view), view.group_id))
            self._over_share[node] = views
        return [view for view in views if view.group_id not in self.touched] if views else views

    def givers_on(self, node: str, job: Job) -> list[View]:
        """Groups on the node that give way to `job`, the least urgent first: untouched ones that have rested, unless it is starving."""
        if self.is_starving(job):
            views = [(self.urgency_of(view), view.group_id, view) for view in self.groups_on(node)]
            return [view for *_, view in sorted(views) if self._gives_way(view, job)]
        touched, ratio, own, priority = self.touched, self.settings.preemption_ratio, self.urgency(job), job.spec.priority
        return [
            view
            for urgency, name, view in self._rested_on(node)
            if (urgency * ratio <= own or view.priority != priority) and name not in touched and self._gives_way(view, job)
        ]

    def yields(self, view: View, job: Job) -> bool:
        """Whether the group gives way to `job`, as `givers_on` has it."""
        if view.group_id in self.touched or not self._gives_way(view, job):
            return False
        if self.is_starving(job):
            return True
        far = view.priority != job.spec.priority or self.urgency_of(view) * self.settings.preemption_ratio <= self.urgency(job)
        return far and self.rested(view)

    def standing(self, node: str) -> NodeGroups | None:
        """The groups of the node, one of full size that this decision has left as it was; else None."""
        known = self.state.pool.nodes[node]
        if len(known.gpus) != self.node_size or self.draft.has_changed(node):
            return None
        node_groups = self._standing.get(node)
        if node_groups is None:
            node_groups = self._standing[node] = self._stand(node)
        if any(view.group_id in self.touched for view, _ in node_groups.wide) or any(
            view.group_id in self.touched for view in node_groups.narrow
        ):
            return None
        return node_groups

    def _stand(self, node: str) -> NodeGroups:
        views = [self.index.view(name) for name in self.state.pool.groups_on(node)]
        narrow = tuple([view for view in views if len(view.nodes) == 1])
        on, gpus = self.state.pool.group_on, self.state.pool.nodes[node].gpus
        wide = [(view, sum([on.get(gpu) == view.group_id for gpu in gpus])) for view in views if len(view.nodes) > 1]
        priorities = {view.priority for view in narrow}
        return NodeGroups(
            narrow,
            tuple(wide),
            sum([self.worth(view) for view in narrow]),
            max([self.urgency_of(view) if self.rested(view) else math.inf for view in narrow], default=0.0),
            priorities.pop() if len(priorities) == 1 else None,
            bool(self._starving) and any(self.is_starving(job) for view in narrow for job in view.jobs),
            bool(self._levels) and any(self.is_below_share(job) for view in narrow for job in view.jobs),
        )

    def all_yield(self, standing: NodeGroups, job: Job) -> bool:
        """Whether all narrow groups there give way to `job`."""
        if standing.priority != job.spec.priority:
            return all(self.yields(view, job) for view in standing.narrow)
        if standing.starving or (standing.below_share and not self.is_below_share(job)):
            return False
        return self.is_starving(job) or standing.urgency * self.settings.preemption_ratio <= self.urgency(job)

    def _rested_on(self, node: str) -> list[tuple[float, str, View]]:
        """Groups that have rested, touched ones too, with their urgency and name, rising."""
        rested = self._rested.get(node)
        if rested is None:
            view = self.index.view
            rested = [(self.urgency_of(own), name, own) for name in self.state.pool.groups_on(node) if self.rested(own := view(name))]
            rested.sort()
            self._rested[node] = rested
        return rested

    def _gives_way(self, view: View, job: Job) -> bool:
        """Whether a group that is far less urgent may be slowed down or stopped for `job`, which waits."""
        if view.priority != job.spec.priority:
            return view.priority < job.spec.priority
        if self._levels and not self.is_below_share(job) and any(self.is_below_share(other) for other in view.jobs):
            return False
        return not any(self.is_starving(other) for other in view.jobs)

    def view(self, group_id: str) -> View:
        """A group as the decision found it."""
        return self.index.view(group_id)

    def rested(self, view: View) -> bool:
        """Whether it has been left alone for the minimum residence time."""
        return self.state.now - view.changed_at >= self.settings.min_residence_seconds

    def worth(self, view: View) -> float:
        """The value of the group as it is."""
        group_worth = self._worth.get(view.group_id)
        if group_worth is None:
            group_worth = self._worth[view.group_id] = self.value(view.jobs, view.slowdowns)
        return group_worth

    def urgency_of(self, view: View) -> float:
        """The highest among its members."""
        return self.urgency(view.jobs[0]) if len(view.jobs) == 1 else max([self.urgency(job) for job in view.jobs])

    def share(self, view: View) -> int:
        """GPUs that are its due; 0 where it can run on no number of them."""
        if view.choice is None:
            view.choice = self._predictions.choice(view.jobs)
        return view.choice.cheapest(self._price / len(view.jobs)) or self.target(view.jobs) or 0

    def beyond_share(self, view: View) -> int:
        share = self.share(view)
        return max(0, len(view.gpus) - share) if share else 0

    # -- what is done --------------------------------------------------------------------------------------------------

    def open(self, jobs: Sequence[Job], gpus: tuple[int, ...]) -> None:
        """A new group on GPUs that the draft has taken; `prediction` allows it on so many."""
        prediction = self.predict_on(jobs, gpus) or self.predict(jobs, len(gpus))
        assert prediction is not None, f"{[job.spec.job_id for job in jobs]} cannot run on {len(gpus)} GPUs"
        self.touched.add(self.draft.open(jobs, gpus, prediction.plan).group_id)

    def change(self, group_id: str, jobs: Sequence[Job], gpus: tuple[int, ...], prediction: Prediction) -> None:
        """Other members or GPUs; GPUs that come are taken here, those that go are given back."""
        before = self.state.groups[group_id].group.gpus
        self.draft.give_back([gpu for gpu in before if gpu not in gpus])
        self.draft.take([gpu for gpu in gpus if gpu not in before])
        self.draft.change(group_id, jobs, gpus, prediction.plan)
        self.touched.add(group_id)

    def stop(self, group_id: str) -> None:
        self.draft.stop(group_id)
        self.touched.add(group_id)

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def may_look_at(self, nodes: int) -> bool:
        """Whether so many may be looked at for another job. It then counts them as looked at."""
        if nodes > self._looks_left:
            return False
        self._looks_left -= nodes
        return True

    def nodes_to_try(self) -> list[str]:
        """All nodes, or 16 of many, beginning elsewhere in each decision."""
        if self._nodes is None:
            self._nodes = self._some(self.state.pool.node_names)
        return self._nodes

    def nodes_with_free(self) -> list[str]:
        """Nodes on which GPUs are free now, 16 at most."""
        names = self.state.pool.node_names
        return [names[place] for place in self._some(self.draft.with_free())]

    def nodes_without_narrow(self) -> list[str]:
        """Nodes that may come free though no group stops: none is on them alone, or GPUs of theirs have changed hands in this decision."""
        if self._without_narrow is None:
            view, pool = self.index.view, self.state.pool
            self._without_narrow = {name for name in pool.nodes if not any(len(view(group).nodes) == 1 for group in pool.groups_on(name))}
        return [*self._without_narrow, *[name for name in self.draft.changed_nodes() if name not in self._without_narrow]]

    def _some(self, found: list[_T]) -> list[_T]:
        if len(found) <= _NODES_LOOKED_AT:
            return found
        start = (self.state.jobs_submitted + self.state.groups_opened) * _NODES_LOOKED_AT % len(found)
        return found[start : start + _NODES_LOOKED_AT] + found[: max(0, start + _NODES_LOOKED_AT - len(found))]
