"""Whole tables in one JSON object, as programs write them, in place of rows. They are refused by name; nothing is read from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import cast

from tlora.data.cells import is_empty
from tlora.data.rows import Row
from tlora.errors import DataError, cut

_Found = tuple[str, str]  # what it is, and an expression for its rows where `t` is the table


def refuse_table(row: Row, formats: Collection[Sequence[str]]) -> None:
    """Raises DataError for a table in place of a row, with a command that writes its rows; `formats` are the columns of each format.

    Rows too may have nothing but lists, of messages or of numbers, and more columns of texts: of a table, each column that some format
    reads is a list of texts or of lists.
    """
    columns = {name: value for name, value in row.value.items() if not is_empty(value)}
    if not columns or not all(isinstance(value, list | dict) for value in columns.values()):
        return
    found = _by_rows(columns, formats) or _by_columns(columns, {name for names in formats for name in names})
    if found is not None:
        form, rows = found
        script = f'import json; t = json.load(open("OLD")); json.dump({rows}, open("NEW.json", "w"))'
        raise DataError(
            f"{row.place}: a whole table in one object: {form}. Each row must be an object of its own, on its own line or in one array "
            f"of all; convert it: `python -c '{script}'`"
        )


def _by_columns(columns: Mapping[str, object], known: Collection[str]) -> _Found | None:
    """If each column holds the values of all rows: in a list, or by index, as pandas' `to_json` writes it."""
    read = [value for name, value in columns.items() if name in known]
    lists = [value for value in columns.values() if isinstance(value, list)]
    alike = len(lists) == len(columns) and len({len(each) for each in lists}) == 1
    if alike and all(isinstance(cell, str | list) for value in read or lists for cell in cast("list[object]", value)):
        return f"each column ({_names(columns)}) is a list with a value for each row", "[dict(zip(t, r)) for r in zip(*t.values())]"
    if read and _same_keys(columns.values()):
        form = f"each column ({_names(columns)}) is an object with a value for each row"
        return form, "[dict(zip(t, r)) for r in zip(*(c.values() for c in t.values()))]"
    return None


def _by_rows(columns: Mapping[str, object], formats: Collection[Sequence[str]]) -> _Found | None:
    """If it holds rows: by index, or as lists of values beside the columns' names, as pandas' orients `index` and `split` write them."""
    keys = _same_keys(columns.values())
    if any(keys.issuperset(names) for names in formats):
        return f"each row has a key ({_names(columns)})", "list(t.values())"
    names, data = columns.get("columns"), columns.get("data")
    if isinstance(names, list) and isinstance(data, list) and all(isinstance(values, list) for values in data):
        form = f"'columns' has their names ({_names(names)}) and 'data' a list for each row"
        return form, '[dict(zip(t["columns"], r)) for r in t["data"]]'
    return None


def _same_keys(values: Collection[object]) -> frozenset[str]:
    """The keys that all values have, if all are objects with the same ones."""
    keys = {frozenset(cast("dict[str, object]", value)) if isinstance(value, dict) else frozenset[str]() for value in values}
    return keys.pop() if len(keys) == 1 else frozenset()


def _names(names: Iterable[object]) -> str:
    return cut(", ".join(map(str, names)))
