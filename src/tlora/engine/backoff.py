"""Waits for room on a full disk: a worker keeps a job's state in memory until it can be written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tlora.engine.heartbeat import Heartbeat

_LOOK_SECONDS = 2.0
_NOTE_SECONDS = 600.0  # between two notes of one job


class Backoff:
    """A `store.room.WaitsForRoom` for as long as the worker shall live. Safe in several threads."""

    def __init__(self, heartbeat: Heartbeat, note: Callable[[str], None]) -> None:
        """`note` gets a line now and then; `heartbeat` beats on, so that a wait for a writer is not taken for a hang."""
        self.heartbeat, self._note = heartbeat, note
        self._ending = threading.Event()
        self._noted: dict[str, float] = {}  # by job

    def __call__(self, job: str, error: OSError) -> bool:
        now = time.monotonic()
        if now - self._noted.get(job, float("-inf")) >= _NOTE_SECONDS and not self._ending.is_set():
            self._noted[job] = now
            self._note(f"{job}: {error}. What is to be written waits until there is room")
        gone = self._ending.wait(_LOOK_SECONDS)
        self.heartbeat.begin(self.heartbeat.phase)
        return not gone

    def end(self) -> None:
        """The worker is about to exit: stop all waits."""
        self._ending.set()
