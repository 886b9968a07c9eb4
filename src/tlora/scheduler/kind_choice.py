"""GPUs of which kind a job takes, where there are several, and groups that move to faster ones that nobody else can use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tlora.scheduler.decision import Decision
from tlora.scheduler.group_index import View
from tlora.scheduler.growth import is_worth_it
from tlora.scheduler.job import Job
from tlora.scheduler.predictions import Prediction


def kind_on(decision: Decision, nodes: Iterable[str]) -> str:
    """The slowest kind of GPU on `nodes`; "" where there is but one."""
    state = decision.state
    return state.kinds.slowest([gpu for name in nodes for gpu in state.pool.nodes[name].gpus]) if state.kinds.differ else ""


def take_free(decision: Decision, job: Job, sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Free GPUs for the job to begin on by itself, which are then taken: as many as the last of `sizes`; None where there are none.

    Where there are several kinds, of one of them: as many as make its steps shortest. Of those with which they are as short, but for the
    least share that growth is for, the fewest and of the slowest kind, as others gain more on the faster ones.
    """
    draft, kinds = decision.draft, decision.state.kinds
    if not kinds.differ:
        return draft.allocate_for(job, sizes[-1])
    found = [
        (own.slowdowns[0], size, kinds.speeds[kind], kind)
        for kind in kinds.fastest_first()
        for size in sizes
        if (own := decision.predict([job], size, kind=kind)) is not None
    ]
    while found:
        most = min(slowdown for slowdown, *_ in found) * (1 + decision.settings.growth_gain)
        best = min([way for way in found if way[0] <= most], key=lambda way: way[1:])
        if (gpus := draft.allocate_for(job, best[1], best[3])) is not None:
            return gpus
        found.remove(best)
    return None


def may_wait(decision: Decision, job: Job, sizes: Sequence[int]) -> bool:
    """Whether a kind of GPU on which its bounds hold on one of `sizes` has as many, free or not. Else it would wait for ever: a kind may be
    measured far slower than the reference, by which `sizes` are.
    """
    state = decision.state
    if not state.kinds.differ:
        return True
    roomy = [[gpu for gpu in node.gpus if state.memory.has_room(gpu, job.least_room)] for node in state.pool.lasting_nodes.values()]
    counts = [Counter([state.kinds.kind_of.get(gpu, "") for gpu in gpus]) for gpus in roomy]
    hold = max if job.spec.on_one_host else sum
    most = {kind: hold([own[kind] for own in counts]) for kind in state.kinds.speeds} if counts else {}
    return any(size <= own and decision.predict([job], size, kind=kind) is not None for kind, own in most.items() for size in sizes)


class _Faster(NamedTuple):
    """`won` is the value that a group has more on as many GPUs of another kind."""

    won: float
    view: View
    prediction: Prediction
    gpus: tuple[int, ...]


def speed_up(decision: Decision) -> None:
    """Move the group that gains most by it to as many free GPUs of a faster kind, on one node, if that is worth a move; then the next."""
    if decision.state.kinds.differ and not decision.reservations:  # or GPUs that are kept for a job that waits might go
        while (best := _best(decision)) is not None:
            decision.stop(best.view.group_id)
            decision.draft.take(best.gpus)
            decision.open(best.view.jobs, best.gpus)


def _best(decision: Decision) -> _Faster | None:
    free = {name: decision.draft.free_of(name) for name in decision.nodes_with_free() if name not in decision.state.pool.draining}
    views = {view.group_id: view for node in decision.nodes_to_try() for view in decision.groups_on(node) if decision.rested(view)}
    ways = [way for view in views.values() for node in free if (way := _way(decision, view, node)) is not None]
    return max(ways, key=lambda way: (way.won, way.view.group_id), default=None)


def _way(decision: Decision, view: View, node: str) -> _Faster | None:
    kinds, least = decision.state.kinds, max([job.least_room for job in view.jobs])
    for kind in kinds.fastest_first():
        if kinds.speeds[kind] <= kinds.speeds[view.kind]:
            return None
        gpus = tuple(decision.draft.free_for(node, least, kind)[: len(view.gpus)])
        prediction = decision.predict_on(view.jobs, gpus) if len(gpus) == len(view.gpus) else None
        if prediction is None or not is_worth_it(decision, view, prediction.slowdowns):
            continue
        won = decision.value(view.jobs, prediction.slowdowns) - decision.worth(view)
        return _Faster(won, view, prediction, gpus) if won > 0 else None
    return None
