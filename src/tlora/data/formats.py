"""What the columns of a row mean: six data formats, each turned into one of three examples, and pairs of two such examples.

`Chat` goes through a template, `Text` is tokenized as it stands, `Tokens` is ready. Owns the checks of types and values in a
row; reads no file (`rows.py`) and renders nothing (`chat.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, NoReturn, cast

from tlora.data.rows import Row
from tlora.errors import DataError

Format = Literal["chat", "prompt_completion", "text", "alpaca", "sharegpt", "tokenized", "preference"]
VERDICT_COLUMNS = ("label", "kto_tag")  # of TRL and MS-SWIFT; of LLaMA-Factory
_VERDICTS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
# Of samples, in the order of detection: sets often carry a rendered `text` or a bare `prompt` beside their real columns.
COLUMNS: dict[Format, tuple[str, ...]] = {
    "tokenized": ("input_ids",),
    "chat": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
}
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool", "function": "tool"}
_WEIGHT_KEYS = ("loss_weight", "weight", "train")
_OWN_KEYS = {"role", "content", "from", "value", *_WEIGHT_KEYS}
IGNORED_LABEL = -100

Message = dict[str, object]


@dataclass(frozen=True)
class Chat:
    """Messages as a chat template takes them (`content` always a string) and the loss weight of each."""

    messages: list[Message]
    weights: list[float]
    tools: list[object] | None = None


@dataclass(frozen=True)
class Text:
    """Plain text: `completion` is trained, `prompt` is not."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Tokens:
    """Token ids as given, with a loss weight each."""

    input_ids: list[int]
    weights: list[float]


Example = Chat | Text | Tokens


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt; only the answers are trained."""

    chosen: Chat | Text
    rejected: Chat | Text


@dataclass(frozen=True)
class Labelled:
    """An answer to a prompt, and whether it is wanted; only the answer is trained."""

    example: Chat | Text
    wanted: bool


def detect(row: Row) -> Format:
    """The format whose columns `row` has."""
    samples: dict[Format, tuple[str, ...]] = {name: columns for name, columns in COLUMNS.items() if name != "preference"}
    for name, columns in samples.items():
        if all(column in row.value for column in columns):
            return name
    known = "; ".join(f"{name}: {' + '.join(columns)}" for name, columns in samples.items())
    found = ", ".join(map(str, row.value)) or "none"
    raise DataError(f"{row.place}: no data format has the columns {found}; rename them to those of one format ({known})")


def read_example(row: Row, data_format: Format) -> Example:
    """The example in `row`. Raises DataError with file, row, column, the value found and what was expected."""
    _check_columns(row, data_format)
    if data_format == "tokenized":
        return _tokens(row)
    if data_format == "text":
        return Text("", _text(row, "text"))
    if data_format == "alpaca":
        return _alpaca(row)
    if data_format == "prompt_completion":
        return _prompt_completion(row)
    messages, weights = _messages(row, COLUMNS[data_format][0])
    return Chat(messages, weights, _tools(row))


def read_pair(row: Row) -> Pair:
    """The pair in `row`: `prompt`, `chosen` and `rejected` as text or as messages; `conversations` with two answers (ShareGPT ranking);
    or two whole chats, whose common beginning is the prompt. Raises DataError as `read_example` does.
    """
    _check_columns(row, "preference")
    if row.value.get("conversations"):
        asked = _messages(row, "conversations")[0]
    elif isinstance(row.value.get("prompt"), list):
        asked = _messages(row, "prompt")[0]
    elif isinstance(row.value["chosen"], str):
        prompt = _text(row, "prompt")
        return Pair(Text(prompt, _text(row, "chosen")), Text(prompt, _text(row, "rejected")))
    else:
        asked = _common_start(row)
    return Pair(_answered(row, asked, "chosen"), _answered(row, asked, "rejected"))


def read_labelled(row: Row, data_format: Format) -> Labelled:
    """The last answer in `row`, and what its label says of it. Raises DataError as `read_example` does."""
    example, wanted = read_example(row, data_format), verdict_of(row)
    if wanted is None or isinstance(example, Tokens):
        _fail(row, "column 'label'", row.value.get("label"), "true or false, beside a prompt and its answer")
    if isinstance(example, Text):
        return Labelled(example, wanted)
    last = max((i for i, message in enumerate(example.messages) if message["role"] != "assistant"), default=-1)
    return Labelled(Chat(example.messages, [0.0] * (last + 1) + example.weights[last + 1 :], example.tools), wanted)


def verdict_of(row: Row) -> bool | None:
    """What the row's label says of its answer; None where it has none, or one that says something else."""
    values = (row.value.get(column) for column in VERDICT_COLUMNS)
    found = (_VERDICTS.get(str(value).strip().lower()) for value in values if isinstance(value, bool | int | float | str))
    return next((verdict for verdict in found if verdict is not None), None)


