"""Finds the characters of a rendered chat that the model has to write itself, turn by turn.

A template says nowhere which part of its output is which message, so each trained turn is found by comparing renderings in which
placeholders stand for the texts (so that no text can be taken for another):

- it begins where the generation prompt ends: the chat before the turn, rendered with `add_generation_prompt`;
- it ends where the chat that is cut after the turn ends, as far as the whole chat says the same there.

What lies between is the turn's own, except the text of other messages (a tool's result within the turn). The outcome is a `Plan`; it is
believed only if the texts put back for the placeholders give the real rendering, character by character.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from tlora.data.chat_template import RenderError, Template, Tools, render_messages
from tlora.data.examples import Chat, Message
from tlora.data.turn_marks import Marked, common_prefix, common_suffix, forms, last_mark, mark_message, marker_at, markers_in, marks_in

Range = tuple[int, int]
_MOST_PLANS = 512
_MODES = ("enable_thinking", "thinking")  # what well-known templates call the switch that changes their generation prompt


class LostTurnError(Exception):
    """The place of a trained turn cannot be told; the text says of which turn, and why."""


@dataclass(frozen=True)
class Plan:
    """A chat rendered with placeholders, and where its trained turns are in it."""

    text: str
    ranges: dict[int, list[Range]]  # by message: what is trained of it
    added: str = ""  # a stop token after the last turn, where the template leaves it to the next turn's header
    unstopped: str | None = None  # of a turn without a trained stop token: the token that ends it instead, or ""


@dataclass(frozen=True)
class _World:
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


def find_turns(template: Template, chat: Chat, full: str) -> tuple[str, list[tuple[int, int, float]], str | None]:
    """`full`, the rendering of `chat`, with a stop token added where the template leaves out the last; the trained characters with their
    weights; and what `Plan.unstopped` says. Raises LostTurnError.
    """
    reason: LostTurnError | None = None
    for deep in (True, False):  # a template may look into a thought or an argument, which then has to stay as it is
        pairs = [mark_message(i, message, deep) for i, message in enumerate(chat.messages)]
        try:
            plan, spans = _fitting_plan(template, chat, pairs, full)
        except (LostTurnError, RenderError) as error:
            reason, spans = error if isinstance(error, LostTurnError) else reason, None
        else:
            if spans is not None:
                return full + plan.added, spans, plan.unstopped
        if not any(kind[0] in "AT" for _, values in pairs for kind in values):
            break  # nothing was replaced deeply
    world = _World(template, chat.messages, chat.tools, chat.template_kwargs, full)
    try:
        plan = _plan_by_prefixes(world, chat.weights)
    except LostTurnError as error:
        raise reason or error from None
    spans = [(start, end, chat.weights[i]) for i, ranges in plan.ranges.items() for start, end in ranges]
    return full + plan.added, spans, plan.unstopped


def _fitting_plan(
    template: Template, chat: Chat, pairs: Sequence[tuple[Message, Mapping[str, str]]], full: str
) -> tuple[Plan, list[tuple[int, int, float]] | None]:
    """The plan of a chat with these placeholders, made once for all chats that share it, and its place in `full`, if it has one."""
    marked, values = [message for message, _ in pairs], [value for _, value in pairs]
    trained = [i for i, weight in enumerate(chat.weights) if weight]
    key = json.dumps([marked, chat.tools, trained, chat.template_kwargs], default=str)
    plan = template.plans.get(key)
    if plan is not None and (spans := _fit(plan, values, full + plan.added, chat.weights)) is not None:
        return plan, spans  # else made anew: it may be of yesterday, and templates write dates
    world = _World(template, marked, chat.tools, chat.template_kwargs)
    plan = _make_plan(replace(world, text=render_messages(template, marked, chat.tools, chat.template_kwargs)), trained)
    if len(template.plans) >= _MOST_PLANS:
        template.plans.clear()
    template.plans[key] = plan
    return plan, _fit(plan, values, full + plan.added, chat.weights)


def _make_plan(world: _World, trained: Sequence[int]) -> Plan:
    ranges: dict[int, list[Range]] = {}
    for i in trained:
        assistant = world.messages[i]["role"] == "assistant"
        ranges[i] = _own_ranges(world, i) if assistant else _contents(world, i)
    return _with_stops(Plan(world.text, ranges), world)


def _contents(world: _World, index: int) -> list[Range]:
    """Of a turn that is trained although the model does not write it: its text alone."""
    content = str(world.messages[index]["content"])
    lead, trail = content[: len(content) - len(content.lstrip())], content[len(content.rstrip()) :]
    found: list[Range] = []
    for mark in marks_in(world.text):
        if mark.index == index and mark.kind == "C":
            start = mark.start - len(lead) if world.text.endswith(lead, 0, mark.start) else mark.start
            found.append((start, mark.end + len(trail) if world.text.startswith(trail, mark.end) else mark.end))
    if not found:
        raise LostTurnError(f"message {index + 1} ({world.messages[index]['role']}) is not written")
    return found


def _own_ranges(world: _World, index: int) -> list[Range]:
    """What the model writes of the assistant's turn `index`, in the rendering with placeholders."""
    name = f"turn {index + 1} (assistant)"
    before = world.render(world.messages[:index], prompted=True) or world.render(world.messages[:index])
    cut = world.render(world.messages[: index + 1])
    base = last_mark(before or "")
    if base is None:
        at_text, at_cut, tail = 0, 0, before or ""
    else:
        mark, count = base
        at_text, at_cut = _after(world.text, mark.text, count), _after(cut, mark.text, count) if cut else 0
        tail = (before or "")[mark.end :]
    if at_text is None or at_cut is None:
        raise LostTurnError(f"{name}: the template moves or drops the text before it")
    start = at_text + _opening(world, index, world.text[at_text:], tail, base)
    if (header := world.template.generation_prompt) and world.text.startswith(header, start):
        start += len(header)  # the prompt leaves it out after a tool's result, and it is no answer
    if cut is None:
        ranges = _ranges_by_end(world, index, start)
    else:
        ranges = _shared_ranges(world, index, start, (cut, at_cut, at_text))
    foreign = next((m for a, b in ranges for m in marks_in(world.text, a, b) if m.index != index), None)
    if foreign is not None:
        raise LostTurnError(f"{name}: the template writes text of message {foreign.index + 1} within it")
    return ranges


