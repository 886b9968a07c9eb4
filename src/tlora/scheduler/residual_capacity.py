"""The policy of this project: jobs share GPUs within bounds on each one's slowdown, and groups grow and shrink with the load.

Its rules: docs/explanation/scheduling.md. The order of jobs is in `waiting.py`, reclaiming of GPUs in `reclaim.py`, growth in `growth.py`,
the index of groups in `group_index.py`. Pure but for its caches, all of which could be worked out anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tlora.protocol import JobGroup
from tlora.scheduler.decision import Decision
from tlora.scheduler.draft import may_lie_apart
from tlora.scheduler.group_index import GroupIndex
from tlora.scheduler.growth import grow, part
from tlora.scheduler.job import Job, Lane
from tlora.scheduler.kind_choice import kind_on, may_wait, speed_up, take_free
from tlora.scheduler.predictions import Prediction, Predictions
from tlora.scheduler.reclaim import Offer, PreemptionPlan, apply, offers
from tlora.scheduler.scattered import scattered_offers
from tlora.scheduler.scheduler import Policy
from tlora.scheduler.settings import Settings
from tlora.scheduler.starvation import Starvation
from tlora.scheduler.state import ClusterState
from tlora.scheduler.waiting import Waiting, rank
from tlora.scheduler.whole_nodes import WholeNodes

_JOINS_TRIED = 8
_FAILURES_OF_A_LANE = 4  # jobs that ask for as many GPUs and found no room, until those behind them preempt no group
_GAPS_TRIED = (
    16  # and until they are not tried at all. 4 leave gaps of a node that a job behind would fill: 1 % of the tokens/s of a full cluster
)
_REORDER_SECONDS = 60.0  # for so long a long queue keeps its order
_LONG_QUEUE = 64
_RETHINK_SECONDS = 300.0  # a decision to change nothing holds for so long where nothing happens


def residual_capacity(settings: Settings = Settings()) -> Policy:  # noqa: B008 (it is frozen)
    """The policy with these settings. Each job that waits, the most urgent first, has the best of these in value, or waits on:

    GPUs that are free, as many as its share; a group of its base whose residual capacity R = u * C(B, G) - sum of needs holds what it
    needs, by best fit; GPUs that others give up. What is then still free goes to members that gain by leaving their groups, and then to
    groups for which it is worth most, revocably.
    """
    memory = _Memory(settings)

    def decide(state: ClusterState) -> list[JobGroup]:
        if not state.pool.num_gpus or memory.holds(state):
            return []
        predictions, index = memory.predictions, memory.index
        predictions.follow(state)
        index.follow(state)
        memory.starvation.follow(state)
        levels = state.tenants.levels(state.now)
        decision = Decision(state, settings, predictions, index, memory.starvation.first(state), levels)
        displaced = replan(decision, state.newly_measured)
        if state.pending or displaced:
            _place_those_who_wait(decision, memory.queue(state, levels), displaced)
        if decision.draft.num_free:
            part(decision)
            speed_up(decision)
            if settings.elastic:
                grow(decision)
        wanted = decision.draft.wanted()
        memory.note(state, wanted)
        return wanted

    return decide


class _Memory:
    """What is kept from one decision to the next: indexes, the order of a long queue, and whether there was nothing to do."""

    def __init__(self, settings: Settings) -> None:
        self.predictions = Predictions(settings.least_replica_tokens)
        self.index = GroupIndex(self.predictions)
        self.starvation = Starvation(settings)
        self._settings = settings
        self._queue: Waiting | None = None
        self._ordered_at = -math.inf
        self._levels: Mapping[str, int] = {}
        self._idle: tuple[int, ...] = ()
        self._idle_until = -math.inf

    def holds(self, state: ClusterState) -> bool:
        """Whether the decision before this one found nothing to do, a short time ago, and nothing has happened since."""
        return state.now < self._idle_until and _happenings(state) == self._idle

    def note(self, state: ClusterState, wanted: list[JobGroup]) -> None:
        self._idle = _happenings(state)
        self._idle_until = -math.inf if wanted else min(state.now + _RETHINK_SECONDS, self.starvation.next_at)

    def queue(self, state: ClusterState, levels: Mapping[str, int]) -> Waiting:
        """The waiting jobs in order: today's, but a long queue keeps its order for a short time while the tenants' levels are the same."""
        recent = len(state.pending) > _LONG_QUEUE and 0 <= state.now - self._ordered_at < _REORDER_SECONDS
        if self._queue is None or not recent or levels != self._levels:
            self._ordered_at, self._levels = state.now, levels
            self._queue = Waiting(lambda job: rank(job, state.now, self._settings, levels))
        self._queue.follow(state)
        return self._queue


def _happenings(state: ClusterState) -> tuple[int, ...]:
    """Differs whenever a job, group or GPU has come or gone, a job is held, released or begins, a host is to be left or used again, a GPU
    is heard no more or again, or predictions have changed.
    """
    return (
        state.jobs_submitted,
        state.jobs_begun,
        len(state.jobs),
        state.groups_opened,
        len(state.groups),
        state.pool.num_gpus,
        len(state.pool.draining),
        len(state.pending),
        len(state.held),
        state.cost.times_corrected,
        *sorted(state.pool.unheard),
    )


def _place_those_who_wait(decision: Decision, waiting: Waiting, displaced: Sequence[Job]) -> None:
    """Place by priority; within a priority starving jobs first, then in order. Jobs that were preempted come last, among them the
    `displaced`, and preempt none.
    """
    settings = decision.settings
    tries = _GAPS_TRIED if settings.elastic or settings.sharing or settings.preemption else 1
    failures: dict[Lane, int] = {}
    stopped = [*displaced]
    held: list[int] = []
    hopeless: set[Lane] = set()
    starving = [job for job in reversed(decision.starving) if job.status == "pending"]
    while True:
        job = waiting.first(hopeless)
        if starving and (job is None or _goes_before(decision, starving[-1], job)):
            late = starving.pop()
            gave_way = _place(decision, late, without_preemption=False)
            if gave_way is None and not decision.backfill(late):
                held += decision.hold_for(late, starves=True)
            stopped += gave_way or []
            continue
        if job is None:
            break
        waiting.take(job)
        if decision.is_starving(job):
            continue
        failed = failures.get(job.lane, 0)
        gave_way = _place(decision, job, without_preemption=failed >= _FAILURES_OF_A_LANE)
        if gave_way is not None:
            stopped += gave_way
            continue
        if decision.backfill(job):
            continue
        held += decision.hold_for(job)
        failures[job.lane] = failed + 1
        if failures[job.lane] >= tries:
            hopeless.add(job.lane)
    for job in sorted(stopped, key=lambda job: rank(job, decision.state.now, settings, {})):
        if _place(decision, job, without_preemption=True) is None:
            decision.backfill(job)
    decision.draft.give_back(held)


def _goes_before(decision: Decision, late: Job, job: Job) -> bool:
    """Whether one that starves goes before the first of the queue: not where its tenant has had its share, and that of the other not."""
    if late.spec.priority != job.spec.priority:
        return late.spec.priority > job.spec.priority
    return decision.is_below_share(late) or not decision.is_below_share(job)


# -- a place for one -----------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where a job could run: alone on `gpus` GPUs of the offers' nodes, or in the group `joins`, as predicted. `net` is its value."""

    net: float
    gpus: int = 0
    offers: tuple[Offer, ...] = ()
    joins: str = ""
    prediction: Prediction | None = None


