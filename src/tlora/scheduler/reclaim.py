"""GPUs for a job that waits: those that are free on a node, and those that groups there would give up for it, with what that costs.

Groups give up, in this order: what they have beyond their share; where they are far less urgent, what their bounds do not need; all.
Not here: which offer is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from tlora.scheduler.decision import Decision
from tlora.scheduler.group_index import View
from tlora.scheduler.job import Job
from tlora.scheduler.pauses import pause_for_less
from tlora.scheduler.predictions import Prediction


class _Depth(IntEnum):
    """How far a group is asked to shrink."""

    SHARE = 0
    BOUND = 1
    NOTHING = 2


_DEPTHS = tuple(_Depth)


class PreemptionPlan(NamedTuple):
    """A group that goes on with `keep` of its GPUs, at `prediction`, or that stops, without any. `gpus` come free on the node in question.

    `loss` is the value that its members lose, `pause` that of the time for which they are paused.
    """

    group_id: str
    keep: tuple[int, ...]
    prediction: Prediction | None
    gpus: int
    loss: float
    pause: float


class Offer(NamedTuple):
    """`gpus` on the node for a job, at the price of `sacrifices`."""

    node: str
    gpus: int
    sacrifices: tuple[PreemptionPlan, ...] = ()

    @property
    def loss(self) -> float:
        return sum(each.loss for each in self.sacrifices)

    @property
    def pause(self) -> float:
        return sum(each.pause for each in self.sacrifices)


def offers(decision: Decision, node: str, job: Job, most: int, without_preemption: bool = False) -> Iterator[Offer]:
    """What the node has for the job, up to `most` GPUs: those that are free, then more and more at the expense of others.

    `without_preemption`: only at the expense of groups that have more than their share.
    """
    free = len(decision.draft.free_for(node, job.least_room))
    if free:
        yield Offer(node, min(free, most))
    if free >= most:
        return
    taken: dict[str, PreemptionPlan] = {}
    settings, willing = decision.settings, None
    for depth in (_Depth.SHARE,) if without_preemption else _DEPTHS:
        if not (settings.preemption if depth is _Depth.NOTHING else settings.elastic):
            continue
        if depth is _Depth.SHARE:
            donors = decision.over_share(node)
        else:
            donors = willing = decision.givers_on(node, job) if willing is None else willing
        before = free
        for view in donors:
            if not decision.can_have([job], view.gpus):
                continue
            known = taken.get(view.group_id)
            already = known.gpus if known else 0
            more = _sacrifice(decision, view, node, most - free + already, depth)
            if more is not None and more.gpus > already:
                taken[view.group_id] = more
                free += more.gpus - already
            if free >= most:
                break
        if free > before:
            yield Offer(node, min(free, most), _needed(taken, free, most))
        if free >= most:
            return


def apply(decision: Decision, sacrifices: tuple[PreemptionPlan, ...]) -> list[Job]:
    """Make them. Returns the jobs that have no group any more."""
    stopped: list[Job] = []
    for each in sacrifices:
        jobs = decision.view(each.group_id).jobs
        if each.prediction is None:
            decision.stop(each.group_id)
            stopped += jobs
        else:
            decision.change(each.group_id, jobs, each.keep, each.prediction)
    return stopped


def stop_of(decision: Decision, view: View, gpus: int) -> PreemptionPlan:
    """That the group stops, of which so many GPUs are of use."""
    pause = decision.urgency_of(view) * len(view.jobs) * decision.settings.moves.restart_seconds
    return PreemptionPlan(view.group_id, (), None, gpus, decision.worth(view), pause)


def _sacrifice(decision: Decision, view: View, node: str, wanted: int, depth: _Depth) -> PreemptionPlan | None:
    """What the group gives of its GPUs on the node, `wanted` of them or as many as it can. One on several nodes gives whole nodes."""
    node_of, wide = decision.state.pool.node_of, len(view.nodes) > 1
    if len(view.gpus) == 1 and depth is not _Depth.NOTHING:
        return None
    here = tuple([gpu for gpu in view.gpus if node_of[gpu] == node]) if wide else view.gpus
    if depth is _Depth.NOTHING:
        return stop_of(decision, view, len(here))
    least = max(1, decision.share(view)) if depth is _Depth.SHARE else 1
    for count in [len(here)] if wide else range(min(wanted, len(here) - least), 0, -1):
        keep = tuple([gpu for gpu in view.gpus if gpu not in here]) if wide else here[: len(here) - count]
        if len(keep) < least:
            continue
        prediction = decision.predict(view.jobs, len(keep), decision.state.pool.num_nodes(keep) if wide else 1, view.kind)
        if prediction is not None:
            loss = decision.worth(view) - decision.value(view.jobs, prediction.slowdowns)
            return PreemptionPlan(view.group_id, keep, prediction, count, loss, pause_for_less(decision, view))
    return None


def _needed(taken: dict[str, PreemptionPlan], free: int, most: int) -> tuple[PreemptionPlan, ...]:
    """The sacrifices without those that are not needed after others have given more."""
    needed: list[PreemptionPlan] = []
    for each in taken.values():
        if free - each.gpus >= most:
            free -= each.gpus
        else:
            needed.append(each)
    return tuple(needed)
