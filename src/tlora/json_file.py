"""Reads a JSON file that may be damaged or untrusted: returns an object or raises one of two exceptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

_MOST_BYTES = 64 << 20  # a run.json of 10,000 jobs has 15 MB; a link to /dev/zero has no end


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`.

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
        value: object = json.loads(content.decode())
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}, not an object")
    return cast("dict[str, Any]", value)
