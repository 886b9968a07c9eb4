"""What the columns of a row mean: the data formats, and the examples, pairs and labelled answers that their rows become.

`Chat` goes through a template, `Text` and `Segments` are tokenized as they stand, `Tokens` are ready. Reads no file (`rows.py`) and
renders nothing (`chat.py`); messages are read by `messages.py`, pairs by `pairs.py`, token ids by `tokenized.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from tlora.data import pairs
from tlora.data.cells import fail, found_columns, list_of, text_of
from tlora.data.examples import Chat, Example, Labelled, Message, Pair, Segments, Text, Tokens
from tlora.data.messages import notes_on_tools, read_history, read_messages, system_of, template_kwargs_of, tools_of, with_system
from tlora.data.rows import Row
from tlora.data.tokenized import read_tokens
from tlora.errors import DataError

Format = Literal["chat", "prompt_completion", "text", "alpaca", "sharegpt", "query_response", "segments", "tokenized", "preference"]
VERDICT_COLUMNS = ("label", "kto_tag")  # of TRL and MS-SWIFT; of LLaMA-Factory
_VERDICTS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
# Of samples, in the order of detection: sets often carry a rendered `text` or a bare `prompt` besides their real columns.
COLUMNS: dict[Format, tuple[str, ...]] = {
    "tokenized": ("input_ids",),
    "chat": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "query_response": ("query", "response"),  # MS-SWIFT
    "segments": ("segments",),  # axolotl's input_output
    "text": ("text",),
    "preference": ("chosen", "rejected"),
}


def detect(row: Row) -> Format:
    """The format whose columns `row` has."""
    samples: dict[Format, tuple[str, ...]] = {name: columns for name, columns in COLUMNS.items() if name != "preference"}
    for name, columns in samples.items():
        if all(column in row.value for column in columns):
            return name
    known = "; ".join(f"{name}: {' + '.join(columns)}" for name, columns in samples.items())
    wrapped = next((key for key, value in row.value.items() if isinstance(value, list) and value and isinstance(value[0], dict)), None)
    inside = "" if wrapped is None else f". {wrapped!r} holds a list of objects: if those are the rows, the file must be that list alone"
    found = f"no data format has the columns {found_columns(row)}" if row.value else "the row has no columns"
    remedy = "rename them to" if row.value else "write"
    raise DataError(f"{row.place}: {found}; {remedy} those of one format ({known}){inside}")


def read_examples(row: Row, data_format: Format) -> list[Example]:
    """The examples in `row`: one, or the samples of a packed row. Raises DataError as `read_example` does."""
    _check_columns(row, data_format)
    return list(read_tokens(row)) if data_format == "tokenized" else [read_example(row, data_format)]


def read_example(row: Row, data_format: Format) -> Example:
    """The example in `row`, the first one of a packed row. Raises DataError with file, row, column, the value and what was expected."""
    _check_columns(row, data_format)
    if data_format == "tokenized":
        return read_tokens(row)[0]
    if data_format == "text":
        return Text("", text_of(row, "text"))
    if data_format == "segments":
        return _segments(row)
    if data_format == "prompt_completion" and not isinstance(row.value["prompt"], list):
        return _plain(row)
    chat, tools = with_system(row, _chat(row, data_format)), tools_of(row)
    return replace(chat, tools=tools, notes=chat.notes + notes_on_tools(tools), template_kwargs=template_kwargs_of(row))


def read_pair(row: Row) -> Pair:
    """The pair in `row`: a prompt with two answers, or two chats that begin with it. Raises DataError as `read_example` does."""
    return pairs.read_pair(row, lambda sample: read_example(sample, detect(sample)))


def read_labelled(row: Row, data_format: Format) -> Labelled:
    """The last answer in `row`, and whether its label calls it wanted. Raises DataError as `read_example` does."""
    example, wanted = read_example(row, data_format), verdict_of(row)
    if wanted is None or isinstance(example, Tokens | Segments):
        fail(row, "column 'label'", row.value.get("label"), "true or false, next to a prompt and its answer")
    if isinstance(example, Text):
        return Labelled(example, wanted)
    last = max((i for i, message in enumerate(example.messages) if message["role"] != "assistant"), default=-1)
    return Labelled(replace(example, weights=[0.0] * (last + 1) + example.weights[last + 1 :]), wanted)


def verdict_of(row: Row) -> bool | None:
    """Whether the row's label calls its answer wanted; None without a label, or with one of another meaning."""
    values = (row.value.get(column) for column in VERDICT_COLUMNS)
    verdicts = (_VERDICTS.get(str(value).strip().lower()) for value in values if isinstance(value, bool | int | float | str))
    return next((verdict for verdict in verdicts if verdict is not None), None)


def _check_columns(row: Row, data_format: Format) -> None:
    for column in COLUMNS[data_format]:
        if column not in row.value:
            names = found_columns(row)
            raise DataError(f"{row.place}: column {column!r} is missing (found: {names}); every row of format {data_format} needs it")


def _chat(row: Row, data_format: Format) -> Chat:
    if data_format == "alpaca":
        return _asked_and_answered(row, "instruction", "output")
    if data_format == "query_response":
        return _asked_and_answered(row, "query", "response")
    if data_format != "prompt_completion":
        column = COLUMNS[data_format][0]
        return read_messages(row, column, row.value[column])
    if not isinstance(row.value["completion"], list):
        fail(row, "column 'completion'", row.value["completion"], "a list of messages like the prompt")
    asked, answered = (read_messages(row, column, row.value[column]) for column in ("prompt", "completion"))
    weights = [0.0] * len(asked.messages) + answered.weights
    return Chat(asked.messages + answered.messages, weights, notes=asked.notes + answered.notes)


def _asked_and_answered(row: Row, question: str, answer: str) -> Chat:
    """A chat whose answers of earlier rounds are trained too, as in LLaMA-Factory and MS-SWIFT."""
    asked, before = text_of(row, question), read_history(row)
    given = text_of(row, "input", "") if question == "instruction" else ""
    messages: list[Message] = [
        *before.messages,
        {"role": "user", "content": f"{asked}\n{given}" if given else asked},
        {"role": "assistant", "content": text_of(row, answer)},
    ]
    return Chat(messages, [*before.weights, 0.0, 1.0])


def _plain(row: Row) -> Text:
    if isinstance(row.value["completion"], list):
        fail(row, "column 'completion'", row.value["completion"], "a string like the prompt")
    if system := system_of(row):
        expected = "none with plain text, which has no place for it. Write it into 'prompt', or give prompt and completion as messages"
        fail(row, "the system prompt", system, expected)
    return Text(text_of(row, "prompt"), text_of(row, "completion"))


def _segments(row: Row) -> Segments:
    texts: list[str] = []
    weights: list[float] = []
    for i, segment in enumerate(list_of(row, "segments")):
        text, label = (segment.get("text"), segment.get("label")) if isinstance(segment, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(label, bool | int) or label not in (0, 1):
            fail(row, f"segments[{i}]", segment, "a segment like {'label': true, 'text': '...'}, where true is trained")
        texts.append(text)
        weights.append(float(label))
    return Segments(texts, weights) if texts else fail(row, "column 'segments'", texts, "at least one segment")