def _after(text: str, mark: str, count: int) -> int | None:
    """Where the `count`th occurrence of a placeholder ends."""
    position = 0
    for _ in range(count):
        found = text.find(mark, position)
        if found < 0:
            return None
        position = found + len(mark)
    return position


def _opening(world: _World, index: int, gap: str, tail: str, base: tuple[Marked, int] | None) -> int:
    """How many characters of `gap`, the text from the last placeholder before the turn, the generation prompt has written already."""
    template, earlier = world.template, world.messages[:index]
    own = next((mark.start for mark in marks_in(gap) if mark.index == index), len(gap))
    if template.generation_prompt and (tail or base) and gap.startswith(tail):
        return len(tail)
    if own == 0 and gap:
        return 0  # it goes on where the last text ended
    source = template.text()
    for mode in (name for name in _MODES if name in source):
        for value in (False, True):
            prompt = world.render(earlier, prompted=True, **{mode: value}) or ""
            other = prompt[last.end :] if (last := (last_mark(prompt) or (None, 0))[0]) else prompt
            if other and gap.startswith(other):
                return len(other)
    if template.generation_prompt and (found := gap.find(template.generation_prompt, 0, own)) >= 0:
        return found + len(template.generation_prompt)
    # The prompt opens another way than this turn does (a thought that it does not have): what a plain answer's header has is the header.
    plain = world.render([*earlier, mark_message(index, {"role": "assistant", "content": "x"}, False)[0]])
    if plain is not None:
        position = _after(plain, base[0].text, base[1]) if base else 0
        answer = next((mark.start for mark in marks_in(plain) if mark.index == index), None)
        if position is not None and answer is not None and position <= answer:
            header = plain[position:answer]
            shared = len(header) if gap.startswith(header) else max(common_prefix(template, other, gap) for other in (header, tail))
            if shared:
                return shared
    elif not world.messages[index].get("tool_calls") and own < len(gap):
        return own
    raise LostTurnError(f"turn {index + 1} (assistant): its beginning cannot be told from the template's header")


