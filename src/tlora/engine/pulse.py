"""What a worker is at, for its signs of life. The thread that trains writes it, the one that sends reads; each field is replaced whole."""

from __future__ import annotations

from dataclasses import dataclass

from tlora.worker_protocol import Phase


@dataclass(slots=True)
class Pulse:
    """As `worker_protocol.Alive`."""

    phase: Phase = "starting"
    count: int = 0
    in_flight: tuple[str, ...] = ()

    def begin(self, phase: Phase) -> None:
        self.phase = phase
        self.count += 1
