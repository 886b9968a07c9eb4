"""A worker on another host, as a process whose end nobody here sees: it is proven by its own last word, by an engine, or by its lease."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tlora.link.process_identity import ProcessIdentity

DRIFT_SECONDS = 2.0  # by which two hosts' clocks may differ over a lease, and a message may be late


class LeasedProcess:
    """A `remote_worker.Process`. `pid` is one of its host's."""

    identity: ProcessIdentity | None = None
    is_stopped = False  # as far as can be seen
    exit_status: int | None = None

    def __init__(self, host: str, pid: int, lease_seconds: float) -> None:
        self.host, self.pid, self.lease_seconds = host, pid, lease_seconds
        self._ended, self._how = threading.Event(), ""
        self._when_ended: Callable[[], object] = lambda: None

    def when_ended(self, call: Callable[[], object]) -> None:
        """Call that once, when the end is proven; by the thread that proves it."""
        self._when_ended = call

    def prove_end(self, how: str) -> None:
        """It writes nothing any more; `how` it ended, in words. What is said first counts."""
        if not self._ended.is_set():
            self._how = how
            self._ended.set()
            self._when_ended()

    def has_outlived(self, silent_seconds: float) -> bool:
        """Whether a worker that was not heard for so long has ended by its lease, whatever became of it."""
        return silent_seconds > self.lease_seconds + DRIFT_SECONDS

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Whether its end is proven within the timeout (None: no limit)."""
        return self._ended.wait(timeout_seconds)

    def kill(self, timeout_seconds: float | None = None) -> None:
        """No signal reaches it. Its controller answers it no more, and its lease ends it."""

    def how_it_ended(self) -> str:
        return self._how or "has not ended"
