"""Reads JSON that may be damaged or untrusted: a file's object, or an exception of two; and what people write, where an object with a key
twice, of which Python takes the last silently, is an error. Dataclasses as JSON.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tlora.errors import shown

_MOST_BYTES = 64 << 20  # a run.json of 10,000 jobs has 15 MB; a link to /dev/zero has no end
_ANY = json.JSONDecoder()
_Value = TypeVar("_Value")


def is_utf8(text: str) -> bool:
    """Whether JSON can hold `text`. Python hands on bytes of a path or a command line that are not UTF-8 as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class KeyTwiceError(Exception):
    """An object has a key twice. No ValueError: the text is JSON."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {shown(key)} stands twice in one object; keep one of the two")


def _object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        raise KeyTwiceError(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object_of)
"""Its methods raise KeyTwiceError, ValueError and RecursionError."""


def refuse_key_twice(content: bytes) -> None:
    """Raise KeyTwiceError for JSON that has an object with a key twice, and nothing for what is no JSON."""
    with suppress(ValueError, RecursionError):
        json.loads(content, object_pairs_hook=_object_of)


def read_object(path: Path, decoder: json.JSONDecoder = _ANY) -> dict[str, Any]:
    """The JSON object in the file `path`; `DECODER` is for one that a person writes for tlora.

    Raises OSError if it cannot be read, and ValueError, which says what is wrong, if it is not one JSON object in a plain file of at
    most 64 MiB.
    """
    if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
        raise ValueError("is not a plain file")
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"has more than {_MOST_BYTES >> 20} MiB")
    try:
        value: object = decoder.decode(content.decode())
    except KeyTwiceError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}, not an object")
    return cast("dict[str, Any]", value)


def fields_of(value: Any) -> dict[str, Any]:
    """A dataclass, with all that it holds, as `json.dumps` takes it."""
    return _adapter(type(value)).dump_python((value,), mode="json")[0]


def value_of(kind: type[_Value], fields: object, *, strict: bool = False) -> _Value:
    """The inverse of `fields_of`. Unknown fields, missing ones without a default, and values of another type raise ValueError; with
    `strict` also those that could be made one of it, such as a number in a string.
    """
    try:
        if strict:  # of JSON: a list is a tuple there, and nowhere else
            return _adapter(kind).validate_json(json.dumps([fields]), strict=True)[0]
        return _adapter(kind).validate_python((fields,))[0]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join([kind.__name__, *map(str, first["loc"][1:])])
        raise ValueError(f"{where} is {first['input']!r}: {first['msg']}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[tuple[Any]]:
    """Of a tuple of one: pydantic takes no configuration for a dataclass alone."""
    one: Any = tuple.__class_getitem__(kind)
    return TypeAdapter(one, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True, ser_json_inf_nan="constants"))
