"""A worker's current activity, for its signs of life, and whether it is to end. The training thread writes the activity, the sending
thread reads it; each field is replaced whole."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from tlora.worker_protocol import Phase


@dataclass(slots=True)
class Heartbeat:
    """As `worker_protocol.Alive`. `ending` is set when the process is about to exit, by whoever hears of it first."""

    phase: Phase = "waiting"
    count: int = 0
    in_flight: tuple[str, ...] = ()
    ending: threading.Event = field(default_factory=threading.Event)

    def begin(self, phase: Phase) -> None:
        self.phase = phase
        self.count += 1

    def beat(self) -> None:
        """Still the same activity."""
        self.begin(self.phase)
