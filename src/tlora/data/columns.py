"""Which columns of a row each format reads, which must not be ignored, and which stay unused.

A column that says which answers are wanted changes what a row means: to imitate an unwanted answer is the opposite of what was
ordered. Such rows are refused here and nowhere else, so an objective that learns from these columns is let through here.
"""

from __future__ import annotations

from typing import Literal

from tlora.data.formats import COLUMNS, Format, Rows, detect
from tlora.data.rows import Row
from tlora.errors import DataError

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
VERDICT_COLUMNS = ("label", "kto_tag")  # of TRL and MS-SWIFT; of LLaMA-Factory
_VERDICTS = ("true", "false", "0", "1", "0.0", "1.0")


def format_of(row: Row, data_format: Format | Literal["auto"], rows: Rows = "samples") -> Format:
    """The format to read `row` by. Raises DataError for columns of no format, for pairs where samples are wanted, and the reverse."""
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
    for column in () if found in ("text", "tokenized") else VERDICT_COLUMNS:  # without an answer, a label is a class
        value = row.value.get(column)
        if isinstance(value, bool | int | float | str) and str(value).strip().lower() in _VERDICTS:
            raise DataError(
                f"{row.place}: column {column!r} is {value!r}: it says whether the answer is wanted (preference data), and training would "
                "imitate every answer. Keep the rows with wanted answers and remove the column, or rename it if it means something else"
            )
    return found


def unused_columns(row: Row, data_format: Format) -> list[str]:
    """Columns of `row` that hold something which `data_format` does not read."""
    used = {*COLUMNS[data_format], *OPTIONAL[data_format]}
    if data_format == "prompt_completion" and isinstance(row.value.get("prompt"), str):
        used.remove("tools")  # plain text goes through no template
    return [column for column, value in row.value.items() if column not in used and not _is_empty(value)]


def _is_empty(value: object) -> bool:
    """Absent: Parquet gives every row the columns of all rows, and CSV can only write ""."""
    return value is None or value == "" or value == [] or value == {}


def _named(columns: list[str]) -> str:
    return ("columns " if len(columns) > 1 else "column ") + ", ".join(map(repr, columns))
