"""Writes files in background threads while training continues: each job's in the order of the requests.

A checkpoint of 17 million parameters takes more than half a second to write, sync and hash: the whole group would wait that long.
Several threads, because hashing and syncing release the GIL: jobs that end at the same time overlap their writes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_MOST_THREADS = 4
_MOST_BEHIND = 4  # writes that have not begun; each holds what it writes in memory

Written = TypeVar("Written")


class Writer:
    """`wake` is called, by the writing thread, after each write.

    Threads live while there is something to write, and the interpreter does not exit before; an executor's would take nothing more
    once the main thread has ended, where others may still train. If no thread can start, the caller writes.
    """

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        self._wake, self._changed = wake, threading.Condition()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # by job; a job is there while one of its writes is waiting or under way
        self._ready: deque[str] = deque()  # jobs with a write that could begin
        self._threads = 0

    def write(self, job: str, action: Callable[[], Written]) -> Future[Written]:
        """A future of what `action` returns or raises; the writes of one `job` run one after another. Waits until fewer than
        `_MOST_BEHIND` have not begun; the write happens even if the caller is interrupted in that wait.
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
            if job not in self._waiting:
                self._waiting[job] = deque()
                self._ready.append(job)
            self._waiting[job].append(act)
            start = bool(self._ready) and self._threads < _MOST_THREADS
            self._threads += start
        if start:
            self._start()
        with self._changed:
            self._changed.wait_for(lambda: sum(map(len, self._waiting.values())) < _MOST_BEHIND)
        return future

    def close(self) -> None:
        """Wait until all is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def _start(self) -> None:
        try:
            threading.Thread(target=self._work, name="writer").start()
        except RuntimeError:  # no more threads for this process
            self._work()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._ready:
                    self._threads -= 1
                    return
                job = self._ready.popleft()
                act = self._waiting[job].popleft()
                self._changed.notify_all()
            act()
            with self._changed:
                if self._waiting[job]:
                    self._ready.append(job)
                else:
                    del self._waiting[job]
                self._changed.notify_all()
