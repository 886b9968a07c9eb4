"""Whole nodes for a job that is wider than one: those that are free, and those that groups anywhere would give up for it.

A group on several nodes gives some of them, or stops and gives them all, at one price. Not here: whether the job is worth it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from tlora.scheduler.decision import Decision
from tlora.scheduler.group_index import View
from tlora.scheduler.job import Job
from tlora.scheduler.pauses import pause_for_less
from tlora.scheduler.reclaim import Offer, PreemptionPlan, offers, stop_of


@dataclass(slots=True)
class _Donor:
    """A group on several nodes: `given` are those that it gives, `loss` what it loses by that. It has stopped if `all_given`."""

    view: View
    yields: bool
    least: int  # GPUs that it keeps at least, unless it stops
    left: int  # GPUs
    given: list[str] = field(default_factory=list[str])
    loss: float = 0.0
    all_given: bool = False
    more: dict[int, tuple[float, bool]] = field(default_factory=dict[int, tuple[float, bool]])  # by the GPUs of a node: see `_more`


@dataclass(slots=True)
class WholeNodes:
    """Nodes for `job`, chosen one after the other by what is lost by that. With `stops`, groups that give way to it may be stopped.

    `without_preemption`: only what groups have beyond their share.
    """

    decision: Decision
    job: Job
    without_preemption: bool
    stops: bool
    chosen: dict[str, list[PreemptionPlan]] = field(default_factory=dict[str, list[PreemptionPlan]])  # with what stops on that node alone
    donors: dict[str, _Donor] = field(default_factory=dict[str, _Donor])
    _heap: list[tuple[float, str, str]] = field(default_factory=list[tuple[float, str, str]])  # loss, rack, node

    def __post_init__(self) -> None:
        nodes = self.decision.state.pool.nodes
        names = nodes if self.stops else self.decision.nodes_without_narrow()
        if not self.decision.may_look_at(len(names)):
            return
        self._heap = [(loss, nodes[name].rack, name) for name in names if (loss := self._loss(name)) < math.inf]
        heapify(self._heap)

    def offers_of(self, gpus: int) -> tuple[Offer, ...] | None:
        """The offers that together hold `gpus` GPUs, not fewer than at the call before, on as few nodes as hold so many; or None."""
        whole, rest = divmod(gpus, self.decision.node_size)
        if not self._take(whole):
            return None
        if not rest:
            return self._offers()
        last = self._part_of_a_node(rest)
        if last is not None:
            return (*self._offers(), last)
        return self._offers() if self._take(whole + 1) else None

    def _take(self, count: int) -> bool:
        """Choose nodes until there are so many. Whether there are."""
        if len(self.chosen) + len(self._heap) < count:
            return False
        while len(self.chosen) < count:
            node = self._next()
            if node is None:
                return False
            self._choose(node)
        self._swap()
        return True

    def _offers(self) -> tuple[Offer, ...]:
        """One for each node; the first has what groups on several nodes give."""
        wide = tuple([self._sacrifice(donor) for donor in self.donors.values() if donor.given])
        node_offers = [Offer(node, self.decision.node_size, tuple(own)) for node, own in self.chosen.items()]
        return (node_offers[0]._replace(sacrifices=(*node_offers[0].sacrifices, *wide)), *node_offers[1:])

    def _sacrifice(self, donor: _Donor) -> PreemptionPlan:
        decision, view = self.decision, donor.view
        if donor.all_given:
            return stop_of(decision, view, len(view.gpus))
        node_of = decision.state.pool.node_of
        keep = tuple([gpu for gpu in view.gpus if node_of[gpu] not in donor.given])
        prediction = decision.predict(view.jobs, len(keep), len(view.nodes) - len(donor.given), view.kind)
        pause = pause_for_less(decision, view)
        return PreemptionPlan(view.group_id, keep, prediction, len(view.gpus) - len(keep), donor.loss, pause)

    def _part_of_a_node(self, rest: int) -> Offer | None:
        """Of `rest` GPUs on one node more, at the least loss."""
        best: Offer | None = None
        nodes = self.decision.nodes_to_try()
        if not self.decision.may_look_at(len(nodes)):
            return None
        for node in nodes:
            if node in self.chosen or self.decision.is_kept_from(node, self.job):
                continue
            for offer in offers(self.decision, node, self.job, rest, self.without_preemption):
                if offer.gpus < rest or any(each.group_id in self.donors for each in offer.sacrifices):
                    continue
                if not self.stops and any(each.prediction is None for each in offer.sacrifices):
                    continue
                if best is None or offer.loss < best.loss:
                    best = offer
                break
        return best

    def _next(self) -> str | None:
        """The node of the least loss, which is worked out again as groups on several nodes may have given others since."""
        while self._heap:
            loss, rack, node = heappop(self._heap)
            if node in self.chosen:
                continue
            now = self._loss(node)
            if now <= loss:
                return node
            if now < math.inf:
                heappush(self._heap, (now, rack, node))
        return None

    def _loss(self, node: str) -> float:
        """That all of the node comes free; inf where it cannot, or some GPU of it has too little room for the job."""
        decision = self.decision
        if decision.is_kept_from(node, self.job) or not decision.can_have([self.job], decision.state.pool.nodes[node].gpus):
            return math.inf
        if len(decision.draft.free_of(node)) == decision.node_size:
            return 0.0
        standing = decision.standing(node)
        if standing is None:
            return math.inf
        loss = 0.0
        if standing.narrow:
            if not self.stops or not decision.all_yield(standing, self.job):
                return math.inf
            loss = standing.worth
        for view, gpus in standing.wide:
            loss += self._more(self._giver(view), gpus)[0]
        return loss

    def _giver(self, view: View) -> _Donor:
        donor = self.donors.get(view.group_id)
        if donor is None:
            decision = self.decision
            yields = not self.without_preemption and decision.yields(view, self.job)
            least = 1 if yields else max(1, decision.share(view))
            if not decision.settings.elastic:
                least = len(view.gpus)
            donor = self.donors[view.group_id] = _Donor(view, yields, least, len(view.gpus))
        return donor

    def _more(self, donor: _Donor, gpus: int) -> tuple[float, bool]:
        """What the group loses more when it gives a node with so many GPUs of it, and whether it stops for that: then it gives all that it
        has, and the loss is spread over these. inf if it does neither."""
        if donor.all_given:
            return 0.0, True
        more = donor.more.get(gpus)
        if more is None:
            decision, view, keep = self.decision, donor.view, donor.left - gpus
            nodes = len(view.nodes) - len(donor.given) - 1
            prediction = decision.predict(view.jobs, keep, nodes, view.kind) if nodes and keep >= donor.least else None
            if prediction is not None:
                more = decision.worth(view) - decision.value(view.jobs, prediction.slowdowns) - donor.loss, False
            elif self.stops and donor.yields:
                more = (decision.worth(view) - donor.loss) / (nodes + 1), True
            else:
                more = math.inf, False
            donor.more[gpus] = more
        return more

    def _choose(self, node: str) -> None:
        decision = self.decision
        self.chosen[node] = []
        if len(decision.draft.free_of(node)) == decision.node_size:
            return
        standing = decision.standing(node)
        assert standing is not None, f"{node} cannot be had"
        self.chosen[node] = [stop_of(decision, view, len(view.gpus)) for view in standing.narrow]
        for view, gpus in standing.wide:
            donor = self.donors[view.group_id]
            more, stops = self._more(donor, gpus)
            donor.more.clear()
            donor.given.append(node)
            donor.left -= gpus
            donor.loss += more
            if stops and not donor.all_given:
                donor.all_given, donor.loss = True, decision.worth(view)
                nodes = decision.state.pool.nodes
                for other in view.nodes:
                    if other not in self.chosen and (loss := self._loss(other)) < math.inf:
                        heappush(self._heap, (loss, nodes[other].rack, other))

    def _swap(self) -> None:
        """Nodes that a stopped group has left over replace those on which most is lost."""
        while self._heap and self._heap[0][0] <= 0.0:
            node = self._next()
            if node is None or self._loss(node) > 0.0:
                return
            worst = max(self.chosen, key=lambda name: (sum([each.loss for each in self.chosen[name]]), name))
            if not self.chosen[worst]:
                heappush(self._heap, (0.0, self.decision.state.pool.nodes[node].rack, node))
                return
            del self.chosen[worst]
            self._choose(node)
