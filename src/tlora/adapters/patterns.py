"""Regular expressions that users write for names of layers. They mean what `re` makes of them in PEFT, and none takes for ever."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable
from typing import Any

from tlora.errors import ModelError

_SECONDS = 2.0  # for all names of a base; an ordinary pattern takes a few milliseconds for 100,000
# `re` cannot be interrupted, and a server resolves patterns of its tenants. transformers needs this one too. It has no type stubs.
_regex: Any = importlib.import_module("regex")


def find_matches(pattern: str, names: Iterable[str], key: str, whole: bool = True) -> dict[str, str | None]:
    """Of `names` those that `pattern` matches, whole or their beginning, each with its group `idx` if there is one.

    `key` is the setting that it stands in. Raises ModelError for a pattern that takes too long.
    """
    compiled, end = _regex.compile(pattern), time.monotonic() + _SECONDS
    match = compiled.fullmatch if whole else compiled.match
    matches: dict[str, str | None] = {}
    try:
        for name in names:
            if hit := match(name, timeout=max(1e-3, end - time.monotonic())):
                matches[name] = hit.groupdict().get("idx")
    except TimeoutError:
        raise ModelError(
            f"{key}: the pattern {pattern!r} takes more than {_SECONDS:g} s to match the names of this base's layers. "
            "Write one without repetitions inside repetitions, or a list of names"
        ) from None
    return matches
