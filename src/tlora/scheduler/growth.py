"""Uses GPUs that no waiting job can use now: groups grow onto them, move to them, or part with a member.

Growth is revocable: what a group has beyond its share is the first that `reclaim.py` takes back. Nothing is done for less than a
share of the step, nor for less than it costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tlora.scheduler.decision import Decision
from tlora.scheduler.group_index import View
from tlora.scheduler.pauses import changes_in_place
from tlora.scheduler.predictions import Prediction

_MOST_SPREAD = 4  # groups that go to other nodes in one decision


def grow(decision: Decision) -> None:
    """Groups fill their own nodes, then they spread to others."""
    for node in decision.nodes_with_free():
        growing = decision.index.growing_on(node)
        if growing:
            _fill(decision, node, growing.values())
    for _ in range(_MOST_SPREAD):
        if not _spread(decision):
            return


def is_worth_it(decision: Decision, view: View, after: Sequence[float], in_place: bool = False) -> bool:
    """Whether steps get shorter by the least share on average, and the time saved exceeds (1 + h) * members * the time of a move. With
    `in_place` the group trains on until the base is on the GPUs that it gets of its node, where kernels are compiled, and its members then
    stand still for a moment.
    """
    settings, moves = decision.settings, decision.settings.moves
    if sum(after) > (1 - settings.growth_gain) * sum(view.slowdowns):
        return False
    pause, delay = (moves.change_seconds(grows=True), moves.warm_start_seconds) if in_place else (moves.restart_seconds, 0.0)
    return decision.seconds_saved(view.jobs, view.slowdowns, after, delay) > (1 + settings.hysteresis) * len(view.jobs) * pause


def _wider(decision: Decision, view: View) -> tuple[tuple[int, Prediction], ...]:
    """Numbers of GPUs beyond its own on which steps are shorter by the least share, rising, regardless of their worth elsewhere."""
    if view.wider is None:
        most = (1 - decision.settings.growth_gain) * sum(view.slowdowns)
        predictions = [
            (gpus, decision.predict(view.jobs, gpus, kind=view.kind)) for gpus in decision.sizes(view.jobs) if gpus > len(view.gpus)
        ]
        view.wider = tuple(
            [(gpus, prediction) for gpus, prediction in predictions if prediction is not None and sum(prediction.slowdowns) <= most]
        )
    return view.wider


# -- within the node -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Grower:
    """A group that shall have `gpus` GPUs, with which it is worth `value`."""

    view: View
    most: int
    gpus: int
    value: float


def _fill(decision: Decision, node: str, growing: Iterable[View]) -> None:
    """Give the node's free GPUs, one after another or a few at a time, to the group for which each is worth most."""
    views = [view for view in growing if len(view.nodes) == 1 and decision.rested(view) and view.group_id not in decision.touched]
    free = len(decision.draft.free_of(node))
    views = [view for view in views if decision.can_have(view.jobs, decision.draft.free_of(node))]
    if not any(wider and wider[0][0] <= len(view.gpus) + free for view in views if (wider := _wider(decision, view))):
        return
    growers = [_Grower(view, view.most_useful, 0, 0.0) for view in sorted(views, key=lambda view: min(view.gpus))]
    while growers:
        for grower in growers:
            grower.gpus, grower.value = len(grower.view.gpus), decision.worth(grower.view)
        _share_out(decision, growers, len(decision.draft.free_of(node)))
        grown = [grower for grower in growers if grower.gpus > len(grower.view.gpus)]
        in_vain = [grower for grower in grown if not _grow_to(decision, node, grower)]
        if not in_vain:
            return
        growers = [grower for grower in growers if grower not in grown]


def _grow_to(decision: Decision, node: str, grower: _Grower) -> bool:
    """Let it have its GPUs, if that is worth what it costs."""
    view = grower.view
    prediction = decision.predict(view.jobs, grower.gpus, 1, view.kind)
    in_place = changes_in_place(decision, view, 1)
    if prediction is None or not is_worth_it(decision, view, prediction.slowdowns, in_place):
        return False
    gpus = tuple(sorted((*view.gpus, *decision.draft.free_of(node)[: grower.gpus - len(view.gpus)])))
    decision.change(view.group_id, view.jobs, gpus, decision.predict_on(view.jobs, gpus) or prediction)
    return True


def _share_out(decision: Decision, growers: Sequence[_Grower], free: int) -> None:
    while free:
        steps = [(step, grower) for grower in growers if (step := _next_step(decision, grower, free)) is not None]
        if not steps:
            return
        (_, more, value), best = max(steps, key=lambda each: (each[0][0], each[1].view.group_id))
        best.gpus += more
        best.value = value
        free -= more


def _next_step(decision: Decision, grower: _Grower, free: int) -> tuple[float, int, float] | None:
    """How many more GPUs are worth most for each, if any are worth something: worth of each, number, value with them."""
    best: tuple[float, int, float] | None = None
    for more in range(1, min(free, grower.most - grower.gpus) + 1):
        prediction = decision.predict(grower.view.jobs, grower.gpus + more, 1, grower.view.kind)
        if prediction is None:
            continue
        value = decision.value(grower.view.jobs, prediction.slowdowns)
        each = (value - grower.value) / more
        if each > 0 and (best is None or each > best[0]):
            best = each, more, value
    return best


# -- to other nodes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wider:
    """A group on more GPUs: its own and those of `nodes`, or with `moves` on the latter alone. `worth` is the value won for each GPU."""

    worth: float
    view: View
    prediction: Prediction
    gpus: int
    nodes: tuple[str, ...]
    moves: bool


