"""What happens in a server's cluster, as a log that `tlora simulate` replays: logs/events.jsonl in its data directory."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tlora.cluster.event_log import EventLog
from tlora.errors import ConfigError
from tlora.protocol import Action, BaseAdded, Event, StepsDone, Tick

_AGAIN_SECONDS = 60.0  # after a write that failed


class EventRecord:
    """To be called in the controller's thread alone. Reports of steps and ticks are left out: they are nearly all there is, and no replay
    needs them. Where the log cannot be written, as on a full disk, the server says so and goes on without.
    """

    def __init__(self, directory: Path, most_bytes: int) -> None:
        """`most_bytes` of a file; five older ones are kept."""
        self._path, self._most_bytes = directory / "events.jsonl", most_bytes
        self._log: EventLog | None = None
        self._began_at_seconds = 0.0
        self._not_before = 0.0
        self._bases: set[str] = set()

    def begin(self, began_at_seconds: float) -> None:
        """Of a cluster whose clock showed that when it began."""
        self._began_at_seconds = began_at_seconds
        self._open()

    def see(self, now: float, item: Event | Action, bases: Mapping[str, int]) -> None:
        """What has happened, and the bytes of the bases that there are by now."""
        if isinstance(item, StepsDone | Tick):
            return
        if self._log is None and time.monotonic() >= self._not_before:
            self._open()
        if self._log is None:
            return
        try:
            for name in [name for name in bases if name not in self._bases]:
                self._log.write(now, BaseAdded(name, bases[name]))
                self._bases.add(name)
            self._log.write(now, item)
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _open(self) -> None:
        self._bases.clear()
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            self._log = EventLog(self._path, self._began_at_seconds, self._most_bytes)
        except (ConfigError, OSError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        logging.getLogger(__name__).warning("%s cannot be written: %s. Jobs go on; what happens meanwhile is in no log", self._path, error)
        self._not_before = time.monotonic() + _AGAIN_SECONDS
        with suppress(OSError):  # what was buffered cannot be written either
            self.close()
