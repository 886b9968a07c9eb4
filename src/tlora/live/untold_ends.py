"""Jobs that ended while no controller was there: the log of events must say so once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tlora.protocol import JobFinished


def not_told(names: Iterable[str], events: Path) -> list[str]:
    """Those of `names` of whose end the log of events says nothing: they ended while no controller was there."""
    left = dict.fromkeys(names)
    mark = f'"{JobFinished.__name__}"'
    if left and events.is_file():
        with events.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if mark in line:
                    for name in [name for name in left if f'"{name}"' in line]:
                        del left[name]
    return list(left)