def _spread(decision: Decision) -> bool:
    """Let the group for which it is worth most have free GPUs on other nodes. Whether there was one."""
    growing = [view for node in decision.nodes_to_try() for view in decision.index.growing_on(node).values() if _wider(decision, view)]
    everywhere = [gpu for node in decision.nodes_with_free() for gpu in decision.draft.free_of(node)]
    growing = [view for view in growing if decision.can_have(view.jobs, everywhere)]
    candidates = {view.group_id: view for view in growing if decision.rested(view) and view.group_id not in decision.touched}
    if not candidates:
        return False
    free = {name: len(decision.draft.free_of(name)) for name in decision.nodes_with_free()}
    options = [option for view in candidates.values() for option in _options(decision, view, free)]
    if not options:
        return False
    best = max(options, key=lambda option: (option.worth, option.view.group_id))
    view, nodes = best.view, best.nodes
    if best.moves:
        decision.stop(view.group_id)
    kept = () if best.moves else view.gpus
    more = [gpu for name in nodes for gpu in decision.draft.free_of(name)][: best.gpus - len(kept)]
    if best.moves:
        decision.draft.take(more)
        decision.open(view.jobs, tuple(more))
    else:
        decision.change(view.group_id, view.jobs, tuple(sorted((*kept, *more))), best.prediction)
    return True


def _options(decision: Decision, view: View, free: dict[str, int]) -> list[_Wider]:
    """Ways to have more GPUs than now that are worth it."""
    size, count, own = decision.node_size, len(view.gpus), view.nodes
    whole = [name for name, spare in free.items() if spare == size and name not in own]
    fills_nodes = count == view.num_nodes * size
    tried: list[tuple[int, Prediction, tuple[str, ...], bool]] = []
    for gpus, prediction in _wider(decision, view):
        more = gpus // size - view.num_nodes
        if gpus <= size:
            roomy = min(((spare, name) for name, spare in free.items() if name not in own and spare >= gpus), default=None)
            if roomy is not None:
                tried.append((gpus, prediction, (roomy[1],), True))
        elif fills_nodes and gpus % size == 0 and len(whole) >= more:
            tried.append((gpus, prediction, tuple(whole[:more]), False))
        elif len(whole) >= decision.nodes_for(gpus):
            tried.append((gpus, prediction, tuple(whole[: decision.nodes_for(gpus)]), True))
    options: list[_Wider] = []
    for gpus, prediction, nodes, moves in tried:
        if decision.state.kinds.differ:  # the least that it may have there
            own = () if moves else view.gpus
            there = decision.predict(view.jobs, gpus, kind=decision.state.kinds.slowest([*own, *_gpus_of(decision, nodes)]))
            if there is None:
                continue
            prediction = there
        if not is_worth_it(decision, view, prediction.slowdowns):
            continue
        worth = (decision.value(view.jobs, prediction.slowdowns) - decision.worth(view)) / (gpus - count)
        if worth > 0:
            options.append(_Wider(worth, view, prediction, gpus, nodes, moves))
    return options


def _gpus_of(decision: Decision, nodes: Iterable[str]) -> list[int]:
    return [gpu for name in nodes for gpu in decision.state.pool.nodes[name].gpus]


# -- out of a group ------------------------------------------------------------------------------------------------------


def part(decision: Decision) -> None:
    """Move a member of a shared group onto free GPUs of its own if it is faster there by more than the move costs: one member of each group
    in a decision. While no job waits, its group need not have rested: the others miss no step, and it may have joined while no other GPU
    was free.
    """
    room: int | None = None
    at_once: bool | None = None
    for name in list(decision.index.shared()):
        view = decision.view(name)
        if name in decision.touched:
            continue
        if not decision.rested(view):
            if at_once is None:
                at_once = not decision.draft.leaves_somebody_waiting()
            if not at_once:
                continue
        if room is None:
            room = max([len(decision.draft.free_of(node)) for node in decision.nodes_with_free()], default=0)
        if not room:
            return
        ways = [way for index in range(len(view.jobs)) if (way := _way_out(decision, view, index, room)) is not None]
        if ways and _let_go(decision, view, max(ways, key=lambda way: (way.won, -way.index))):
            room = None


@dataclass(frozen=True, slots=True)
class _WayOut:
    """Member number `index` goes to `gpus` GPUs of its own, the others stay at `rest`. `won` is the value that this has."""

    won: float
    index: int
    gpus: int
    rest: Prediction


def _way_out(decision: Decision, view: View, index: int, room: int) -> _WayOut | None:
    job, others = view.jobs[index], view.jobs[:index] + view.jobs[index + 1 :]
    gpus = max((gpus for gpus in decision.sizes_alone(job) if gpus <= room), default=0)
    alone = decision.predict([job], gpus) if gpus else None
    rest = decision.predict_on(others, view.gpus)
    if rest is None or alone is None:
        return None
    after = [*rest.slowdowns[:index], *alone.slowdowns, *rest.slowdowns[index:]]
    if not is_worth_it(decision, view, after):
        return None
    won = decision.value(view.jobs, after) - decision.worth(view)
    return _WayOut(won, index, gpus, rest) if won > 0 else None


def _let_go(decision: Decision, view: View, way: _WayOut) -> bool:
    """False where the GPUs that are free have too little room for it."""
    job = view.jobs[way.index]
    gpus = decision.draft.allocate_for(job, way.gpus)
    if gpus is None:
        return False
    others = view.jobs[: way.index] + view.jobs[way.index + 1 :]
    decision.change(view.group_id, others, view.gpus, way.rest)
    decision.open([job], gpus)
    return True
