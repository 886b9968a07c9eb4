"""Placeholders for the texts of a chat, and how two renderings are compared without cutting a token of the template in two."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from tlora.data.chat_template import Template
from tlora.data.examples import Message

THINK_END = "</think>"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_MARKS = re.compile(r"qzMARK(\d+)([CNT]|A\d+)zq")
_MARKER = r"<[^<>\s]{1,64}>|\[/?[A-Z_]{2,32}\]"  # how families write the tokens that frame turns


@dataclass(frozen=True, slots=True)
class Marked:
    """A placeholder in a rendering. Kinds: content (C), the first call's name (N), an argument of a call (A and a number), thought (T)."""

    start: int
    end: int
    index: int
    kind: str
    text: str


def mark_message(index: int, message: Message, deep: bool) -> tuple[Message, dict[str, str]]:
    """The message with placeholders, and the text of each by kind.

    White space around a text stays, so that a template strips both or neither. Thoughts and the arguments of calls are replaced only with
    `deep`: then chats that differ in these alone have one plan.
    """
    values: dict[str, str] = {}

    def mark(kind: str, text: str) -> str:
        values[kind] = text.strip()
        sign = f"qzMARK{index}{kind}zq"
        return text.replace(values[kind], sign, 1) if values[kind] else sign

    def mark_all(value: object) -> object:
        if isinstance(value, dict):
            return {key: mark_all(item) for key, item in value.items()}
        if isinstance(value, list):
            return [mark_all(item) for item in value]
        return mark(f"A{len(values)}", value) if isinstance(value, str) and value.strip() else value

    content, marked = str(message["content"]), dict(message)
    calls = cast("list[dict[str, dict[str, object]]] | None", message.get("tool_calls"))
    head, end, tail = content.rpartition(THINK_END) if message["role"] == "assistant" else ("", "", content)
    if calls:
        function = calls[0]["function"]
        named = [{**calls[0], "function": {**function, "name": mark("N", str(function["name"]))}}, *calls[1:]]
        if deep:
            named = [{**call, "function": {**call["function"], "arguments": mark_all(call["function"].get("arguments"))}} for call in named]
        marked["tool_calls"] = named
    if deep:
        keys = [key for key in REASONING_KEYS if isinstance(message.get(key), str)]
        before, tag, thought = head.rpartition("<think>")
        if end and thought.strip():
            head = before + tag + mark("T", thought)
        elif len(keys) == 1 and str(message[keys[0]]).strip():
            marked[keys[0]] = mark("T", str(message[keys[0]]))
    if not calls or tail.strip():  # templates ask whether a turn with calls has text
        tail = mark("C", tail)
    marked["content"] = head + end + tail
    return marked, values


def forms(text: str) -> Iterator[str]:
    """How a template may write a text: as it is, or in the string of another notation."""
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]
    yield repr(text)[1:-1]


def marks_in(text: str, start: int = 0, end: int | None = None) -> list[Marked]:
    """The placeholders in a part of a rendering, in order."""
    matches = _MARKS.finditer(text, start, len(text) if end is None else end)
    return [Marked(match.start(), match.end(), int(match[1]), match[2], match[0]) for match in matches]


def last_mark(text: str) -> tuple[Marked, int] | None:
    """The last placeholder, and how often it occurs."""
    marks = marks_in(text)
    return (marks[-1], text.count(marks[-1].text)) if marks else None


def markers_in(template: Template, text: str) -> list[str]:
    """The template's framing tokens in a text, in order."""
    return _patterns(template)[0].findall(text)


def marker_at(template: Template, text: str) -> str:
    """The framing token with which a text begins, after white space; "" if it begins with something else."""
    match = _patterns(template)[0].match(text, len(text) - len(text.lstrip()))
    return match[0] if match else ""


def common_prefix(template: Template, first: str, second: str) -> int:
    """How many characters both texts begin with, cutting neither's words, framing tokens or placeholders in two."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return _whole(template, first, second, low)


def _whole(template: Template, first: str, second: str, length: int) -> int:
    settled = False
    while not settled:
        settled = True
        for text in (first, second):
            for match in _patterns(template)[1].finditer(text, max(0, length - 256), length + 256):
                if match.start() < length < match.end():
                    length, settled = match.start(), False
                    break
    return length


def common_suffix(template: Template, first: str, second: str) -> int:
    """As `common_prefix`, from the end, and no further than the placeholder before."""
    first, second = (text[marks[-1].end if (marks := marks_in(text)) else 0 :] for text in (first, second))
    length = 0
    while length < min(len(first), len(second)) and first[-1 - length] == second[-1 - length]:
        length += 1
    for text in (first, second):
        for match in _patterns(template)[1].finditer(text):
            if match.start() < len(text) - length < match.end():
                length = len(text) - match.end()
    return length


def _patterns(template: Template) -> tuple[re.Pattern[str], re.Pattern[str]]:
    return _compile(template.added_tokens)


@lru_cache(maxsize=16)
def _compile(tokens: frozenset[str]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Framing tokens; and those, words and placeholders."""
    other = sorted((token for token in tokens if token.strip() and not re.fullmatch(_MARKER, token)), key=len, reverse=True)
    marker = "|".join([*map(re.escape, other), _MARKER])
    return re.compile(marker), re.compile(f"{_MARKS.pattern}|{marker}|(?:(?!qzMARK)\\w)+")
