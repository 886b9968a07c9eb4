"""A cluster, real or simulated, as its controller sees it, and the controller's loop: poll, handle, execute. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tlora.protocol import Action, Event


class Backend(Protocol):
    """A cluster: of this machine (`local.py`), or simulated."""

    def now(self) -> float:
        """Seconds on this cluster's clock, which begins at 0 and never goes back."""
        ...

    def poll(self) -> list[Event]:
        """The events since the last call, in order. Waits for at least one; empty means that there will be no more."""
        ...

    def execute(self, action: Action) -> None:
        """Start `action` without waiting for it: its completion is an event."""
        ...


Record = Callable[[float, Event | Action], None]
"""Takes each event and each action with its time, in the order in which they come."""


class Handles(Protocol):
    """The deciding part: a `Scheduler`."""

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