def _answered(row: Row, asked: list[Message], column: str) -> Chat:
    """The chat that ends in the answer of `column`: a text, a message, or messages, which may begin with those of the prompt."""
    value = row.value[column]
    if isinstance(value, str):
        value = [{"role": "assistant", "content": value}]
    answer = [_message(row, f"{column}[{i}]", item) for i, item in enumerate(value if isinstance(value, list) else [value])]
    if [message for message, _ in answer[: len(asked)]] == asked:
        answer = answer[len(asked) :]
    if not any(weight for _, weight in answer):
        _fail(row, f"column {column!r}", row.value[column], "an answer of the assistant, after the prompt")
    return Chat(asked + [message for message, _ in answer], [0.0] * len(asked) + [weight for _, weight in answer], _tools(row))


def _common_start(row: Row) -> list[Message]:
    """The messages with which both chats begin; a `prompt` in text beside them must be the last of these."""
    chosen, rejected = _messages(row, "chosen")[0], _messages(row, "rejected")[0]
    asked = [message for message, _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))]
    prompt = row.value.get("prompt")
    if not asked or (isinstance(prompt, str) and prompt and asked[-1]["content"] != prompt):
        _fail(row, "column 'prompt'", prompt, "the prompt as text or messages, or two chats that begin with it")
    return asked


def _check_columns(row: Row, data_format: Format) -> None:
    for column in COLUMNS[data_format]:
        if column not in row.value:
            found = ", ".join(map(str, row.value)) or "none"
            raise DataError(f"{row.place}: column {column!r} is missing (found: {found}); every row of format {data_format} needs it")


def _fail(row: Row, column: str, value: object, expected: str) -> NoReturn:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    raise DataError(f"{row.place}: {column} is {shown} ({type(value).__name__}); expected {expected}")


def _text(row: Row, column: str, default: str | None = None) -> str:
    value = row.value.get(column)
    if value is None and default is not None:
        return default
    return value if isinstance(value, str) else _fail(row, f"column {column!r}", value, "text (a string)")


def _list(row: Row, column: str) -> list[object]:
    """A list, also when written as JSON in a string, which is all that CSV can hold."""
    value = row.value.get(column)
    if isinstance(value, str):
        value = _from_json(value)
    return value if isinstance(value, list) else _fail(row, f"column {column!r}", row.value.get(column), "a list")


