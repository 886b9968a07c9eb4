"""Finds the parts of a chat that its template drops or rewrites.

Templates are programs and do not declare what they leave out, so the rendered text is searched for each piece of the chat: as it is, and
escaped as in JSON or in Python. Owns that search and its messages; `chat.py` renders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from tlora.data.chat_template import Template
from tlora.data.examples import Chat, Message
from tlora.data.turn_marks import REASONING_KEYS, THINK_END

_READ_ELSEWHERE = ("role", "content", "tool_calls", "tool_call_id", *REASONING_KEYS)
_SHORT = 64  # characters; a shorter piece may occur in the text by chance, so its occurrences are counted
_EXAMPLE_CHARACTERS = 80


@dataclass(frozen=True)
class Change:
    """One piece of a chat that is not written unchanged. `what` is the kind of change, in words."""

    what: str
    characters: int
    example: str


@dataclass(frozen=True)
class _Piece:
    what: str
    parts: list[str]  # all of them are in the text, or the piece was dropped

    def change(self) -> Change:
        return _change(self.what, " ".join(self.parts))


def find_changes(template: Template, chat: Chat, text: str) -> list[Change]:
    """How `text`, the rendering of `chat`, differs from it."""
    pieces = [piece for message in chat.messages for piece in _pieces(message)]
    written: list[str] = []
    changes: list[Change] = []
    for piece in sorted(pieces, key=lambda piece: not piece.what.startswith("text")):  # reasoning may repeat the answer: that comes first
        if all(_stands_in(text, part, written) for part in piece.parts):
            written += piece.parts
        else:
            changes.append(piece.change())
    definitions = [_definition(tool) for tool in chat.tools or []]
    changes += [piece.change() for piece in definitions if not all(_stands_in(text, part, []) for part in piece.parts)]
    return changes + list(_unread_keys(template, chat)) + list(_rewritten(template, chat))


def _pieces(message: Message) -> Iterator[_Piece]:
    role, content = str(message["role"]), str(message["content"])
    thought, end, answer = content.rpartition(THINK_END) if role == "assistant" else ("", "", content)
    if end:
        yield _Piece("reasoning is dropped", [thought.rpartition("<think>")[2].strip()])
    yield _Piece(f"text of {role} messages is dropped", [answer.strip()])
    for call in _calls(message):
        yield _Piece("tool calls are dropped", list(_strings(call)))
    for key, value in message.items():
        if key in REASONING_KEYS:
            yield _Piece("reasoning is dropped", list(_strings(value)))
        elif key not in _READ_ELSEWHERE:
            yield _Piece(f"message key {key!r} is not used", list(_strings(value)))


def _definition(tool: object) -> _Piece:
    """A tool's name and description as pieces: templates write the types of parameters in their own notations."""
    function = _function(tool)
    return _Piece("tool definitions are dropped", [str(function[key]).strip() for key in ("name", "description") if key in function])


def _function(tool: object) -> dict[str, object]:
    """The function of a definition or a call: rows may have other shapes, which the template refuses."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return cast("dict[str, object]", function) if isinstance(function, dict) else {}


def _calls(message: Message) -> list[dict[str, object]]:
    calls = message.get("tool_calls")
    return [_function(call) for call in calls] if isinstance(calls, list) else []


def _strings(value: object) -> Iterator[str]:
    """The texts in a value from JSON, without white space around them; the names of its keys are not among them."""
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _stands_in(text: str, part: str, written: list[str]) -> bool:
    """Whether `part` is in `text`, and not only because another piece of the chat that is written there holds it too."""
    forms = (part, json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1], repr(part)[1:-1])
    if len(part) >= _SHORT or not part:
        return any(form in text for form in forms)
    needed = 1 + sum(other.count(part) for other in written)
    return any(text.count(form) >= needed for form in forms)


def _unread_keys(template: Template, chat: Chat) -> Iterator[Change]:
    """Keys without text (numbers, true and false): they are used only where the template names them."""
    for message in chat.messages:
        for key, value in message.items():
            if key not in _READ_ELSEWHERE and not any(_strings(value)) and key not in template.text():
                yield Change(f"message key {key!r} is not used", 0, str(value))


def _rewritten(template: Template, chat: Chat) -> Iterator[Change]:
    """What `chat.py` rewords because the template cannot write it."""
    if not template.knows_tools:
        if chat.tools:
            yield _change("tool definitions are written as text of the system turn", json.dumps(chat.tools, ensure_ascii=False))
        for message in chat.messages:
            if message["role"] == "tool":
                yield _change("tool messages are written as user turns", str(message["content"]))
            for call in _calls(message):
                yield _change("tool calls are written as text of the assistant", json.dumps(call, ensure_ascii=False))
    if template.folds_system and [message["role"] for message in chat.messages[:2]] == ["system", "user"]:
        yield _change("system messages are written into the first user turn", str(chat.messages[0]["content"]))


def _change(what: str, text: str) -> Change:
    example = " ".join(text[: 4 * _EXAMPLE_CHARACTERS].split())
    return Change(what, len(text), example if len(example) <= _EXAMPLE_CHARACTERS else example[:_EXAMPLE_CHARACTERS] + " …")
