"""`{% generation %}` in a chat template: the author marks what the model writes, and these marks decide what is trained, as in TRL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tlora.data.chat_template import RenderError, render_generation
from tlora.data.turn_marks import marks_in
from tlora.data.turn_plan import LostTurnError, Plan, Range, World, find_stop, written_text


def plan_by_marks(world: World, trained: Sequence[int]) -> Plan:
    """A block belongs to the assistant's turn whose placeholder it holds; without one (a thought, say), to that whose text comes next."""
    ranges: dict[int, list[Range]] = {}
    for start, end in _blocks(world):
        marks = marks_in(world.text, start, end) or marks_in(world.text, start)[:1]
        turns = {mark.index for mark in marks if world.messages[mark.index]["role"] == "assistant"}
        if len(turns) != 1:
            raise LostTurnError("what the template marks with {% generation %} is not the text of one turn")
        ranges.setdefault(turns.pop(), []).append((start, end))
    ranges |= {i: written_text(world, i) for i in trained if world.messages[i]["role"] != "assistant"}
    return _with_marked_stops(Plan(world.text, {i: ranges[i] for i in trained if i in ranges}), world)


def plan_by_marks_alone(world: World, weights: Sequence[float]) -> Plan:
    """For templates that inspect contents, so that no placeholder can replace them: block by block if each turn has one, and all alike
    if each turn has the same weight.
    """
    turns, blocks = [i for i, message in enumerate(world.messages) if message["role"] == "assistant"], _blocks(world)
    if any(weight for i, weight in enumerate(weights) if i not in turns):
        raise LostTurnError("the template marks what the model writes, and a turn of another role is to be trained")
    for i in turns:
        message = world.messages[i]
        other = [*world.messages[:i], message | {"content": f"{message['content']} x"}, *world.messages[i + 1 :]]
        if weights[i] and message["content"] and world.render(other) == world.text:
            raise LostTurnError(f"turn {i + 1} (assistant): its text is not written")
    if len(blocks) == len(turns):
        ranges = {i: [block] for i, block in zip(turns, blocks, strict=True) if weights[i]}
    elif len({weights[i] for i in turns}) == 1:
        ranges = {turns[-1]: blocks}
    else:
        blocks_said = "1 block" if len(blocks) == 1 else f"{len(blocks)} blocks"
        raise LostTurnError(f"the template marks {blocks_said} as generated for {len(turns)} turns, of which some are not trained")
    return _with_marked_stops(Plan(world.text, ranges), world)


def _blocks(world: World) -> list[Range]:
    try:
        text, blocks = render_generation(world.template, world.messages, world.tools, world.kwargs)
    except RenderError as error:
        raise LostTurnError(str(error)) from error
    if text != world.text:
        raise LostTurnError("the template writes another text each time")
    if not blocks:
        raise LostTurnError("the template marks with {% generation %} what the model writes, and marks nothing of this chat")
    return blocks


def _with_marked_stops(plan: Plan, world: World) -> Plan:
    """The plan, with what ends a turn in which no stop token is marked. Nothing is trained that is not marked."""
    unstopped = None
    for i, own in plan.ranges.items():
        if world.messages[i]["role"] == "assistant":
            missing = find_stop(world.template, plan.text[own[-1][0] : own[-1][1]], "")[1]
            unstopped = missing if missing is not None else unstopped
    return replace(plan, unstopped=unstopped)