def _shared_ranges(world: _World, index: int, start: int, places: tuple[str, int, int]) -> list[Range]:
    """What the chat cut after the turn and the whole chat have in common from `start` on, and from each of the turn's placeholders on."""
    cut, at_cut, at_text = places
    template, text = world.template, world.text
    shared = common_prefix(template, cut[at_cut:], text[at_text:])
    at_cut, at_text = at_cut + shared, at_text + shared
    ranges: list[Range] = [(start, at_text)] if at_text > start else []
    at_text = max(at_text, start)
    for mark in marks_in(cut, at_cut):
        if mark.index != index or mark.start < at_cut:
            continue
        found = _same_mark(template, mark, cut, at_text, text)
        if found is None:
            continue  # the template drops this part where messages follow
        own = all(other.index == index for other in marks_in(text, at_text, found))
        back = common_suffix(template, cut[: mark.start], text[at_text:found]) if not own else 0
        shared = common_prefix(template, cut[mark.start :], text[found:])
        at_cut, at_text = mark.start + shared, found + shared
        if own:
            begin = ranges.pop()[0] if ranges else start
        else:
            begin = found - back
        ranges.append((begin, at_text))
    return _closed(world, index, ranges, cut[at_cut:])


def _same_mark(template: Template, mark: Marked, cut: str, position: int, text: str) -> int | None:
    """The place of the turn's own placeholder in the whole chat. A call's name may stand in the tool's result too, behind other words."""
    while (found := text.find(mark.text, position)) >= 0:
        if mark.kind != "N" or common_suffix(template, cut[: mark.start].rstrip(), text[:found].rstrip()):
            return found
        position = found + len(mark.text)
    return None


def _closed(world: _World, index: int, ranges: list[Range], rest: str) -> list[Range]:
    """The ranges with the last one's end settled; `rest` is what the cut chat has after the common text."""
    name, text, template = f"turn {index + 1} (assistant)", world.text, world.template
    own = [mark for a, b in ranges for mark in marks_in(text, a, b) if mark.index == index and mark.kind != "T"]
    if not own:
        raise LostTurnError(f"{name}: neither its text nor its calls are written as they are")
    begin, end = ranges[-1]
    closing = text[max(own[-1].end, begin) : end]
    calls = bool(world.messages[index].get("tool_calls"))
    if not markers_in(template, closing) and (first := marker_at(template, rest)):
        # The chat's last turn ends in another mark than earlier ones do: take this one's, if a header still follows it.
        other = marker_at(template, text[end:])
        if other and other != first:
            after = text[end:].find(other) + len(other)
            header = text[end + after :]
            if markers_in(template, header[: next((mark.start for mark in marks_in(header)), len(header))]):
                end, closing, rest = end + after, closing + text[end : end + after], rest[rest.find(first) + len(first) :]
    words = rest
    for marker in markers_in(template, rest):
        words = words.replace(marker, "", 1)
    if calls and words.strip():
        raise LostTurnError(f"{name}: the template writes its calls otherwise once a message follows them")
    kept = closing.rstrip() or closing
    return [*ranges[:-1], (begin, end - len(closing) + len(kept))]


def _ranges_by_end(world: _World, index: int, start: int) -> list[Range]:
    """For templates that do not write a chat which ends with this turn: up to the one end-of-turn mark before the next message."""
    text, end_of_turn = world.text, world.template.end_of_turn
    stop = next((mark.start for mark in marks_in(text, start) if mark.index != index), len(text))
    if not end_of_turn or text.count(end_of_turn, start, stop) != 1:
        raise LostTurnError(f"turn {index + 1} (assistant): the template refuses a chat that ends with it, so its end cannot be told")
    if not any(mark.index == index for mark in marks_in(text, start, stop)):
        raise LostTurnError(f"turn {index + 1} (assistant): neither its text nor its calls are written as they are")
    return [(start, text.index(end_of_turn, start, stop) + len(end_of_turn))]


# --- the stop token ---


def _with_stops(plan: Plan, world: _World) -> Plan:
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
        extra, missing = _stop(world.template, closing, rest)
        if extra:
            added = plan.text[end:] and "" if end + len(extra) <= len(plan.text) else extra[len(plan.text) - end :]
            ranges[i] = [*own[:-1], (begin, end + len(extra))]
        unstopped = missing if missing is not None else unstopped
    return replace(plan, text=plan.text + added, ranges=ranges, added=added, unstopped=unstopped)


