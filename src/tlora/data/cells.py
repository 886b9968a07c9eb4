"""Values in a row, checked for their type; a list may also be JSON in a string, as in CSV."""

from __future__ import annotations

from typing import NoReturn, cast

from tlora.data.rows import Row
from tlora.errors import DataError, shown
from tlora.json_file import DECODER, KeyTwiceError


def fail(row: Row, name: str, value: object, expected: str) -> NoReturn:
    """Raise a DataError: the value called `name` in `row` is not what was `expected`, or it is JSON in a string with a key twice."""
    try:
        DECODER.decode(value if isinstance(value, str) else "")
    except KeyTwiceError as error:
        raise DataError(f"{row.place}: {name}: {error}") from None
    except (ValueError, RecursionError):
        pass
    raise DataError(f"{row.place}: {name} is {shown(value)} ({type(value).__name__}); expected {expected}")


def is_empty(value: object) -> bool:
    """Absent: Parquet gives every row the columns of all rows, and CSV can only write ""."""
    return value is None or value == "" or value == [] or value == {}


def found_columns(row: Row) -> str:
    return ", ".join(map(str, row.value)) or "none"


def text_of(row: Row, column: str, default: str | None = None) -> str:
    value = row.value.get(column)
    if value is None and default is not None:
        return default
    return value if isinstance(value, str) else fail(row, f"column {column!r}", value, "text (a string)")


def list_of(row: Row, column: str) -> list[object]:
    return as_list(row, f"column {column!r}", row.value.get(column))


def as_list(row: Row, name: str, value: object) -> list[object]:
    items = from_json(value) if isinstance(value, str) else value
    return items if isinstance(items, list) else fail(row, name, value, "a list")


def integers_of(row: Row, column: str) -> list[int]:
    values = list_of(row, column)
    for i, value in enumerate(values):
        if type(value) is not int:  # not isinstance: True is an int
            fail(row, f"{column}[{i}]", value, "an integer")
    return cast("list[int]", values)


def from_json(text: str) -> object:
    """The value of the JSON in `text`; None if it is not JSON, or has a key twice (`fail` tells them apart)."""
    try:
        return DECODER.decode(text)
    except (KeyTwiceError, ValueError, RecursionError):
        return None
