"""What a cluster is to the controller: a clock, a source of events, and something that carries out actions."""

from __future__ import annotations

from typing import Protocol

from tlora.protocol import Action, Event


class Backend(Protocol):
    """A cluster: of this machine (`local.py`), or simulated."""

    def now(self) -> float:
        """Seconds on this cluster's clock, which begins at 0 and never goes back."""
        ...

    def poll(self) -> list[Event]:
        """What has happened since the last time, in its order. Waits until something has; empty means that nothing ever will."""
        ...

    def execute(self, action: Action) -> None:
        """See to it that `action` is done. Does not wait for it: that it is done is an event."""
        ...
