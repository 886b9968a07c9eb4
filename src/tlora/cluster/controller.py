"""The loop of a cluster, real or simulated: poll, handle, execute. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tlora.cluster.backend import Backend
from tlora.protocol import Action, Event

Record = Callable[[float, Event | Action], None]
"""Takes each event and each action with its time, in the order in which they come."""


class Handles(Protocol):
    """What decides: a `Scheduler`."""

    def handle(self, event: Event, now: float) -> list[Action]: ...


def run(scheduler: Handles, backend: Backend, record: Record | None = None) -> None:
    """Run until the back end reports no more events. An event is recorded before it is handled, an action before it is executed."""
    while events := backend.poll():
        for event in events:
            now = backend.now()
            if record is not None:
                record(now, event)
            for action in scheduler.handle(event, now):
                if record is not None:
                    record(now, action)
                backend.execute(action)