def _place(decision: Decision, job: Job, without_preemption: bool) -> list[Job] | None:
    """Give the job a place. Returns the jobs that lost theirs by that, or None if there is no place for it."""
    settings, draft = decision.settings, decision.draft
    sizes = decision.sizes_alone(job)
    if sizes:
        gpus = take_free(decision, job, sizes)
        if gpus is not None:
            decision.open([job], gpus)
            return []
    places: list[_Place] = []
    if settings.elastic or settings.preemption:
        places = _narrow_places(decision, job, sizes, without_preemption) + _wide_places(decision, job, sizes, without_preemption)
        places = places or _scattered_places(decision, job, sizes, without_preemption)
    if settings.sharing:
        places += _joins(decision, job)
    if not places:  # what it asks for may be whole nodes and a part of another
        may_start = job.spec.gpus in sizes or (draft.num_free >= job.spec.gpus and not may_wait(decision, job, sizes))
        gpus = draft.allocate_for(job, job.spec.gpus) if may_start else None
        if gpus is None:
            return None
        decision.open([job], gpus)
        return []
    best = max(places, key=lambda place: (place.net, -sum(len(offer.sacrifices) for offer in place.offers), place.joins))
    if best.prediction is not None:
        view = decision.view(best.joins)
        decision.change(best.joins, [*view.jobs, job], view.gpus, best.prediction)
        return []
    stopped = apply(decision, tuple(each for offer in best.offers for each in offer.sacrifices))
    gpus = tuple(sorted([gpu for offer in best.offers for gpu in draft.free_for(offer.node, job.least_room)][: best.gpus]))
    assert len(gpus) == best.gpus, f"{job.spec.job_id} finds {len(gpus)} of {best.gpus} GPUs on {[offer.node for offer in best.offers]}"
    draft.take(gpus)
    decision.open([job], gpus)
    return stopped


def _narrow_places(decision: Decision, job: Job, sizes: Sequence[int], without_preemption: bool) -> list[_Place]:
    """On GPUs of one node."""
    narrow = [gpus for gpus in sizes if gpus <= decision.node_size]
    places: list[_Place] = []
    nodes = decision.nodes_to_try()
    if not narrow or not decision.may_look_at(len(nodes)):
        return places
    for node in nodes:
        if decision.is_kept_from(node, job):
            continue
        for offer in offers(decision, node, job, narrow[-1], without_preemption):
            gpus = max((gpus for gpus in narrow if gpus <= offer.gpus), default=0)
            if gpus:
                places += _worth(decision, job, gpus, (offer,))
    return places


