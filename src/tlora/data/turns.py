"""Finds the characters of a rendered chat that the model has to write itself, turn by turn.

Most templates say nowhere which part of their output is which message, so each trained turn is found by comparing renderings in which
placeholders stand for the texts (so that no text can be taken for another):

- it begins where the generation prompt ends: the chat before the turn, rendered with `add_generation_prompt`;
- it ends where the chat that is cut after the turn ends, as far as the whole chat says the same there.

What lies between is the turn's own, except the text of other messages (a tool's result within the turn). The outcome is a `Plan`; it is
believed only if the texts put back for the placeholders give the real rendering, character by character.

A template with `{% generation %}` says it: there its author's marks are obeyed, as TRL does.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tlora.data.chat_template import RenderError, Template, render_generation, render_messages
from tlora.data.examples import Chat, Message
from tlora.data.turn_marks import Marked, common_prefix, common_suffix, forms, last_mark, mark_message, marker_at, markers_in, marks_in
from tlora.data.turn_plan import LostTurnError, Plan, Range, World, end_of_mark, find_stop, with_stops, written_text
from tlora.wording.numbers import quantity

_MOST_PLANS = 512
_MODES = ("enable_thinking", "thinking")  # what well-known templates call the switch that changes their generation prompt


def find_turns(template: Template, chat: Chat, full: str) -> tuple[str, list[tuple[int, int, float]], str | None]:
    """`full`, the rendering of `chat`, with a stop token added where the template leaves out the last; the trained characters with their
    weights; and what `Plan.unstopped` says. Raises LostTurnError.
    """
    reason: LostTurnError | None = None
    for deep in (True, False):  # a template may inspect a thought or an argument, which then has to stay unchanged
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
    world = World(template, chat.messages, chat.tools, chat.template_kwargs, full)
    try:
        plan = plan_by_marks_alone(world, chat.weights) if template.marks_generation else _plan_by_prefixes(world, chat.weights)
    except LostTurnError as error:
        raise (error if template.marks_generation else reason or error) from None
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
        return plan, spans  # else made again: the plan may be from yesterday, and templates write dates
    world = World(template, marked, chat.tools, chat.template_kwargs)
    plan = _make_plan(replace(world, text=render_messages(template, marked, chat.tools, chat.template_kwargs)), trained)
    if len(template.plans) >= _MOST_PLANS:
        template.plans.clear()
    template.plans[key] = plan
    return plan, _fit(plan, values, full + plan.added, chat.weights)


def _make_plan(world: World, trained: Sequence[int]) -> Plan:
    ranges: dict[int, list[Range]] = {}
    if world.template.marks_generation:
        return plan_by_marks(world, trained)
    for i in trained:
        assistant = world.messages[i]["role"] == "assistant"
        ranges[i] = _own_ranges(world, i) if assistant else written_text(world, i)
    return with_stops(Plan(world.text, ranges), world)


def _own_ranges(world: World, index: int) -> list[Range]:
    """What the model writes of the assistant's turn `index`, in the rendering with placeholders."""
    name = f"turn {index + 1} (assistant)"
    before = world.render(world.messages[:index], prompted=True) or world.render(world.messages[:index])
    cut = world.render(world.messages[: index + 1])
    base = last_mark(before or "")
    if base is None:
        at_text, at_cut, tail = 0, 0, before or ""
    else:
        mark, count = base
        at_text, at_cut = end_of_mark(world.text, mark.text, count), end_of_mark(cut, mark.text, count) if cut else 0
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