def _next_header(world: _World, text: str, mark: Marked | None, end: int) -> str:
    """What would follow the last turn: the header of a tool's result after calls, else of a user's message."""
    index = len(world.messages)
    calls = cast("list[dict[str, object]]", world.messages[-1].get("tool_calls") or [])
    after: Message = {"role": "tool", "content": "x"} if calls else {"role": "user", "content": "x"}
    if calls and "id" in calls[0]:
        after["tool_call_id"] = calls[0]["id"]
    longer = world.render([*world.messages, mark_message(index, after, False)[0]]) or ""
    start = mark.end if mark else 0
    position = _after(longer, mark.text, text.count(mark.text, 0, start)) if mark else 0
    if position is None or not longer.startswith(text[start:end], position):
        return ""
    position += end - start
    return longer[position : next((found.start for found in marks_in(longer, position)), position)]


def _stop(template: Template, closing: str, rest: str) -> tuple[str, str | None]:
    """What to add from `rest` to a turn that closes with `closing`; and what ends the turn where that is no stop token."""
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


# --- from the rendering with placeholders to the real one ---


def _fit(plan: Plan, values: Sequence[Mapping[str, str]], full: str, weights: Sequence[float]) -> list[tuple[int, int, float]] | None:
    """The trained characters of `full`; None unless the texts put back for the placeholders give it."""
    marks = marks_in(plan.text)
    edges, places = [0], [0]  # offsets in the plan's text, and the same places in `full`
    position, literal = 0, 0
    for mark, after in zip(marks, [*marks[1:], None], strict=True):
        size = mark.start - literal
        if not full.startswith(plan.text[literal : mark.start], position):
            return None
        position += size
        behind = plan.text[mark.end : after.start if after else len(plan.text)]
        known = forms(values[mark.index][mark.kind])
        value = next((text for text in known if full.startswith(text, position) and full.startswith(behind, position + len(text))), None)
        if value is None:
            return None
        edges += [mark.start, mark.end]
        places += [position, position + len(value)]
        position, literal = position + len(value), mark.end
    if full[position:] != plan.text[literal:]:
        return None

    def place(offset: int) -> int:
        at = bisect_right(edges, offset) - 1
        return places[at] + offset - edges[at]

    return [(place(start), place(end), weights[i]) for i, ranges in plan.ranges.items() for start, end in ranges]


def _plan_by_prefixes(world: _World, weights: Sequence[float]) -> Plan:
    """For templates that look into contents: the chat cut before and after each trained turn, as far as it is how the whole chat begins."""
    ranges: dict[int, list[Range]] = {}
    for i, message in enumerate(world.messages):
        if not weights[i]:
            continue
        name, prompted = f"turn {i + 1} ({message['role']})", message["role"] == "assistant"
        opened, closed = world.render(world.messages[:i], prompted=prompted) or "", world.render(world.messages[: i + 1])
        if closed is None or not world.text.startswith(opened) or (i and not opened):
            raise LostTurnError(f"{name}: the template rewrites what stands before it")
        end = common_prefix(world.template, closed, world.text)
        words = closed[end:]
        for marker in markers_in(world.template, words):
            words = words.replace(marker, "", 1)
        if words.strip() or end <= len(opened):
            raise LostTurnError(f"{name}: the template writes it otherwise once messages follow")
        if message["content"] and world.render([*world.messages[:i], message | {"content": f"{message['content']} x"}]) == closed:
            raise LostTurnError(f"{name}: its text is not written")
        start, body = len(opened), world.text[len(opened) : end]
        end = start + len(body.rstrip() if world.template.end_of_turn.strip() else body)
        if not (prompted and world.template.generation_prompt and i):  # a header stands before the content, and must not be trained
            written, content = world.text[start:end].removesuffix(world.template.end_of_turn).rstrip(), str(message["content"]).strip()
            if not written.endswith(content) or message.get("tool_calls"):
                raise LostTurnError(f"{name}: its text is not written as it is")
            start += len(written) - len(content)
            end = end if prompted else start + len(content)
        ranges[i] = [(start, end)]
    return _with_stops(Plan(world.text, ranges), world)
