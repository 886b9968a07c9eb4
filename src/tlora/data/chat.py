"""Chats through a chat template, and which characters of the result are trained.

The template is the job's own file, else the base model's, else `DEFAULT_TEMPLATE`. A trained turn counts from the end of the
template's generation prompt to the end of its end-of-turn mark: what the model has to write itself. Templates say nowhere which
part of their output is which turn, and their `{% generation %}` marks, where they have them, can slip into later turns. So turns
are located by rendering the chat a second time with placeholders instead of contents, and believed only if putting the contents back
in gives the first rendering exactly.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from tlora.data.formats import Chat, Message
from tlora.data.tool_calls import unparsed
from tlora.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# For base models without a template: headings that any vocabulary can spell; the assistant's turn ends in the tokenizer's EOS.
DEFAULT_TEMPLATE = """\
{%- set tools_text = tools | tojson if tools else '' -%}
{%- if tools_text and (not messages or messages[0]['role'] != 'system') %}{{ '### System:\\nTools: ' + tools_text + '\\n\\n' }}{% endif -%}
{%- for message in messages -%}
{{- '### ' + message['role'] | capitalize + ':\\n' + message['content'] -}}
{%- if message['role'] == 'system' and tools_text %}{{ '\\nTools: ' + tools_text }}{% endif -%}
{%- for call in message['tool_calls'] or [] -%}
{{- ('\\n' if message['content'] or not loop.first else '') + call['function'] | tojson -}}
{%- endfor -%}
{%- if message['role'] == 'assistant' %}{{ eos_token or '' }}{% endif -%}
{{- '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif -%}
"""
_MARK = "qzMARK{}zq"
_MARKS = re.compile(r"qzMARK(\d+)zq")
THINK_END = "</think>"

Span = tuple[int, int, float]  # first character, one past the last, loss weight


@dataclass(frozen=True)
class Template:
    """A chat template and what was found out about it by rendering a short chat."""

    tokenizer: PreTrainedTokenizerBase
    source: str | None  # None: the tokenizer's own
    generation_prompt: str = ""  # what opens an assistant turn; "" if the template has no such thing
    end_of_turn: str = ""  # what closes one
    folds_system: bool = False  # it has no system turn: the text goes before the first user turn's
    knows_tools: bool = True  # else tools stand in the system turn, calls and results as text
    text_arguments: bool = False  # it writes the arguments of calls as they stand, so they must be JSON in a string

    def text(self) -> str:
        """The template's source, for cache keys and reports."""
        own = self.tokenizer.chat_template
        return self.source or (own if isinstance(own, str) else json.dumps(own, sort_keys=True))


def open_template(tokenizer: PreTrainedTokenizerBase, source: str | None = None) -> Template:
    """The template to render with. `source` wins over the tokenizer's own, which wins over `DEFAULT_TEMPLATE`."""
    if source is None and not tokenizer.chat_template:
        adds_bos = tokenizer.bos_token_id is not None and tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id  # type: ignore[index]
        source = ("{{- bos_token -}}\n" if adds_bos else "") + DEFAULT_TEMPLATE
    bare = Template(tokenizer, source)
    user: Message = {"role": "user", "content": _MARK.format(0)}
    assistant: Message = {"role": "assistant", "content": _MARK.format(1)}
    system: Message = {"role": "system", "content": _MARK.format(2)}
    tool = {
        "type": "function",
        "function": {"name": _MARK.format(4), "description": "", "parameters": {"type": "object", "properties": {}}},
    }
    asked, opened = _try(bare, [user]), _try(bare, [user], add_generation_prompt=True)
    answered, with_system = _try(bare, [user, assistant]), _try(bare, [system, user, assistant])

    def call(arguments: object) -> str:
        called: list[object] = [{"type": "function", "function": {"name": _MARK.format(3), "arguments": arguments}}]
        turns: list[Message] = [{"role": "assistant", "content": "", "tool_calls": called}, {"role": "tool", "content": _MARK.format(5)}]
        return _try(bare, _with_ids([user, *turns, assistant]), tools=[tool])

    by_object, by_text = call({"k": "v"}), call('{"k": "v"}')
    writes_text = '{"k": "v"}' in by_text and (not by_object or "{'k': 'v'}" in by_object)  # the second is Python's spelling
    called = by_text if writes_text else by_object
    tail = answered.rpartition(_MARK.format(1))[2]
    if not (asked or opened or answered or with_system):
        _render(bare, [user, assistant], None, "a trial of two turns")  # raises with the template's own words
    return Template(
        tokenizer,
        source,
        generation_prompt=opened[len(asked) :] if opened.startswith(asked) else "",
        end_of_turn=tail.rstrip() or tail,
        folds_system=bool(answered) and _MARK.format(2) not in with_system,
        knows_tools=all(_MARK.format(i) in called for i in (3, 4, 5)),
        text_arguments=writes_text,
    )


def render(template: Template, chat: Chat, place: str) -> tuple[str, list[Span]]:
    """The chat's text and its trained characters. Raises DataError naming `place` where the template refuses or cannot be followed."""
    chat = _fitted(template, chat)
    full = _render(template, chat.messages, chat.tools, place)
    trained = [i for i, weight in enumerate(chat.weights) if weight]
    if not trained:
        return full, []
    spans = _spans_by_marks(template, chat, full)
    if spans is None:
        spans = _spans_by_prefixes(template, chat, full)
    if spans is None:
        raise DataError(
            f"{place}: the chat template rewrites this chat's turns, so that the trained ones cannot be told from the others; "
            "give the job a chat_template of its own that writes each message as it is"
        )
    return full, spans


def _render(
    template: Template, messages: list[Message], tools: list[object] | None, place: str, add_generation_prompt: bool = False
) -> str:
    try:
        text = template.tokenizer.apply_chat_template(
            cast("list[dict[str, str]]", messages),
            tools=cast("list[dict[str, object]] | None", tools),  # type: ignore[arg-type]
            chat_template=template.source,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    except Exception as error:  # templates are programs and may raise anything
        roles = ", ".join(str(message["role"]) for message in messages[:12]) + (", ..." if len(messages) > 12 else "")
        if texts := [text for message in messages for text in unparsed(message)]:
            raise DataError(
                f"{place}: the arguments of a tool call are {texts[0][:80]!r}, which is no JSON object, and the chat template refuses "
                f"them ({error}); write an object"
            ) from error
        raise DataError(
            f"{place}: the chat template refuses the roles {roles} ({error}); change the row or give the job a chat_template"
        ) from error
    assert isinstance(text, str), type(text)
    return text


def _try(template: Template, messages: list[Message], add_generation_prompt: bool = False, tools: list[object] | None = None) -> str:
    try:
        return _render(template, messages, tools, "", add_generation_prompt)
    except DataError:
        return ""


# --- what a template cannot say is said in words ---


def _fitted(template: Template, chat: Chat) -> Chat:
    messages, weights = list(chat.messages), list(chat.weights)
    tools = chat.tools
    if template.knows_tools:
        messages = [_with_text_arguments(message) for message in messages] if template.text_arguments else messages
        messages = _with_ids(messages) if "tool_call_id" in template.text() else messages
    else:
        messages = [_without_tools(message) for message in messages]
        if tools:
            listed = "Tools: " + json.dumps(tools, ensure_ascii=False)
            if messages[0]["role"] == "system":
                messages[0] = messages[0] | {"content": f"{messages[0]['content']}\n{listed}"}
            else:
                messages, weights = [{"role": "system", "content": listed}, *messages], [0.0, *weights]
            tools = None
    if template.folds_system and len(messages) > 1 and messages[0]["role"] == "system" and messages[1]["role"] == "user":
        first = messages[1] | {"content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
        messages, weights = [first, *messages[2:]], weights[1:]
    return Chat(messages, weights, tools)


def _with_ids(messages: list[Message]) -> list[Message]:
    """Give calls and results without an id one of nine digits, in order: some templates insist on that length."""
    found: list[Message] = []
    given: list[object] = []
    count = 0
    for message in messages:
        if calls := cast("list[dict[str, object]] | None", message.get("tool_calls")):
            named = [{"id": f"{count + i:09d}"} | call for i, call in enumerate(calls)]
            count += len(calls)
            given = [call["id"] for call in named]
            message = message | {"tool_calls": named}
        elif message["role"] == "tool":
            message = {"tool_call_id": given.pop(0) if given else f"{0:09d}"} | message
        found.append(message)
    return found


def _with_text_arguments(message: Message) -> Message:
    calls = cast("list[dict[str, dict[str, object]]]", message.get("tool_calls") or [])
    texts = [given if isinstance(given := call["function"]["arguments"], str) else json.dumps(given, ensure_ascii=False) for call in calls]
    named = [call | {"function": call["function"] | {"arguments": text}} for call, text in zip(calls, texts, strict=True)]
    return message | {"tool_calls": named} if named else message


def _without_tools(message: Message) -> Message:
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in cast("list[dict[str, object]]", message.get("tool_calls") or [])]
    if calls:
        plain["content"] = "\n".join([text for text in (str(message["content"]),) if text] + calls)
    return plain | {"role": "user"} if message["role"] == "tool" else plain


# --- where the turns are ---


def _spans_by_marks(template: Template, chat: Chat, full: str) -> list[Span] | None:
    """Spans from a rendering with placeholders; None unless the contents put back in give `full` again."""
    pairs = [_marked(i, message) for i, message in enumerate(chat.messages)]
    try:
        marked = _render(template, [message for message, _ in pairs], chat.tools, "")
    except DataError:
        return None
    pieces = _MARKS.split(marked)
    if not full.startswith(pieces[0]):
        return None
    spans: list[Span] = []
    position = len(pieces[0])
    for before, name, after in zip(pieces[0::2], pieces[1::2], pieces[2::2], strict=False):
        index = int(name)
        values = pairs[index][1] if index < len(pairs) else []
        value = next((text for text in values if full.startswith(text + after, position)), None)
        if value is None:
            return None
        if chat.weights[index]:
            back, forth = _turn_around(template, chat.messages[index], before, after)
            spans.append((position - back, position + len(value) + forth, chat.weights[index]))
        position += len(value) + len(after)
    found_all = len({int(name) for name in pieces[1::2] if chat.weights[int(name)]}) == sum(map(bool, chat.weights))
    return spans if position == len(full) and found_all else None


def _marked(index: int, message: Message) -> tuple[Message, list[str]]:
    """The message with a placeholder, and what the template may have written in its place: the text, or the text stripped."""
    mark, content = _MARK.format(index), str(message["content"])
    calls = cast("list[dict[str, dict[str, object]]] | None", message.get("tool_calls"))
    if calls and not content.strip():
        name = str(calls[0]["function"]["name"])
        first = {**calls[0], "function": {**calls[0]["function"], "name": mark}}
        return message | {"tool_calls": [first, *calls[1:]]}, [name]
    # Templates drop the thinking of earlier turns; its own text stays in place so that they still find it.
    head, end, tail = content.rpartition(THINK_END) if message["role"] == "assistant" else ("", "", content)
    as_json = [json.dumps(tail, ensure_ascii=False)[1:-1]] if message["role"] == "tool" else []
    return message | {"content": head + end + mark}, [tail, tail.strip(), tail.lstrip(), tail.rstrip(), *as_json]


def _turn_around(template: Template, message: Message, before: str, after: str) -> tuple[int, int]:
    """How many characters of a trained turn stand before and after its content, in the literal text on either side."""
    if message["role"] != "assistant":
        return 0, 0
    prompt, end = template.generation_prompt, template.end_of_turn
    opened = before.rfind(prompt) if prompt else -1
    back = len(before) - opened - len(prompt) if opened >= 0 else 0
    closed = after.find(end) if end else -1
    far = closed > 0 and not message.get("tool_calls") and after[:closed].strip()  # some later turn's end
    return back, closed + len(end) if closed >= 0 and not far else 0


def _spans_by_prefixes(template: Template, chat: Chat, full: str) -> list[Span] | None:
    """Spans from the renderings of the chat cut before and after each trained turn; None unless `full` begins with each of them."""
    spans: list[Span] = []
    for i, (message, weight) in enumerate(zip(chat.messages, chat.weights, strict=True)):
        if not weight:
            continue
        try:
            prompted = message["role"] == "assistant"
            opened = _render(template, chat.messages[:i], chat.tools, "", add_generation_prompt=prompted) if i else ""
            closed = _render(template, chat.messages[: i + 1], chat.tools, "")
        except DataError:
            return None
        start, end = len(opened), len(closed.rstrip()) if template.end_of_turn.strip() else len(closed)
        if not (full.startswith(opened) and full.startswith(closed) and start < end):
            return None
        if not (prompted and template.generation_prompt and i):  # a header stands before the content, and must not be trained
            body, content = full[start:end].removesuffix(template.end_of_turn).rstrip(), str(message["content"]).strip()
            if not body.endswith(content):
                return None
            start += len(body) - len(content)
            end = end if prompted else start + len(content)
        spans.append((start, end, weight))
    return spans
