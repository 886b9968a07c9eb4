"""The one thread that writes to the database, with group commit: operations that come together share a transaction and its fsync.

An operation is a function of a connection. Its future gets its value after the commit, so that whoever has the value may tell it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import InterfaceError, OperationalError

from tlora.errors import TloraError

T = TypeVar("T")
Operation = Callable[[Connection], T]
Failpoint = Callable[[str], None]

GATHER_SECONDS = 0.012  # that a busy writer waits for others: two fsyncs' time, far below what a person notices
MOST_TOGETHER = 256


class StoreError(TloraError, OSError):
    """The database cannot be written now: its disk is full, or it cannot be reached. Nothing of the operation is kept."""


def _pass(_: str) -> None:
    pass


class Writer:
    """Operations run one after the other, in the order in which they were given. Use `submit`, and `close` at the end."""

    def __init__(self, engine: Engine, on_commit: Callable[[], None] = lambda: None, failpoint: Failpoint = _pass) -> None:
        """`on_commit` is called in the writer's thread after each commit, before the futures have their values."""
        self._engine, self._on_commit, self._failpoint = engine, on_commit, failpoint
        self._queue: queue.SimpleQueue[tuple[Operation[Any], Future[Any]] | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self.commits = self.operations = 0
        self._thread = threading.Thread(target=self._run, name="database writer", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation[T]) -> Future[T]:
        """The operation's value, once it is on the disk. What it raises undoes it alone; StoreError if the commit fails."""
        future: Future[T] = Future()
        with self._closing:
            if self._closed:
                future.set_exception(StoreError("the server is shutting down; send the request again when it is back"))
            else:
                self._queue.put((operation, future))
        return future

    def do(self, operation: Operation[T]) -> T:
        """`submit`, and wait."""
        return self.submit(operation).result()

    def close(self) -> None:
        """After all that was submitted."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        busy = False
        while True:
            batch, ended = self._gather(busy)
            if batch:
                self._write(batch)
            if ended:
                return
            busy = len(batch) > 1

    def _gather(self, busy: bool) -> tuple[list[tuple[Operation[Any], Future[Any]]], bool]:
        """What to write together. A lone operation is not kept waiting; after a batch the next one is given time to fill."""
        first = self._queue.get()
        if first is None:
            return [], True
        batch, until = [first], time.monotonic() + (GATHER_SECONDS if busy else 0.0)
        while len(batch) < MOST_TOGETHER:
            try:
                rest = until - time.monotonic()
                item = self._queue.get(timeout=rest) if rest > 0 else self._queue.get_nowait()
            except queue.Empty:
                break
            if item is None:
                return batch, True
            batch.append(item)
        return batch, False

    def _write(self, batch: list[tuple[Operation[Any], Future[Any]]]) -> None:
        done: list[tuple[Future[Any], Any]] = []
        try:
            with self._engine.connect().execution_options(writes=True) as connection, connection.begin():
                for operation, future in batch:
                    self._failpoint("operation")
                    try:
                        with connection.begin_nested():
                            value = operation(connection)
                    except (OperationalError, InterfaceError):  # of the database, not of this operation alone
                        raise
                    except Exception as error:
                        future.set_exception(error)
                    else:
                        done.append((future, value))
                self._failpoint("before commit")
            self._failpoint("after commit")
        except Exception as error:
            self._fail(batch, error)
            return
        self.commits += 1
        self.operations += len(done)
        self._on_commit()
        for future, value in done:
            future.set_result(value)
        self._failpoint("answered")

    def _fail(self, batch: list[tuple[Operation[Any], Future[Any]]], error: Exception) -> None:
        first: BaseException = error
        while (earlier := first.__cause__ or first.__context__) is not None:  # SQLite rolls back when its disk is full: undoing fails too
            first = earlier
        why = " ".join(str(getattr(first, "orig", first)).split())
        for _, future in batch:
            if not future.done():
                future.set_exception(StoreError(f"the database cannot be written ({why}); nothing was kept. Send the request again later"))
