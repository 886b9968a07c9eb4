"""What happened in a cluster, as a file: a JSON object a line, {"seconds": t, "type": ..., the fields of the event or action}.

Enough to play an incident again: a fresh scheduler that is given the same events answers with the same actions. Reading it: `sim/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tlora.cluster.controller import Handles
from tlora.protocol import Action, Event, to_json


class EventLog:
    """Appends to `path`, flushed line by line: a crash loses at most the torn last one. Give its `write` to `controller.run`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, seconds: float, item: Event | Action) -> None:
        self._file.write(json.dumps({"seconds": seconds, **to_json(item)}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def replay(scheduler: Handles, rows: Iterable[tuple[float, Event | Action]]) -> list[tuple[float, Event | Action]]:
    """The events of a log, each followed by what `scheduler` answers to it; equal to `rows` if it decides as the one before did."""
    answered: list[tuple[float, Event | Action]] = []
    for seconds, item in rows:
        if isinstance(item, Event):
            answered.append((seconds, item))
            answered += [(seconds, action) for action in scheduler.handle(item, seconds)]
    return answered