def _from_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _without_none(value: object) -> object:
    """Drop absent fields: Parquet and Arrow give every record the fields of all records."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


# --- formats of messages ---


def _messages(row: Row, column: str) -> tuple[list[Message], list[float]]:
    raw = _list(row, column)
    if not raw:
        _fail(row, f"column {column!r}", raw, "at least one message")
    pairs = [_message(row, f"{column}[{i}]", item) for i, item in enumerate(raw)]
    return [message for message, _ in pairs], [weight for _, weight in pairs]


def _message(row: Row, name: str, raw: object) -> tuple[Message, float]:
    if not isinstance(raw, dict):
        _fail(row, name, raw, "a message like {'role': 'user', 'content': '...'}")
    fields = cast("Mapping[str, object]", _without_none(raw))
    role = fields.get("role", fields.get("from"))
    if not isinstance(role, str) or not role:
        _fail(row, f"{name}.role", role, "a role such as user, assistant, system or tool")
    content = fields.get("content", fields.get("value"))
    message: Message = {key: value for key, value in fields.items() if key not in _OWN_KEYS}
    if role == "function_call":
        role = "assistant"
        calls = _calls(content)
        message |= {"tool_calls": calls} if calls else {}
        content = "" if calls else content
    role = _ROLES.get(role, role)
    text, more = _content(row, name, content, bool(message.get("tool_calls")))
    weight = _weight(row, name, fields, 1.0 if role == "assistant" else 0.0)
    return {"role": role, "content": text} | message | more, weight


def _content(row: Row, name: str, content: object, may_be_absent: bool) -> tuple[str, Message]:
    """The text of a message, and what its parts hold beside text: reasoning and tool calls."""
    if isinstance(content, str):
        return content, {}
    if content is None and may_be_absent:
        return "", {}
    if not isinstance(content, list):
        _fail(row, f"{name}.content", content, "text, or a list of parts like {'type': 'text', 'text': '...'}")
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[object] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        value = (part.get(str(kind)) or part.get("value") or part.get("text") or "") if isinstance(part, dict) else None
        found = _calls(value) if kind == "tool_call" else []
        if kind in ("text", "reasoning", "thinking") and isinstance(value, str):
            (texts if kind == "text" else reasoning).append(value)
        elif found:
            calls += found
        else:
            _fail(
                row,
                f"{name}.content[{i}]",
                part,
                "a part of type text, reasoning or tool_call with its value; a language model reads no other",
            )
    more: Message = {"reasoning_content": "".join(reasoning)} if reasoning else {}
    return "".join(texts), more | ({"tool_calls": calls} if calls else {})


def _calls(value: object) -> list[object]:
    """Tool calls in the shape templates know, from one call or a list of them, also as JSON in a string; [] if it is none."""
    parsed = _from_json(value) if isinstance(value, str) else value
    calls = parsed if isinstance(parsed, list) else [parsed]
    functions = [call.get("function", call) if isinstance(call, dict) else None for call in calls]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        return []
    return [{"type": "function", "function": _arguments_parsed(cast("dict[str, object]", function))} for function in functions]


def _arguments_parsed(function: dict[str, object]) -> dict[str, object]:
    arguments = function.get("arguments", {})
    parsed = _from_json(arguments) if isinstance(arguments, str) else arguments
    return {"name": function["name"], "arguments": parsed if isinstance(parsed, dict) else arguments}


def _weight(row: Row, name: str, fields: Mapping[str, object], default: float) -> float:
    for key in _WEIGHT_KEYS:
        if key in fields:
            value = fields[key]
            if not isinstance(value, (bool, int, float)) or not math.isfinite(value) or value < 0:
                _fail(row, f"{name}.{key}", value, "a number of at least 0, or true or false")
            return float(value)
    return default


def _tools(row: Row) -> list[object] | None:
    raw = row.value.get("tools")
    parsed = _from_json(raw) if isinstance(raw, str) and raw.strip() else []
    tools = parsed if isinstance(raw, str) else raw or []
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        _fail(row, "column 'tools'", raw, "a list of tools like {'name': ..., 'parameters': ...}, also as JSON in a string")
    clean = cast("list[dict[str, object]]", _without_none(tools))
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in clean] or None


def _alpaca(row: Row) -> Chat:
    instruction, given = _text(row, "instruction"), _text(row, "input", "")
    system = _text(row, "system", "")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    if row.value.get("history"):
        for i, pair in enumerate(_list(row, "history")):
            if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
                _fail(row, f"history[{i}]", pair, "a pair [question, answer] of strings")
            messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = f"{instruction}\n{given}" if given else instruction
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": _text(row, "output")})
    return Chat(messages, [0.0] * (len(messages) - 1) + [1.0], _tools(row))


def _prompt_completion(row: Row) -> Chat | Text:
    prompt, completion = row.value["prompt"], row.value["completion"]
    if isinstance(prompt, list) != isinstance(completion, list):
        _fail(row, "column 'completion'", completion, f"a {'list of messages' if isinstance(prompt, list) else 'string'} like the prompt")
    if not isinstance(prompt, list):
        return Text(_text(row, "prompt"), _text(row, "completion"))
    asked, _ = _messages(row, "prompt")
    answered, weights = _messages(row, "completion")
    return Chat(asked + answered, [0.0] * len(asked) + weights, _tools(row))


# --- token ids ---


def _tokens(row: Row) -> Tokens:
    ids = _integers(row, "input_ids")
    labels = _integers(row, "labels") if row.value.get("labels") is not None else ids
    mask = _integers(row, "attention_mask") if row.value.get("attention_mask") is not None else [1] * len(ids)
    if not ids:
        _fail(row, "column 'input_ids'", ids, "at least one token id")
    for column, values in (("labels", labels), ("attention_mask", mask)):
        if len(values) != len(ids):
            raise DataError(f"{row.place}: {column} has {len(values)} values where input_ids has {len(ids)}; expected one a token")
    for i, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if token < 0:
            _fail(row, f"input_ids[{i}]", token, "a token id of at least 0")
        if label not in (token, IGNORED_LABEL):
            _fail(row, f"labels[{i}]", label, f"{IGNORED_LABEL} (no loss) or input_ids[{i}] = {token} (labels are not shifted)")
    kept = [i for i, keep in enumerate(mask) if keep]  # padding is dropped: samples have their own lengths here
    return Tokens([ids[i] for i in kept], [0.0 if labels[i] == IGNORED_LABEL else 1.0 for i in kept])


def _integers(row: Row, column: str) -> list[int]:
    values = _list(row, column)
    for i, value in enumerate(values):
        if type(value) is not int:  # not isinstance: True is an int
            _fail(row, f"{column}[{i}]", value, "an integer")
    return cast("list[int]", values)
