"""Tool calls in the spellings of the well-known APIs and trainers, as chat templates take them: arguments are an object.

OpenAI's API writes arguments as JSON in a string. A template that wants such a string gets one from `chat.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import cast

from tlora.data.cells import fail, from_json
from tlora.data.examples import Message
from tlora.data.rows import Row
from tlora.json_file import DECODER, KeyTwiceError

_ARGUMENTS = ("arguments", "parameters", "args", "input")  # OpenAI; Llama; LangChain; Anthropic
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def read_calls(row: Row, name: str, value: object) -> list[object]:
    """The calls in a list, one call, or either as JSON in a string. Raises DataError with `name`."""
    calls = (from_json(value) if value.strip() else []) if isinstance(value, str) else value
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list):
        expected = "a list of calls like {'type': 'function', 'function': {'name': '...', 'arguments': {...}}}"
        fail(row, name, value, expected)
    return [read_call(row, f"{name}[{i}]", call) for i, call in enumerate(calls)]


def read_call(row: Row, name: str, value: object) -> Message:
    """One call. Raises DataError with `name`."""
    call = _as_call(value)
    return call or fail(row, name, value, "a call like {'type': 'function', 'function': {'name': '...', 'arguments': {...}}}")


def calls_in_text(value: object) -> tuple[str, list[object]]:
    """The calls at the end of a turn, and the text before them; no calls if there are none.

    The turn is one call or a list of them, also as JSON in a string, or a text (such as a thought) which ends in that JSON or in
    calls between `<tool_call>` and `</tool_call>`.
    """
    if not isinstance(value, str):
        return "", _all_calls([value])
    if calls := _all_calls([from_json(value)]):
        return "", calls
    if tagged := list(_TAGGED.finditer(value)):
        between = "".join(_TAGGED.split(value[tagged[0].start() :])[0::2])
        calls = _all_calls([from_json(match[1]) for match in tagged])
        return (value[: tagged[0].start()].strip(), calls) if not between.strip() else ("", [])
    for bracket in re.finditer(r"[\[{]", value):
        if calls := _all_calls(list(_values_in(value[bracket.start() :]))):
            return value[: bracket.start()].strip(), calls
    return "", []


def unparsed(message: Message) -> Iterator[str]:
    """Arguments of the message's calls that are still text: those that are no JSON object."""
    for call in cast("list[dict[str, dict[str, object]]]", message.get("tool_calls") or []):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            yield arguments


def _values_in(text: str) -> Iterator[object]:
    """The JSON values in `text`, one after another up to its end; a last None if something else follows."""
    position = 0
    while position < len(text):
        try:
            value, position = DECODER.raw_decode(text, position)
        except (KeyTwiceError, ValueError, RecursionError):
            value, position = None, len(text)
        yield value
        position += len(text[position:]) - len(text[position:].lstrip(" \t\r\n,;"))


def _all_calls(values: list[object]) -> list[object]:
    """The calls in `values`, which may hold lists of calls; [] unless all are calls."""
    each = [call for value in values for call in (value if isinstance(value, list) else [value])]
    calls = [_as_call(call) for call in each]
    return cast("list[object]", calls) if all(calls) else []


def _as_call(value: object) -> Message | None:
    """The call in the shape that templates know, with its other keys, such as an id; None if it is no call."""
    call = _present(value)
    nested = isinstance(call.get("function"), dict)
    function = _present(call["function"]) if nested else call
    name = function.get("name")
    if not isinstance(name, str) or not name:
        return None
    key = next((key for key in _ARGUMENTS if key in function), "arguments")
    arguments = _parsed(function.get(key, {}))
    if nested:  # the order of keys stays, as templates write the whole object
        function = {"arguments" if other == key else other: item for other, item in function.items()} | {"arguments": arguments}
        return call | {"function": function}
    identity = {"id": call["id"]} if "id" in call else {}
    return identity | {"type": "function", "function": {"name": name, "arguments": arguments}}


def _present(value: object) -> Message:
    """The keys of an object that are not null."""
    return {str(key): item for key, item in value.items() if item is not None} if isinstance(value, dict) else {}


def _parsed(arguments: object) -> object:
    """`arguments` as an object if it is one as JSON in a string, or empty; else unchanged."""
    if not isinstance(arguments, str):
        return arguments
    parsed = from_json(arguments) if arguments.strip() else {}
    return parsed if isinstance(parsed, dict) else arguments
