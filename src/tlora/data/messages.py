"""Messages of a chat, in the spellings of the well-known trainers and APIs, as a chat template takes them.

Owns roles, contents, the loss weight of a message, and the system prompt and tools in separate columns. `tool_calls.py` reads tool
calls; `formats.py` decides which column holds the messages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from tlora.data.cells import as_list, fail, from_json, is_empty, list_of
from tlora.data.examples import Chat, Message, Note
from tlora.data.rows import Row
from tlora.data.tool_calls import calls_in_text, read_call, read_calls, unparsed
from tlora.errors import DataError
from tlora.job import check_kwargs

SYSTEM_COLUMNS = ("system", "system_prompt")
TOOL_COLUMNS = ("tools", "functions")
_SPELLINGS = {
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "model", "bot", "chatbot", "bing", "bard", "ai"),
    "system": ("system", "developer"),
    "tool": ("tool", "observation", "function", "tool_response", "function_response", "tool_result"),
}
_ROLES = {spelling: role for role, spellings in _SPELLINGS.items() for spelling in spellings}
KNOWN_ROLES = frozenset(_SPELLINGS)
_CALL_ROLES = ("function_call", "tool_call")  # of ShareGPT; of MS-SWIFT. Their content is a call as JSON
# A number scales the loss of the message; true and false, or 1 and 0, switch it.
_SCALES = ("loss_weight", "weight", "train", "loss_scale")
_SWITCHES = ("loss", "training", "trainable", "loss_mask")
WEIGHT_KEYS = (*_SCALES, *_SWITCHES)
_CONTENTS = ("content", "value", "text")
_OWN_KEYS = {"role", "content", "from", "value", "function_call", *WEIGHT_KEYS}
_OF_TRAINING = re.compile(r"(?:no|non|not|dont|un|skip|ignore)?(?:loss|train|mask)")


@dataclass(frozen=True)
class _Turn:
    """One message as read; `joins`: whether it continues the turn of the assistant's message before it."""

    message: Message
    weight: float
    notes: tuple[Note, ...] = ()
    joins: bool = False


def read_messages(row: Row, name: str, value: object) -> Chat:
    """The chat in `value`, which errors call `name`: a list of messages, also as JSON in a string. Without tools."""
    raw = as_list(row, f"column {name!r}", value)
    if not raw:
        fail(row, f"column {name!r}", raw, "at least one message")
    return read_turns(row, name, raw)


def read_turns(row: Row, name: str, raw: list[object]) -> Chat:
    """As `read_messages`, of a list that may be empty."""
    turns: list[_Turn] = []
    for i, item in ((i, item) for i, each in enumerate(raw) for item in _round(each)):
        turn = _read_turn(row, f"{name}[{i}]", item)
        if turn.joins and turns and turns[-1].message["role"] == "assistant":
            turn = _joined(row, f"{name}[{i}]", turns.pop(), turn)
        turns.append(turn)
    notes = tuple(note for turn in turns for note in turn.notes)
    return Chat([turn.message for turn in turns], [turn.weight for turn in turns], notes=notes)


def _round(item: object) -> Sequence[object]:
    """The two messages of a round as MS-SWIFT's ShareGPT has it, {'human': ..., 'assistant': ...}; else the message itself."""
    if isinstance(item, dict) and {"human", "assistant"} <= item.keys() and not {"role", "from"} & item.keys():
        return [{"role": role, "content": item[key]} for role, key in (("user", "human"), ("assistant", "assistant"))]
    return [item]


def check_roles(messages: Sequence[Message], template: str, place: str) -> None:
    """Raises DataError for a role that neither this module nor the source of the chat template knows: such a message would be dropped,
    or become context under a heading that the model has never seen.
    """
    for i, message in enumerate(messages):
        role = str(message["role"])
        if role not in KNOWN_ROLES and not re.search(rf"['\"]{re.escape(role)}\\?['\"]", template):
            known = ", ".join([*_ROLES, *_CALL_ROLES])
            raise DataError(
                f"{place}: messages[{i}] has the role {role!r}, which is none of {known}, and the chat template "
                "does not name it; rename the role, or give the job a chat_template that names it"
            )


def with_system(row: Row, chat: Chat) -> Chat:
    """The chat with the system prompt of a separate column, if there is one."""
    text = system_of(row)
    if not text:
        return chat
    first = chat.messages[0] if chat.messages else {}
    if first.get("role") == "system":
        if str(first["content"]).strip() == text.strip():
            return chat
        fail(row, "the system prompt", text, f"that of the messages, {first['content']!r}, as there can be one only: remove either")
    return replace(chat, messages=[{"role": "system", "content": text}, *chat.messages], weights=[0.0, *chat.weights])


