"""Files are written beside the training, by one thread, in the order in which it is told.

A checkpoint of 17 million parameters takes more than half a second to write, sync and hash: as long, everybody in the group would wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_MOST_BEHIND = 4  # writes that have not begun; each holds what it writes in memory

Written = TypeVar("Written")


class Writer:
    """`wake` is called, by the writing thread, after each write.

    The thread lives while there is something to write, and the interpreter does not exit before; an executor's would take nothing more
    once the main thread has ended, where others may still train. Where no thread can be had, whoever wants something written writes.
    """

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        self._wake, self._changed = wake, threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._busy = False

    def write(self, action: Callable[[], Written]) -> Future[Written]:
        """What `action` returns or raises, once it is through. Waits until fewer than `_MOST_BEHIND` others are before it; who is
        interrupted in that has it written all the same.
        """
        future: Future[Written] = Future()
        future.add_done_callback(lambda _: self._wake())

        def act() -> None:
            try:
                written = action()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(written)

        with self._changed:
            self._queue.append(act)
            start, self._busy = not self._busy, True
        if start:
            try:
                threading.Thread(target=self._work, name="writer").start()
            except RuntimeError:  # no more threads for this process
                self._work()
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) < _MOST_BEHIND)
        return future

    def close(self) -> None:
        """Wait until all is written."""
        self.write(lambda: None).result()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._busy = False
                    return
                act = self._queue.popleft()
                self._changed.notify_all()
            act()
