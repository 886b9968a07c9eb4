"""Renders chats with a chat template, rewords what the template cannot write, and finds the trained characters in the result.

The template is the job's own file, else the base model's, else `DEFAULT_TEMPLATE`. A trained turn counts from the end of the
template's generation prompt to the token that ends the turn: what the model has to write itself (`turns.py`). Rendering is
`chat_template.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from tlora.data.chat_template import RenderError, Template, has_generation_marks, refusal, render_messages
from tlora.data.examples import Chat, Message
from tlora.data.tool_calls import unparsed
from tlora.data.turn_marks import common_prefix
from tlora.data.turns import LostTurnError, find_turns
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
_MARK = "qzTRIAL{}zq"

WeightedRange = tuple[int, int, float]  # first character, one past the last, loss weight


@dataclass(frozen=True)
class Rendered:
    """A chat's text, its trained characters, and what ends a trained turn without a stop token: "" for nothing, None if all have one."""

    text: str
    spans: list[WeightedRange]
    unstopped: str | None = None


def open_template(
    tokenizer: PreTrainedTokenizerBase,
    source: str | None = None,
    kwargs: Mapping[str, object] | None = None,
    stops: frozenset[str] = frozenset(),
) -> Template:
    """The template to render with. `source` wins over the tokenizer's own, which wins over `DEFAULT_TEMPLATE`.

    `kwargs` are handed to it; `stops` are tokens that end generation, besides the tokenizer's EOS.
    """
    if source is None and not tokenizer.chat_template:
        adds_bos = tokenizer.bos_token_id is not None and tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id  # type: ignore[index]
        source = ("{{- bos_token -}}\n" if adds_bos else "") + DEFAULT_TEMPLATE
    eos = tokenizer.eos_token
    known = stops | ({eos} if isinstance(eos, str) else set())
    bare = Template(tokenizer, source, kwargs or {}, known, frozenset(tokenizer.get_added_vocab()))  # type: ignore[operator]
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
        calls: list[object] = [{"type": "function", "function": {"name": _MARK.format(3), "arguments": arguments}}]
        turns: list[Message] = [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": _MARK.format(5)}]
        return _try(bare, _with_ids([user, *turns, assistant]), tools=[tool])

    by_object, by_text = call({"k": "v"}), call('{"k": "v"}')
    writes_text = '{"k": "v"}' in by_text and (not by_object or "{'k': 'v'}" in by_object)  # the second is Python's spelling
    rendered = by_text if writes_text else by_object
    if not (asked or opened or answered or with_system):
        try:
            render_messages(bare, [user, assistant], None, {})
        except RenderError as error:
            raise refusal("a trial of two turns", [user, assistant], error) from error
    tail, again = answered.rpartition(_MARK.format(1))[2], _try(bare, [user, assistant, user]).partition(_MARK.format(1))[2]
    end = tail[: common_prefix(bare, tail, again)] if again else tail
    return replace(
        bare,
        generation_prompt=opened[common_prefix(bare, asked, opened) :] if asked else "",
        end_of_turn=end.rstrip() or tail.rstrip() or tail,
        folds_system=bool(answered) and _MARK.format(2) not in with_system,
        knows_tools=all(_MARK.format(i) in rendered for i in (3, 4, 5)),
        text_arguments=writes_text,
        marks_generation=has_generation_marks(bare.text()),
    )


def render(template: Template, chat: Chat, place: str) -> Rendered:
    """The chat as text. Raises DataError naming `place` where the template refuses, or where a trained turn cannot be located."""
    chat = _fitted(template, chat)
    try:
        full = render_messages(template, chat.messages, chat.tools, chat.template_kwargs)
    except RenderError as error:
        if texts := [text for message in chat.messages for text in unparsed(message)]:
            raise DataError(
                f"{place}: the arguments of a tool call are {texts[0][:80]!r}, which is no JSON object, and the chat template refuses "
                f"them ({error}); write an object"
            ) from error
        raise refusal(place, chat.messages, error) from error
    if not any(chat.weights):
        return Rendered(full, [])
    try:
        return Rendered(*find_turns(template, chat, full))
    except LostTurnError as error:
        raise DataError(
            f"{place}: the chat template rewrites this chat's turns, so that the trained ones cannot be located ({error}); "
            "give the job a chat_template of its own that writes each message as it is"
        ) from error


def _try(template: Template, messages: list[Message], add_generation_prompt: bool = False, tools: list[object] | None = None) -> str:
    try:
        return render_messages(template, messages, tools, {}, add_generation_prompt)
    except RenderError:
        return ""


# --- rewording what a template cannot write ---


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
    return replace(chat, messages=messages, weights=weights, tools=tools)


def _with_ids(messages: list[Message]) -> list[Message]:
    """Give calls and results without an id one of nine digits, in order: some templates insist on that length."""
    numbered: list[Message] = []
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
        numbered.append(message)
    return numbered


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