def _wide_places(decision: Decision, job: Job, sizes: Sequence[int], without_preemption: bool) -> list[_Place]:
    """Places on GPUs of several nodes. No group is stopped to give the job more than it asks for."""
    wide = [gpus for gpus in sizes if gpus > decision.node_size]
    if not wide:
        return []
    places: list[_Place] = []
    nodes = WholeNodes(decision, job, without_preemption, stops=False)
    for gpus in wide:
        chosen = nodes.offers_of(gpus)
        if chosen is None:
            break
        places += _worth(decision, job, gpus, chosen)
    if places or without_preemption or not decision.settings.preemption:
        return places
    nodes = WholeNodes(decision, job, without_preemption, stops=True)
    for gpus in wide:
        chosen = nodes.offers_of(gpus) if gpus <= job.spec.gpus else None
        if chosen is None:
            break
        prediction = decision.predict([job], gpus, len(chosen))
        if prediction is not None:
            net = decision.value([job], prediction.slowdowns) - sum([offer.loss for offer in chosen])
            places = [_Place(net, gpus, chosen)]
    return places


def _scattered_places(decision: Decision, job: Job, sizes: Sequence[int], without_preemption: bool) -> list[_Place]:
    """Of a job whose GPUs may lie apart, on GPUs of any nodes, not more than it asks for."""
    gpus = max([gpus for gpus in sizes if gpus <= job.spec.gpus], default=0)
    if not gpus or not may_lie_apart(decision.state.pool, job):
        return []
    chosen = scattered_offers(decision, job, gpus, stops=False)
    places = _worth(decision, job, gpus, chosen) if chosen is not None else []
    if places or without_preemption or not decision.settings.preemption:
        return places
    chosen = scattered_offers(decision, job, gpus, stops=True)
    return _worth(decision, job, gpus, chosen) if chosen is not None else []


def _worth(decision: Decision, job: Job, gpus: int, chosen: tuple[Offer, ...]) -> list[_Place]:
    """The place, if it is worth what it costs: (value won - value lost) * time there > (1 + h) * value of the pauses."""
    prediction = decision.predict([job], gpus, len(chosen), kind_on(decision, [offer.node for offer in chosen]))
    if prediction is None:
        return []
    net = decision.value([job], prediction.slowdowns) - sum(offer.loss for offer in chosen)
    pause = sum(offer.pause for offer in chosen)
    if pause and not _goes_first(decision, job, chosen):
        seconds = decision.remaining_seconds(job) * prediction.slowdowns[0]
        if net * seconds <= (1 + decision.settings.hysteresis) * pause:
            return []
    return [_Place(net, gpus, chosen)]


def _goes_first(decision: Decision, job: Job, chosen: tuple[Offer, ...]) -> bool:
    """Whether the groups that the place takes GPUs from have to yield at any loss."""
    if decision.is_starving(job):
        return True
    sacrifices: list[PreemptionPlan] = [each for offer in chosen for each in offer.sacrifices]
    return all(decision.view(each.group_id).priority < job.spec.priority for each in sacrifices)


def _joins(decision: Decision, job: Job) -> list[_Place]:
    """Groups of its base by best fit in which all bounds hold with it, if it gains more than they lose.

    Groups of one node only: members would hold whole nodes together for the next wide job, ahead of narrow ones that wait for a GPU each.
    """
    joins: list[_Place] = []
    for name in decision.index.best_fit(job.spec.base_model, job.need, _JOINS_TRIED):
        if name in decision.touched:
            continue
        view = decision.view(name)
        if decision.is_kept_for_share(view.nodes[0], job) or any(map(decision.state.pool.is_left, view.gpus)):
            continue
        jobs = [*view.jobs, job]
        prediction = decision.predict_on(jobs, view.gpus) if decision.can_have([job], view.gpus) else None
        asked = sum([member.spec.gpus for member in jobs])
        if prediction is None or (len(view.gpus) > asked and decision.predict(jobs, asked, kind=view.kind) is None):
            continue  # or growth could not be taken back any more
        if not decision.may_join(view, jobs, prediction):
            continue
        net = decision.value(jobs, prediction.slowdowns) - decision.worth(view)
        if net > 0 or decision.is_below_share(job):
            joins.append(_Place(net, joins=name, prediction=prediction))
    return joins


def replan(decision: Decision, bases: Iterable[str]) -> list[Job]:
    """Each group of those bases gets the plan that suits the new predictions, on the GPUs that it has. As long as a member's bound cannot
    hold, the last to come leaves; a job alone leaves GPUs that are other in number than it asks for. Returns the jobs that left.
    """
    left: list[Job] = []
    for name in [name for base in bases for name in decision.state.groups_of_base[base]]:
        group = decision.state.groups[name].group
        if not group.job_ids:
            continue
        view = decision.view(name)
        jobs = list(view.jobs)
        while (prediction := decision.predict_on(jobs, view.gpus)) is None and len(jobs) > 1:
            left.append(jobs.pop())
        if prediction is None:
            left += jobs
            decision.stop(name)
        elif prediction.plan != group.plan or len(view.jobs) > 1:  # the weights of several are other needs now
            decision.change(name, jobs, view.gpus, prediction)
    return left
