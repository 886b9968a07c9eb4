"""Rows with a wanted and an unwanted answer, in the spellings of TRL, OpenAI, LLaMA-Factory, MS-SWIFT and axolotl, read as pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import cast

from tlora.data.cells import fail, found_columns, from_json, is_empty, text_of
from tlora.data.examples import Chat, Example, Message, Pair, Text
from tlora.data.messages import read_history, read_messages, read_tools, read_turns, system_of, template_kwargs_of, tools_of, with_system
from tlora.data.rows import Row
from tlora.errors import DataError

# The wanted and the unwanted answer. With None the wanted answer is that of the row, read by the other formats.
ANSWERS: tuple[tuple[str | None, str], ...] = (
    ("chosen", "rejected"),  # TRL, LLaMA-Factory, axolotl
    ("preferred_output", "non_preferred_output"),  # OpenAI
    ("chosen_messages", "rejected_messages"),  # LLaMA-Factory
    ("chosen_response", "rejected_response"),  # axolotl (Argilla)
    (None, "rejected_response"),  # MS-SWIFT
    (None, "rejected_messages"),  # MS-SWIFT
)
PAIR_COLUMNS = tuple(dict.fromkeys(column for columns in ANSWERS for column in columns if column))
_PROMPTS = ("conversations", "prompt", "question", "instruction", "messages")


def answer_columns(row: Row) -> tuple[str | None, str] | None:
    """The columns of the two answers that `row` has; None if it has no pair."""

    def has(column: str | None) -> bool:
        return column is None or not is_empty(row.value.get(column))

    return next((columns for columns in ANSWERS if all(map(has, columns))), None)


def refuse_empty_answer(row: Row) -> None:
    """Raise a DataError for a row without a pair that has the columns of two answers, one of them empty."""
    for columns in ANSWERS:
        answers = [column for column in columns if column and column in row.value]
        empty = [column for column in answers if is_empty(row.value[column])]
        if len(answers) == 2 and len(empty) == 1:
            fail(row, f"column {empty[0]!r}", row.value[empty[0]], f"an answer, as column {(set(answers) - set(empty)).pop()!r} has one")


def read_pair(row: Row, read_wanted: Callable[[Row], Example]) -> Pair:
    """The pair in `row`: a prompt as text or as messages with two answers, or two whole chats, whose common beginning is the prompt.
    `read_wanted` reads the row as a sample, where the wanted answer is that of the sample. Raises DataError.
    """
    columns = answer_columns(row)
    if columns is None:
        refuse_empty_answer(row)
        missing = "rejected" if not is_empty(row.value.get("chosen")) else "chosen"
        raise DataError(f"{row.place}: column {missing!r} is missing (found: {found_columns(row)}); every row needs two answers")
    wanted, unwanted = columns
    if wanted is None:
        return _beside_sample(row, read_wanted(row), unwanted)
    if wanted == "preferred_output":
        return _of_openai(row)
    asked = _asked(row)
    if isinstance(asked, str):
        if isinstance(row.value[wanted], str):
            return _of_texts(row, asked, wanted, unwanted)
        asked = _common_start(row, wanted, unwanted, asked)
    elif asked is None:
        asked = _common_start(row, wanted, unwanted, None)
    return Pair(_answered(row, asked, wanted, row.value[wanted]), _answered(row, asked, unwanted, row.value[unwanted]))


def columns_read(row: Row) -> set[str]:
    """The columns of `row` that `read_pair` reads, where the wanted answer is not that of a sample."""
    prompt = next((column for column in _PROMPTS if not is_empty(row.value.get(column))), "prompt")
    wanted, unwanted = answer_columns(row) or ("chosen", "rejected")
    more = {"question": {"history"}, "instruction": {"input", "history"}}.get(prompt, set[str]())
    asked = {"input"} if wanted == "preferred_output" else {prompt, *more}
    return {str(wanted), unwanted, *asked}


def _asked(row: Row) -> Chat | str | None:
    """The prompt: messages; text, which is no chat unless the answers are; None if both answers begin with it."""
    column = next((column for column in _PROMPTS if not is_empty(row.value.get(column))), None)
    if column is None:
        return "" if row.value.get("prompt") == "" else None
    value = row.value[column]
    if column == "prompt" and isinstance(value, str):
        return value
    if column == "question" and isinstance(value, str):
        return _as_user(row, value)
    if column == "instruction":
        given = text_of(row, "input", "")
        return _as_user(row, text_of(row, column) + (f"\n{given}" if given else ""))
    asked = read_messages(row, column, value)
    # Some sets repeat the wanted chat as `messages`; both answers begin with the prompt then.
    repeats = column == "messages" and asked.messages[-1]["role"] == "assistant"
    return None if repeats else with_system(row, asked)


def _as_user(row: Row, text: str) -> Chat:
    before = read_history(row)
    chat = Chat([*before.messages, {"role": "user", "content": text}], [0.0] * (len(before.messages) + 1))
    return with_system(row, chat)


def _of_texts(row: Row, prompt: str, wanted: str, unwanted: str) -> Pair:
    if system := system_of(row):
        fail(row, "the system prompt", system, "none with a plain text, which has no place for it: write it into 'prompt', or use messages")
    return Pair(Text(prompt, text_of(row, wanted)), Text(prompt, text_of(row, unwanted)))


def _of_openai(row: Row) -> Pair:
    given = row.value.get("input")
    given = from_json(given) if isinstance(given, str) else given
    if not isinstance(given, dict) or not given.get("messages"):
        fail(row, "column 'input'", row.value.get("input"), "a mapping with the prompt's messages, {'messages': [...]}")
    asked = with_system(row, read_messages(row, "input.messages", given["messages"]))
    tools = read_tools(row, "input.tools", given.get("tools")) or tools_of(row)
    chosen, rejected = (_answered(row, asked, column, row.value[column]) for column in ("preferred_output", "non_preferred_output"))
    return Pair(replace(chosen, tools=tools), replace(rejected, tools=tools))


def _beside_sample(row: Row, wanted: Example, unwanted: str) -> Pair:
    """The wanted answer is the last of the sample; the unwanted one replaces it."""
    value = row.value[unwanted]
    if isinstance(wanted, Text):
        return Pair(wanted, Text(wanted.prompt, text_of(row, unwanted)))
    if not isinstance(wanted, Chat) or wanted.messages[-1]["role"] != "assistant":
        fail(row, f"column {unwanted!r}", value, "a chat next to it that ends in the wanted answer")
    if unwanted == "rejected_messages":
        rejected = with_system(row, read_messages(row, unwanted, value))
        asked = _shared(wanted.messages, rejected.messages)
    else:
        last = max((i for i, message in enumerate(wanted.messages) if message["role"] == "user"), default=-1)
        count = len(wanted.messages) - 1 if isinstance(value, str) else last + 1
        asked = wanted.messages[:count]
        rejected = _answered(row, Chat(asked, [0.0] * count), unwanted, value)
    if not asked:
        fail(row, f"column {unwanted!r}", value, "an answer to the same prompt as the row's own")
    heads = [0.0] * len(asked)
    chosen = replace(wanted, weights=heads + wanted.weights[len(asked) :])
    rejected = replace(rejected, weights=heads + rejected.weights[len(asked) :], tools=wanted.tools)
    for column, answer in (("the row's own answer", chosen), (f"column {unwanted!r}", rejected)):
        if not any(answer.weights):
            fail(row, column, answer.messages[len(asked) :], "an answer of the assistant, after the prompt")
    return Pair(chosen, rejected)


def _answered(row: Row, asked: Chat, column: str, value: object) -> Chat:
    """The chat that ends in the answer of `column`: a text, a message, or messages, which may begin with those of the prompt."""
    value = [{"role": "assistant", "content": value}] if isinstance(value, str) else value
    turns = cast("list[object]", value if isinstance(value, list) else [value])
    answer = read_turns(row, column, turns)
    prompts = [asked.messages, [message for message in asked.messages if message["role"] != "system"]]
    begun = next((len(prompt) for prompt in prompts if answer.messages[: len(prompt)] == prompt), 0)
    messages, weights = answer.messages[begun:], answer.weights[begun:]
    if not any(weights):
        fail(row, f"column {column!r}", row.value[column], "an answer of the assistant, after the prompt")
    weights = [0.0] * len(asked.messages) + weights
    return Chat(asked.messages + messages, weights, tools_of(row), asked.notes + answer.notes, template_kwargs_of(row))


def _common_start(row: Row, wanted: str, unwanted: str, prompt: str | None) -> Chat:
    """The messages with which both chats begin; a `prompt` as text must be the last of these."""
    if not isinstance(row.value[wanted], list):
        fail(row, "column 'prompt'", prompt, "the prompt as text or messages, or two chats that begin with it")
    chosen, rejected = (with_system(row, read_messages(row, column, row.value[column])) for column in (wanted, unwanted))
    asked = _shared(chosen.messages, rejected.messages)
    if asked == chosen.messages == rejected.messages:  # equal answers: `build.py` counts them
        asked = asked[: 1 + max((i for i, message in enumerate(asked) if message["role"] != "assistant"), default=-1)]
    if not asked or (prompt and asked[-1]["content"] != prompt):
        fail(row, "column 'prompt'", prompt, "the prompt as text or messages, or two chats that begin with it")
    return Chat(asked, [0.0] * len(asked))


def _shared(first: list[Message], second: list[Message]) -> list[Message]:
    return [message for message, _ in takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False))]
