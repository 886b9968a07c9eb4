"""JSON as it stands in data: an object with a key twice, of which Python takes the last silently, is an error."""

from __future__ import annotations

import json

from tlora.errors import shown


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
