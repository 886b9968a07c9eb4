"""For how long the jobs of a group stand still when its GPUs change, as `shape/moves.py` has it."""

from __future__ import annotations

from tlora.scheduler.decision import Decision
from tlora.scheduler.group_index import View
from tlora.shape.moves import can_change


def changes_in_place(decision: Decision, view: View, nodes: int) -> bool:
    """Whether its jobs train on while it gets more GPUs or gives some up. `nodes`: on which all of them lie."""
    state = decision.state
    return can_change(view.gpus, view.gpus, nodes, state.cost.is_whole(view.group.base_model, state.memory.of(view.gpus)))


def pause_for_less(decision: Decision, view: View) -> float:
    """The value of the time for which its members stand still if it gives up some of its GPUs."""
    moves, in_place = decision.settings.moves, changes_in_place(decision, view, view.num_nodes)
    return decision.urgency_of(view) * len(view.jobs) * (moves.change_seconds(grows=False) if in_place else moves.restart_seconds)
