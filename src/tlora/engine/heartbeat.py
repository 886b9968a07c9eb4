"""A worker's current activity, for its signs of life. The training thread writes it, the sending thread reads it; each field is replaced
whole."""

from __future__ import annotations

from dataclasses import dataclass

from tlora.worker_protocol import Phase


@dataclass(slots=True)
class Heartbeat:
    """As `worker_protocol.Alive`."""

    phase: Phase = "starting"
    count: int = 0
    in_flight: tuple[str, ...] = ()

    def begin(self, phase: Phase) -> None:
        self.phase = phase
        self.count += 1
