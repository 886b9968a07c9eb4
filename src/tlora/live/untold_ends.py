"""Jobs that ended while no controller ran: the event log must record their ends once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tlora.protocol import JobFinished


def not_told(names: Iterable[str], events: Path) -> list[str]:
    """Those of `names` whose end is missing in the event log: they ended while no controller ran."""
    left = dict.fromkeys(names)
    mark = f'"{JobFinished.__name__}"'
    if left and events.is_file():
        with events.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if mark in line:
                    for name in [name for name in left if f'"{name}"' in line]:
                        del left[name]
    return list(left)
