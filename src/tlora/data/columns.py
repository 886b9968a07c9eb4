"""Which columns of a row each format reads, which must not be ignored, and which stay unused.

A column that says which answers are wanted changes what a row means: imitating an unwanted answer is the opposite of what the user
wants. So does one that says what is trained. Only this module rejects such rows, so it also admits the objectives that learn from them.
"""

from __future__ import annotations

from typing import Literal

from tlora.data import tokenized
from tlora.data.cells import found_columns, is_empty
from tlora.data.formats import COLUMNS, VERDICT_COLUMNS, Format, detect, verdict_of
from tlora.data.messages import SYSTEM_COLUMNS, TOOL_COLUMNS, WEIGHT_KEYS, says_what_is_trained
from tlora.data.pairs import ANSWERS, PAIR_COLUMNS, answer_columns, columns_read, refuse_empty_answer
from tlora.data.rows import Row
from tlora.data.tables import refuse_table
from tlora.errors import DataError
from tlora.job import Rows

_OF_CHATS = (*TOOL_COLUMNS, *SYSTEM_COLUMNS, "chat_template_kwargs")
OPTIONAL: dict[Format, tuple[str, ...]] = {
    "tokenized": tokenized.OPTIONAL,
    "chat": _OF_CHATS,
    "sharegpt": _OF_CHATS,
    "prompt_completion": _OF_CHATS,
    "alpaca": ("input", "history", *_OF_CHATS),
    "query_response": ("history", *_OF_CHATS),
    "segments": (),
    "text": (),
    "preference": ("prompt", "conversations", *_OF_CHATS),
}
_TOKENIZERS_OWN = ("special_tokens_mask", "token_type_ids")  # which tokenizers write; they say nothing of the loss
_OTHER_MODALITIES = ("image", "images", "video", "videos", "audio", "audios")
_OF_A_TREE = ("message_tree_id", "parent_id")  # of Open Assistant's single messages


def format_of(row: Row, data_format: Format | Literal["auto"], rows: Rows = "samples") -> Format:
    """The format to read `row` by. Raises DataError for columns of no format, for a whole table in place of a row, and for columns that
    say which answers are wanted if `rows` does not learn from them.
    """
    refuse_table(row, (*COLUMNS.values(), PAIR_COLUMNS))
    row_format = _format_of(row, data_format, rows)
    seen = [column for column in _OTHER_MODALITIES if not is_empty(row.value.get(column))]
    if seen and row_format not in ("text", "segments", "tokenized"):  # of a plain text, an image's address is but one more fact
        raise DataError(
            f"{row.place}: {_named(seen)}: only text is read, and the answer may be to what is seen or heard there. Take out such rows, or "
            "remove the column to train on their text alone"
        )
    return row_format


def _format_of(row: Row, data_format: Format | Literal["auto"], rows: Rows) -> Format:
    if rows == "pairs":
        if answer_columns(row) is None:
            refuse_empty_answer(row)
            others = " or ".join(f"{wanted!r} and {unwanted!r}" for wanted, unwanted in ANSWERS[1:] if wanted)
            raise DataError(
                f"{row.place}: a job that learns from pairs needs the columns 'chosen' and 'rejected' (found: {found_columns(row)}). "
                f"Name two answers so in each row (or {others}, or 'rejected_response' next to the wanted one), or choose objective: sft"
            )
        return "preference"
    if pair := [column for column in PAIR_COLUMNS if not is_empty(row.value.get(column))]:
        raise DataError(
            f"{row.place}: {_named(pair)}: wanted answers next to unwanted ones (preference data). Set objective: dpo or "
            "orpo to learn from them; to imitate the wanted ones, write each into its row as the answer, and remove these columns"
        )
    row_format = detect(row) if data_format == "auto" else data_format
    _refuse_other_meanings(row, row_format, data_format)
    has_answer, verdict = row_format not in ("text", "segments", "tokenized"), verdict_of(row)  # without an answer, a label is a class
    if rows == "labelled" and not (has_answer and verdict is not None):
        raise DataError(
            f"{row.place}: a job that learns from labelled answers needs a prompt, its answer, and a column 'label' with true or false "
            f"(found: {found_columns(row)}). Label each row so, or choose objective: sft"
        )
    if rows == "samples" and has_answer and verdict is not None:
        column = next(column for column in VERDICT_COLUMNS if not is_empty(row.value.get(column)))
        raise DataError(
            f"{row.place}: column {column!r} is {row.value[column]!r}: it says whether the answer is wanted (preference data), and "
            "to imitate every answer would be wrong. Set objective: kto to learn from it, or keep the rows with wanted answers and "
            "remove the column; rename it if it means something else"
        )
    return row_format


def _refuse_other_meanings(row: Row, row_format: Format, asked: str) -> None:
    """Raises DataError for a row with the columns of a format and others that change its meaning."""
    if asked == "auto" and row_format == "text" and "role" in row.value and any(column in row.value for column in _OF_A_TREE):
        raise DataError(
            f"{row.place}: one message of a tree (columns {found_columns(row)}), not a text to train on: join each thread to one row "
            "with the column 'messages', or set format: text to train on each message as a text"
        )
    for column in unused_columns(row, row_format):
        value = row.value[column]
        is_number = not isinstance(value, bool) and isinstance(value, (int, float))  # such as a "train_idx" of 0
        if column not in _TOKENIZERS_OWN and says_what_is_trained(column, value) and (column in WEIGHT_KEYS or not is_number):
            known = (
                ", ".join((*tokenized.MASKS, *tokenized.SCALES, "labels"))
                if row_format == "tokenized"
                else "the messages' own key 'weight'"
            )
            raise DataError(
                f"{row.place}: column {column!r} seems to say what is trained, and format {row_format} does not read it. "
                f"Say it by {known}, rename the column if it means something else, or remove it"
            )


def unused_columns(row: Row, data_format: Format, rows: Rows = "samples") -> list[str]:
    """Columns of `row` that hold something which `data_format` does not read."""
    used = {*OPTIONAL[data_format], *(VERDICT_COLUMNS if rows == "labelled" else ())}
    if data_format != "preference":
        used |= {*COLUMNS[data_format]}
    elif (answers := answer_columns(row)) is not None and answers[0] is None:
        sample = detect(row)
        used = {*COLUMNS[sample], *OPTIONAL[sample], answers[1]}
    else:
        used = columns_read(row) | {*_OF_CHATS}
    if data_format == "prompt_completion" and isinstance(row.value.get("prompt"), str):
        used -= {*TOOL_COLUMNS, "chat_template_kwargs"}  # plain text goes through no template
    return [column for column, value in row.value.items() if column not in used and not is_empty(value)]


def _named(columns: list[str]) -> str:
    return ("columns " if len(columns) > 1 else "column ") + ", ".join(map(repr, columns))
