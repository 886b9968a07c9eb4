"""Which parts of a rendered chat are trained, and whether each trained turn ends in a stop token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from tlora.data.chat_template import RenderError, Template, Tools, render_messages
from tlora.data.examples import Message
from tlora.data.turn_marks import Marked, mark_message, marker_at, markers_in, marks_in

Range = tuple[int, int]


class LostTurnError(Exception):
    """A trained turn cannot be located; the text says which turn, and why."""


@dataclass(frozen=True)
class Plan:
    """A chat rendered with placeholders, and where its trained turns are in it."""

    text: str
    ranges: dict[int, list[Range]]  # by message: what is trained of it
    added: str = ""  # a stop token after the last turn, where the template leaves it to the next turn's header
    unstopped: str | None = None  # of a turn without a trained stop token: the token that ends it instead, or ""


@dataclass(frozen=True)
class World:
    """What all renderings of one plan share."""

    template: Template
    messages: Sequence[Message]  # with placeholders
    tools: Tools
    kwargs: Mapping[str, object]
    text: str = ""  # the rendering of all of them

    def render(self, messages: Sequence[Message], prompted: bool = False, **kwargs: object) -> str | None:
        try:
            return render_messages(self.template, messages, self.tools, {**self.kwargs, **kwargs}, prompted) if messages else None
        except RenderError:
            return None


def written_text(world: World, index: int) -> list[Range]:
    """The ranges of a turn that is trained although the model does not write it: its text alone."""
    content = str(world.messages[index]["content"])
    lead, trail = content[: len(content) - len(content.lstrip())], content[len(content.rstrip()) :]
    ranges: list[Range] = []
    for mark in marks_in(world.text):
        if mark.index == index and mark.kind == "C":
            start = mark.start - len(lead) if world.text.endswith(lead, 0, mark.start) else mark.start
            ranges.append((start, mark.end + len(trail) if world.text.startswith(trail, mark.end) else mark.end))
    if not ranges:
        raise LostTurnError(f"message {index + 1} ({world.messages[index]['role']}) is not written")
    return ranges


def end_of_mark(text: str, mark: str, count: int) -> int | None:
    """Where the `count`th occurrence of a placeholder ends."""
    position = 0
    for _ in range(count):
        start = text.find(mark, position)
        if start < 0:
            return None
        position = start + len(mark)
    return position


# --- the stop token ---


def with_stops(plan: Plan, world: World) -> Plan:
    """Let each trained assistant turn end in a stop token: its own, or the next header's first token where that is what stops it."""
    ranges, added, unstopped = dict(plan.ranges), "", plan.unstopped
    for i, own in plan.ranges.items():
        if world.messages[i]["role"] != "assistant":
            continue
        begin, end = own[-1]
        rest = plan.text[end:]
        marks = [mark for mark in marks_in(plan.text, begin, end) if mark.index == i]
        closing = plan.text[marks[-1].end if marks else begin : end]
        if i == len(world.messages) - 1 and not rest.strip():
            rest = _next_header(world, plan.text, marks[-1] if marks else None, end)
        extra, missing = find_stop(world.template, closing, rest)
        if extra:
            added = plan.text[end:] and "" if end + len(extra) <= len(plan.text) else extra[len(plan.text) - end :]
            ranges[i] = [*own[:-1], (begin, end + len(extra))]
        unstopped = missing if missing is not None else unstopped
    return replace(plan, text=plan.text + added, ranges=ranges, added=added, unstopped=unstopped)


def _next_header(world: World, text: str, mark: Marked | None, end: int) -> str:
    """The header that would follow the last turn: of a tool's result after calls, else of a user's message."""
    index = len(world.messages)
    calls = cast("list[dict[str, object]]", world.messages[-1].get("tool_calls") or [])
    after: Message = {"role": "tool", "content": "x"} if calls else {"role": "user", "content": "x"}
    if calls and "id" in calls[0]:
        after["tool_call_id"] = calls[0]["id"]
    longer = world.render([*world.messages, mark_message(index, after, False)[0]]) or ""
    start = mark.end if mark else 0
    position = end_of_mark(longer, mark.text, text.count(mark.text, 0, start)) if mark else 0
    if position is None or not longer.startswith(text[start:end], position):
        return ""
    position += end - start
    return longer[position : next((later.start for later in marks_in(longer, position)), position)]


def find_stop(template: Template, closing: str, rest: str) -> tuple[str, str | None]:
    """What to add from `rest` to a turn that closes with `closing`; and what ends the turn if that is no stop token."""
    own = markers_in(template, closing)
    if any(marker in template.stops for marker in own):
        return "", None
    following = marker_at(template, rest)
    extra = rest[: rest.find(following) + len(following)] if following else ""
    if following in template.stops:
        return extra, None
    vocabulary = template.added_tokens
    if following in vocabulary and not markers_in(template, template.end_of_turn):
        return extra, following
    return "", own[-1] if own and own[-1] in vocabulary and closing.rstrip().endswith(own[-1]) else ""
