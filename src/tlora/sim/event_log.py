"""This program's event log, read back: what a controller recorded, so that an incident can be replayed. Writes nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

from tlora.errors import DataError
from tlora.protocol import Action, Event, from_json
from tlora.sim.trace import MOST_NUMBER, find_trace, is_json_lines, text_of

_REMEDY = "Take the line out"


def is_event_log(source: str | Path) -> bool:
    """Whether the file holds JSON lines and no table. Raises DataError where there is none."""
    return is_json_lines(text_of(find_trace(source)[1]))


def read_event_log(path: str | Path) -> list[tuple[float, Event | Action]]:
    """The entries of a log with their seconds: lines of `protocol.to_json` plus "seconds", in order of time.

    A last line that a crash has torn is left out. Any other that is no event or action raises DataError with its number.
    """
    path = find_trace(path)[1]
    lines = text_of(path).split("\n")
    entries: list[tuple[float, Event | Action]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # no newline follows: the write was cut short
                break
            raise DataError(f"{place}: {line[:80]!r} is not JSON ({error}). {_REMEDY}") from None
        entries.append(_entry(entry, entries[-1][0] if entries else -math.inf, place))
    return entries


def _entry(entry: Any, after: float, place: str) -> tuple[float, Event | Action]:
    if not isinstance(entry, dict):
        raise DataError(f"{place}: {str(entry)[:80]!r} is no JSON object; every line of an event log is one. {_REMEDY}")
    values = cast("dict[str, Any]", entry)
    seconds = values.pop("seconds", None)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not abs(seconds) <= MOST_NUMBER:
        raise DataError(f'{place}: "seconds" is {repr(seconds)[:80]}, and must be a number of at most {MOST_NUMBER:,.0f}. {_REMEDY}')
    if seconds < after:
        raise DataError(
            f'{place}: "seconds" is {seconds}, and the line before has {after}; time goes on. '
            'If another run begins here, give it a file of its own; else sort the lines by "seconds"'
        )
    try:
        return float(seconds), from_json(values)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{place}: {error}. {_REMEDY}") from None
