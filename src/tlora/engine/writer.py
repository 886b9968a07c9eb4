"""Files are written beside the training, by one thread, in the order in which it is told.

A checkpoint of 17 million parameters takes more than half a second to write, sync and hash: as long, everybody in the group would wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_MOST_BEHIND = 4  # writes that have not ended; each holds what it writes in memory

Written = TypeVar("Written")


class Writer:
    """`wake` is called, by the writing thread, after each write.

    The thread lives while there is something to write, and the interpreter does not exit before; an executor's would take nothing more
    once the main thread has ended, where others may still train.
    """

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        self._wake, self._room, self._lock = wake, threading.BoundedSemaphore(_MOST_BEHIND), threading.Lock()
        self._queue: deque[Callable[[], None]] = deque()
        self._busy = False

    def write(self, action: Callable[[], Written]) -> Future[Written]:
        """What `action` returns or raises, once it is through. Waits while `_MOST_BEHIND` others are not."""
        self._room.acquire()
        future: Future[Written] = Future()

        def act() -> None:
            try:
                written = action()
            except BaseException as error:
                self._room.release()
                future.set_exception(error)
            else:
                self._room.release()
                future.set_result(written)
            self._wake()

        with self._lock:
            self._queue.append(act)
            start, self._busy = not self._busy, True
        if start:
            threading.Thread(target=self._work, name="writer").start()
        return future

    def close(self) -> None:
        """Wait until all is written."""
        self.write(lambda: None).result()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._busy = False
                    return
                act = self._queue.popleft()
            act()