def _opening(world: World, index: int, gap: str, tail: str, base: tuple[Marked, int] | None) -> int:
    """How many characters of `gap`, the text from the last placeholder before the turn, the generation prompt has written already."""
    template, earlier = world.template, world.messages[:index]
    own = next((mark.start for mark in marks_in(gap) if mark.index == index), len(gap))
    if template.generation_prompt and (tail or base) and gap.startswith(tail):
        return len(tail)
    if own == 0 and gap:
        return 0  # it continues where the last text ended
    source = template.text()
    for mode in (name for name in _MODES if name in source):
        for value in (False, True):
            prompt = world.render(earlier, prompted=True, **{mode: value}) or ""
            other = prompt[last.end :] if (last := (last_mark(prompt) or (None, 0))[0]) else prompt
            if other and gap.startswith(other):
                return len(other)
    if template.generation_prompt and (prompt_at := gap.find(template.generation_prompt, 0, own)) >= 0:
        return prompt_at + len(template.generation_prompt)
    # The prompt opens otherwise than this turn (with a thought that it lacks): a plain answer's header is the header.
    plain = world.render([*earlier, mark_message(index, {"role": "assistant", "content": "x"}, False)[0]])
    if plain is not None:
        position = end_of_mark(plain, base[0].text, base[1]) if base else 0
        answer = next((mark.start for mark in marks_in(plain) if mark.index == index), None)
        if position is not None and answer is not None and position <= answer:
            header = plain[position:answer]
            shared = len(header) if gap.startswith(header) else max(common_prefix(template, other, gap) for other in (header, tail))
            if shared:
                return shared
    elif not world.messages[index].get("tool_calls") and own < len(gap):
        return own
    raise LostTurnError(f"turn {index + 1} (assistant): its beginning cannot be distinguished from the template's header")


def _shared_ranges(world: World, index: int, start: int, places: tuple[str, int, int]) -> list[Range]:
    """The common ranges of the chat cut after the turn and the whole chat, from `start` and from each of the turn's placeholders on."""
    cut, at_cut, at_text = places
    template, text = world.template, world.text
    shared = common_prefix(template, cut[at_cut:], text[at_text:])
    at_cut, at_text = at_cut + shared, at_text + shared
    ranges: list[Range] = [(start, at_text)] if at_text > start else []
    at_text = max(at_text, start)
    for mark in marks_in(cut, at_cut):
        if mark.index != index or mark.start < at_cut:
            continue
        whole_at = _same_mark(template, mark, cut, at_text, text)
        if whole_at is None:
            continue  # the template drops this part where messages follow
        own = all(other.index == index for other in marks_in(text, at_text, whole_at))
        back = common_suffix(template, cut[: mark.start], text[at_text:whole_at]) if not own else 0
        shared = common_prefix(template, cut[mark.start :], text[whole_at:])
        at_cut, at_text = mark.start + shared, whole_at + shared
        if own:
            begin = ranges.pop()[0] if ranges else start
        else:
            begin = whole_at - back
        ranges.append((begin, at_text))
    return _closed(world, index, ranges, cut[at_cut:])


def _same_mark(template: Template, mark: Marked, cut: str, position: int, text: str) -> int | None:
    """The place of the turn's own placeholder in the whole chat. A call's name may occur in the tool's result too, after other words."""
    while (place := text.find(mark.text, position)) >= 0:
        if mark.kind != "N" or common_suffix(template, cut[: mark.start].rstrip(), text[:place].rstrip()):
            return place
        position = place + len(mark.text)
    return None


def _closed(world: World, index: int, ranges: list[Range], rest: str) -> list[Range]:
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


def _ranges_by_end(world: World, index: int, start: int) -> list[Range]:
    """For templates that refuse a chat which ends with this turn: up to the only end-of-turn mark before the next message."""
    text, end_of_turn = world.text, world.template.end_of_turn
    stop = next((mark.start for mark in marks_in(text, start) if mark.index != index), len(text))
    if not end_of_turn or text.count(end_of_turn, start, stop) != 1:
        raise LostTurnError(f"turn {index + 1} (assistant): the template refuses a chat that ends with it, so its end cannot be located")
    if not any(mark.index == index for mark in marks_in(text, start, stop)):
        raise LostTurnError(f"turn {index + 1} (assistant): neither its text nor its calls are written as they are")
    return [(start, text.index(end_of_turn, start, stop) + len(end_of_turn))]


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


def _plan_by_prefixes(world: World, weights: Sequence[float]) -> Plan:
    """For templates that inspect contents: the chat cut before and after each trained turn, up to where each agrees with the whole one."""
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
    return with_stops(Plan(world.text, ranges), world)


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
        blocks_said = quantity(len(blocks), "block")
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