def system_of(row: Row) -> str:
    """The system prompt in a separate column; "" without one."""
    prompt: str = ""
    for column in SYSTEM_COLUMNS:
        value = row.value.get(column)
        if is_empty(value):
            continue
        if not isinstance(value, str):
            fail(row, f"column {column!r}", value, "text (a string)")
        if prompt and prompt != value:
            fail(row, f"column {column!r}", value, f"the text of column {SYSTEM_COLUMNS[0]!r}, as there can be one system prompt only")
        prompt = value
    return prompt


def tools_of(row: Row) -> list[object] | None:
    column = next((column for column in TOOL_COLUMNS if not is_empty(row.value.get(column))), TOOL_COLUMNS[0])
    return read_tools(row, f"column {column!r}", row.value.get(column))


def template_kwargs_of(row: Row) -> dict[str, object]:
    """The row's own values for its chat template; as JSON in a string too."""
    raw = row.value.get("chat_template_kwargs")
    if is_empty(raw):
        return {}
    kwargs = from_json(raw) if isinstance(raw, str) else raw
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) and key.isidentifier() for key in kwargs):
        fail(row, "column 'chat_template_kwargs'", raw, "an object like {'enable_thinking': false}, also as JSON in a string")
    try:
        check_kwargs(kwargs)
    except ValueError as error:
        raise DataError(f"{row.place}: {error}") from None
    return {key: value for key, value in cast("dict[str, object]", kwargs).items() if value is not None}  # Parquet gives all rows all keys


def read_tools(row: Row, name: str, raw: object) -> list[object] | None:
    """Definitions of tools as templates know them, from a list, one, or either as JSON in a string; None without any."""
    parsed = from_json(raw) if isinstance(raw, str) and raw.strip() else []
    tools = parsed if isinstance(raw, str) else raw or []
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        fail(row, name, raw, "a list of tools like {'name': ..., 'parameters': ...}, also as JSON in a string")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in cast("list[Message]", tools)] or None


def notes_on_tools(tools: Sequence[object] | None) -> tuple[Note, ...]:
    """Notes on parameters whose schema is null: a Parquet file was written as JSON with the keys of all its rows."""
    waiting, without_schema = list(tools or []), list[str]()
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            schemas = item.get("properties")
            without_schema += [str(name) for name, schema in schemas.items() if schema is None] if isinstance(schemas, dict) else []
        waiting += item.values() if isinstance(item, dict) else item if isinstance(item, list) else []
    what = "parameters of tools without a schema (null), as Parquet has them where other tools have more, are written as they stand"
    return (Note(what, without_schema[0]),) if without_schema else ()


