"""An event log played again: whether a scheduler decides as the one before did."""

from __future__ import annotations

from collections.abc import Iterable

from tlora.cluster.controller import Handles
from tlora.protocol import Action, Event


def answered(scheduler: Handles, rows: Iterable[tuple[float, Event | Action]]) -> list[tuple[float, Event | Action]]:
    """The events of a log of one run, each followed by what `scheduler` answers; equal to `rows` if it decides the same."""
    found: list[tuple[float, Event | Action]] = []
    for seconds, item in rows:
        if isinstance(item, Event):
            found.append((seconds, item))
            found += [(seconds, action) for action in scheduler.handle(item, seconds)]
    return found
