"""Which columns of a row each format reads, which must not be ignored, and which stay unused.

A column that says which answers are wanted changes what a row means: imitating an unwanted answer is the opposite of what the user
wants. Only this module rejects such rows, so it also admits the objectives that learn from these columns.
"""

from __future__ import annotations

from typing import Literal

from tlora.data.formats import COLUMNS, VERDICT_COLUMNS, Format, detect, verdict_of
from tlora.data.rows import Row
from tlora.errors import DataError
from tlora.job import Rows

OPTIONAL: dict[Format, tuple[str, ...]] = {
    "tokenized": ("labels", "attention_mask"),
    "chat": ("tools",),
    "sharegpt": ("tools",),
    "prompt_completion": ("tools",),
    "alpaca": ("input", "system", "history", "tools"),
    "text": (),
    "preference": ("prompt", "conversations", "tools"),
}
PAIR_COLUMNS = ("chosen", "rejected", "rejected_response", "rejected_messages")  # of TRL and LLaMA-Factory; the last two of MS-SWIFT


def format_of(row: Row, data_format: Format | Literal["auto"], rows: Rows = "samples") -> Format:
    """The format to read `row` by. Raises DataError for columns of no format, and for columns that say
    which answers are wanted where `rows` are others.
    """
    if rows == "pairs":
        if any(_is_empty(row.value.get(column)) for column in COLUMNS["preference"]):
            found = ", ".join(map(str, row.value)) or "none"
            raise DataError(
                f"{row.place}: a job that learns from pairs needs the columns 'chosen' and 'rejected' (found: {found}). "
                "Name two answers so in each row, or choose objective: sft"
            )
        return "preference"
    if pair := [column for column in PAIR_COLUMNS if not _is_empty(row.value.get(column))]:
        raise DataError(
            f"{row.place}: {_named(pair)}: wanted answers beside unwanted ones (preference data). Set objective: dpo or "
            "orpo to learn from them; to imitate the wanted ones, write each into its row as the answer, and remove these columns"
        )
    found = detect(row) if data_format == "auto" else data_format
    has_answer, verdict = found not in ("text", "tokenized"), verdict_of(row)  # without an answer, a label is a class
    if rows == "labelled" and not (has_answer and verdict is not None):
        columns = ", ".join(map(str, row.value)) or "none"
        raise DataError(
            f"{row.place}: a job that learns from labelled answers needs a prompt, its answer, and a column 'label' with true or false "
            f"(found: {columns}). Label each row so, or choose objective: sft"
        )
    if rows == "samples" and has_answer and verdict is not None:
        column = next(column for column in VERDICT_COLUMNS if not _is_empty(row.value.get(column)))
        raise DataError(
            f"{row.place}: column {column!r} is {row.value[column]!r}: it says whether the answer is wanted (preference data), and "
            "to imitate every answer would be wrong. Set objective: kto to learn from it, or keep the rows with wanted answers and "
            "remove the column; rename it if it means something else"
        )
    return found


def unused_columns(row: Row, data_format: Format, rows: Rows = "samples") -> list[str]:
    """Columns of `row` that hold something which `data_format` does not read."""
    used = {*COLUMNS[data_format], *OPTIONAL[data_format], *(VERDICT_COLUMNS if rows == "labelled" else ())}
    if data_format == "prompt_completion" and isinstance(row.value.get("prompt"), str):
        used.remove("tools")  # plain text goes through no template
    return [column for column, value in row.value.items() if column not in used and not _is_empty(value)]


def _is_empty(value: object) -> bool:
    """Absent: Parquet gives every row the columns of all rows, and CSV can only write ""."""
    return value is None or value == "" or value == [] or value == {}


def _named(columns: list[str]) -> str:
    return ("columns " if len(columns) > 1 else "column ") + ", ".join(map(repr, columns))