def read_history(row: Row) -> Chat:
    """The rounds in column `history`, pairs of a question and its answer."""
    messages: list[Message] = []
    for i, pair in enumerate(list_of(row, "history") if row.value.get("history") else []):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            fail(row, f"history[{i}]", pair, "a pair [question, answer] of strings")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return Chat(messages, [0.0, 1.0] * (len(messages) // 2))


# --- one message ---


def _read_turn(row: Row, name: str, raw: object) -> _Turn:
    if not isinstance(raw, dict):
        fail(row, name, raw, "a message like {'role': 'user', 'content': '...'}")
    fields = {key: value for key, value in cast("Mapping[str, object]", raw).items() if value is not None}  # null: absent
    given = fields.get("role", fields.get("from"))
    if not isinstance(given, str) or not given:
        fail(row, f"{name}.role", given, "a role such as user, assistant, system or tool")
    role = "assistant" if given.lower() in _CALL_ROLES else _ROLES.get(given.lower(), given)
    key = next((key for key in _CONTENTS if key in fields), "content")
    message: Message = {other: value for other, value in fields.items() if other not in _OWN_KEYS and other != key}
    content, notes = fields.get(key), list[Note]()
    if "tool_calls" in message or "function_call" in fields:
        message |= _calls_of(row, name, fields)
    if given.lower() in _CALL_ROLES:
        before, calls = calls_in_text(content)
        message |= {"tool_calls": calls} if calls else {}
        content = before if calls else content
        notes += [] if calls else [Note(f"messages of role {given} without a call in JSON are read as text", str(content))]
    text, more = _content(row, name, content, bool(message.get("tool_calls")))
    message = {"role": role, "content": text} | message | more
    notes += [Note("arguments of tool calls that are no JSON object are left as text", text) for text in unparsed(message)]
    joins = given.lower() in _CALL_ROLES and bool(message.get("tool_calls"))
    return _Turn(message, _weight(row, name, fields, role), tuple(notes), joins)


def _calls_of(row: Row, name: str, fields: Mapping[str, object]) -> Message:
    calls = read_calls(row, f"{name}.tool_calls", fields.get("tool_calls", []))
    old = fields.get("function_call")
    if old is None:
        return {"tool_calls": calls}
    if calls:
        fail(row, f"{name}.function_call", old, "no such key next to tool_calls: write all calls into tool_calls")
    return {"tool_calls": [read_call(row, f"{name}.function_call", from_json(old) if isinstance(old, str) else old)]}


def _joined(row: Row, name: str, first: _Turn, second: _Turn) -> _Turn:
    """A call that follows the assistant's words, or another call, is part of the same turn, as MS-SWIFT reads it."""
    if first.weight != second.weight:
        expected = f"{first.weight:g}, as of the message before, with which this call makes one turn"
        fail(row, f"the loss weight of {name}", second.weight, expected)
    texts = [str(turn.message["content"]) for turn in (first, second) if turn.message["content"]]
    calls = [*cast("list[object]", first.message.get("tool_calls", [])), *cast("list[object]", second.message["tool_calls"])]
    message = first.message | second.message | {"content": "\n".join(texts), "tool_calls": calls}
    return _Turn(message, first.weight, first.notes + second.notes)


def _content(row: Row, name: str, content: object, may_be_absent: bool) -> tuple[str, Message]:
    """The text of a message, and its parts other than text: reasoning and tool calls."""
    if isinstance(content, str):
        return content, {}
    if content is None and may_be_absent:
        return "", {}
    if not isinstance(content, list):
        fail(row, f"{name}.content", content, "text, or a list of parts like {'type': 'text', 'text': '...'}")
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[object] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        value = (part.get(str(kind)) or part.get("value") or part.get("text") or "") if isinstance(part, dict) else None
        before, more_calls = calls_in_text(value) if kind == "tool_call" else ("", [])
        if kind in ("text", "reasoning", "thinking") and isinstance(value, str):
            (texts if kind == "text" else reasoning).append(value)
        elif more_calls and not before:
            calls += more_calls
        else:
            expected = "a part of type text, reasoning or tool_call with its value; a language model reads no other"
            fail(row, f"{name}.content[{i}]", part, expected)
    more: Message = {"reasoning_content": "".join(reasoning)} if reasoning else {}
    return "".join(texts), more | ({"tool_calls": calls} if calls else {})


# --- the loss of a message ---


def _weight(row: Row, name: str, fields: Mapping[str, object], role: str) -> float:
    """The product of the message's weights; a message without any is trained if it is the assistant's."""
    factors: list[float] = []
    for key in WEIGHT_KEYS:
        if key not in fields or (key == "loss" and role != "assistant"):  # MS-SWIFT reads `loss` of the assistant's messages only
            continue
        value = fields[key]
        is_number = isinstance(value, (bool, int, float)) and math.isfinite(value) and value >= 0
        if not is_number or (key in _SWITCHES and value not in (0, 1)):
            expected = "true, false, 1 or 0" if key in _SWITCHES else "a number of at least 0, or true or false"
            fail(row, f"{name}.{key}", value, f"{expected}, for whether the message is trained")
        factors.append(float(cast("float", value)))
    if role == "assistant":
        for key, value in fields.items():
            if key not in WEIGHT_KEYS and says_what_is_trained(key, value):
                known = ", ".join(WEIGHT_KEYS)
                expected = f"no such key: it seems to say what is trained, and only {known} are read so. Rename or remove it"
                fail(row, f"{name}.{key}", value, expected)
    return math.prod(factors) if factors else float(role == "assistant")


def says_what_is_trained(name: str, value: object) -> bool:
    """Whether a key or column seems to mark what is trained: its name speaks of loss, training or masks, and it holds switches."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    return _is_switch(value) and any(_OF_TRAINING.match(word.lower()) for word in words)


def _is_switch(value: object) -> bool:
    if isinstance(value, list):  # of tokens or messages; or of parts of a text, as axolotl's `train_detail`
        return bool(value) and all(_is_switch(item) or (isinstance(item, dict) and "train" in item) for item in value)
    if isinstance(value, str):
        return value in ("true", "false", "True", "False")
    return isinstance(value, (bool, int, float)) and value in (0, 1)
