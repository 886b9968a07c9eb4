"""GPUs of any nodes for a job whose GPUs may lie apart: free ones, those that groups have beyond their share, those of groups that give way
to it. Not here: which jobs these are (`draft.may_lie_apart`), and whether what is found is worth its price.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from tlora.scheduler.decision import Decision
from tlora.scheduler.group_index import View
from tlora.scheduler.job import Job
from tlora.scheduler.pauses import pause_for_less
from tlora.scheduler.reclaim import Offer, PreemptionPlan, stop_of


def scattered_offers(decision: Decision, job: Job, gpus: int, *, stops: bool) -> tuple[Offer, ...] | None:
    """Offers of several nodes that together hold `gpus` GPUs for the job, at the price of as few groups as are needed; the first has what
    they give. With `stops` the least urgent of the groups that give way stop. None where all that is not enough.
    """
    pool, draft = decision.state.pool, decision.draft
    if not decision.may_look_at(len(pool.nodes)):
        return None
    nodes = [name for name in pool.nodes if not decision.is_kept_from(name, job)]
    room = Counter({name: len(draft.free_for(name, job.least_room)) for name in nodes})
    missing = gpus - room.total()
    given = _given(decision, job, nodes, missing, stops=stops) if missing > 0 else []
    if given is None:
        return None
    for plan in given:
        room.update([pool.node_of[gpu] for gpu in _freed(decision, job, plan) if pool.node_of[gpu] in room])
    chosen, found = list[str](), 0
    for name, count in sorted(room.items(), key=lambda item: (-item[1], item[0])):
        if found < gpus:
            chosen.append(name)
            found += count
    first, *others = [Offer(name, room[name]) for name in chosen]
    return first._replace(sacrifices=tuple(given)), *others


def _given(decision: Decision, job: Job, nodes: Collection[str], missing: int, *, stops: bool) -> list[PreemptionPlan] | None:
    """What groups give, so many GPUs together or a few more; None where it is not so many."""
    views = {view.group_id: view for name in nodes for view in decision.groups_on(name)}
    plans, found = dict[str, PreemptionPlan](), 0
    if decision.settings.elastic:
        grown = [view for view in views.values() if decision.beyond_share(view)]
        for view in sorted(grown, key=lambda view: (-decision.beyond_share(view), view.group_id)):
            if found < missing and (plan := _shrink(decision, job, view, nodes, missing - found)) is not None:
                plans[view.group_id] = plan
                found += plan.gpus
    if stops:
        yielding = [view for view in views.values() if decision.yields(view, job)]
        for view in sorted(yielding, key=lambda view: (decision.urgency_of(view), view.group_id)):
            own = len(_usable(decision, job, view.gpus, nodes))
            known = plans[view.group_id].gpus if view.group_id in plans else 0
            if found < missing and own > known:
                plans[view.group_id] = stop_of(decision, view, own)
                found += own - known
    if found < missing:
        return None
    needed = list[PreemptionPlan]()
    for plan in sorted(plans.values(), key=lambda plan: plan.prediction is not None):  # those that stop go on first
        if found - plan.gpus >= missing:
            found -= plan.gpus
        else:
            needed.append(plan)
    return needed


def _shrink(decision: Decision, job: Job, view: View, nodes: Collection[str], wanted: int) -> PreemptionPlan | None:
    """What the group has beyond its share, up to so many GPUs, from the nodes on which it has fewest."""
    node_of = decision.state.pool.node_of
    on = Counter([node_of[gpu] for gpu in view.gpus])
    usable = sorted(_usable(decision, job, view.gpus, nodes), key=lambda gpu: (on[node_of[gpu]], node_of[gpu], gpu))
    for count in range(min(wanted, len(usable), decision.beyond_share(view)), 0, -1):
        keep = tuple([gpu for gpu in view.gpus if gpu not in usable[:count]])
        prediction = decision.predict(view.jobs, len(keep), decision.state.pool.num_nodes(keep), view.kind)
        if prediction is not None:
            loss = decision.worth(view) - decision.value(view.jobs, prediction.slowdowns)
            return PreemptionPlan(view.group_id, keep, prediction, count, loss, pause_for_less(decision, view))
    return None


def _usable(decision: Decision, job: Job, gpus: Sequence[int], nodes: Collection[str]) -> list[int]:
    state = decision.state
    return [gpu for gpu in gpus if state.pool.node_of[gpu] in nodes and state.memory.has_room(gpu, job.least_room)]


def _freed(decision: Decision, job: Job, plan: PreemptionPlan) -> list[int]:
    before = decision.view(plan.group_id).gpus
    return [gpu for gpu in before if gpu not in plan.keep and decision.state.memory.has_room(gpu, job.least_room)]
