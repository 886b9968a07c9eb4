"""Files are written beside the training, by one thread, in the order in which it is told.

A checkpoint of 17 million parameters takes more than half a second to write, sync and hash: as long, everybody in the group would wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_MOST_BEHIND = 4  # writes that have not ended; each holds what it writes in memory

Written = TypeVar("Written")


class Writer:
    """`wake` is called, by the writing thread, after each write. The process does not exit before all of them have ended."""

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        self._wake, self._room = wake, threading.BoundedSemaphore(_MOST_BEHIND)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="writer")

    def write(self, action: Callable[[], Written]) -> Future[Written]:
        """What `action` returns or raises, once it is through. Waits while `_MOST_BEHIND` others are not."""
        self._room.acquire()

        def act() -> Written:
            try:
                return action()
            finally:
                self._room.release()

        future = self._pool.submit(act)
        future.add_done_callback(lambda _: self._wake())
        return future
