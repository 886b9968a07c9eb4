"""The one thread that writes to the database, with group commit: operations that come together share a transaction and its fsync.

An operation is a function of a connection. Its future gets its value after the commit, so that whoever has the value may tell it. One
whose future is cancelled before its turn is left out. What ends the thread is reported, and fails all that waits: no caller hangs.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import InterfaceError, OperationalError

from tlora.errors import TloraError

T = TypeVar("T")
Operation = Callable[[Connection], T]
TogetherWork = Callable[[Connection, Sequence[Any]], Sequence[T | Exception]]
Failpoint = Callable[[str], None]

GATHER_SECONDS = 0.012  # that a busy writer waits for others: two fsyncs' time, far below what a person notices
MOST_TOGETHER = 256


@dataclass(frozen=True, slots=True)
class Together(Generic[T]):
    """An operation that is done together with its neighbours of the same `work`: one call has the arguments of all that wait, and gives a
    value or an error for each. Where the call raises, nothing of it is kept, and each is done alone.
    """

    work: TogetherWork[T]
    argument: Any


class StoreError(TloraError, OSError):
    """The database cannot be written now: its disk is full, or it cannot be reached. Nothing of the operation is kept."""


class LeaseLostError(TloraError):
    """Another server writes to this database now. The writer that meets this ends."""


def _pass(_: str) -> None:
    pass


def _no_check(_: Connection) -> None:
    pass


@dataclass
class WriterEnd:
    """Why the writer ended before it was closed; None while it has not. `tell` is called with the reason, in the writer's thread."""

    reason: str | None = None
    tell: Callable[[str], None] = _pass

    def see(self, reason: str) -> None:
        self.reason = reason
        self.tell(reason)


_Item = tuple[Operation[Any] | Together[Any], Future[Any]]


class Writer:
    """Operations run one after the other, in the order in which they were given. Use `submit`, and `close` at the end."""

    def __init__(
        self,
        engine: Engine,
        on_commit: Callable[[], None] = lambda: None,
        failpoint: Failpoint = _pass,
        check: Callable[[Connection], None] = _no_check,
    ) -> None:
        """`on_commit` is called in the writer's thread after each commit, before the futures have their values. `check` is called at the
        beginning of each transaction; LeaseLostError from it ends the writer.
        """
        self._engine, self._on_commit, self._failpoint, self._check = engine, on_commit, failpoint, check
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._refusal: str | None = None  # why nothing more is taken
        self._batch: list[_Item] = []  # what is being written
        self.end = WriterEnd()
        self.problem: str | None = None  # why the last transaction failed; None after one that did not
        self.commits = self.operations = 0
        self._thread = threading.Thread(target=self._run, name="database writer", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation[T] | Together[T]) -> Future[T]:
        """The operation's value, once it is on the disk. What it raises undoes it alone; StoreError if the commit fails."""
        future: Future[T] = Future()
        with self._closing:
            if self._refusal is not None:
                future.set_exception(StoreError(f"{self._refusal}; send the request again when the server is back"))
            else:
                self._queue.put((operation, future))
        return future

    def do(self, operation: Operation[T] | Together[T]) -> T:
        """`submit`, and wait."""
        return self.submit(operation).result()

    def close(self) -> None:
        """After all that was submitted."""
        with self._closing:
            if self._refusal is None:
                self._refusal = "the server is shutting down"
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        busy = False
        try:
            while True:
                gathered, ended = self._gather(busy)
                self._batch = [item for item in gathered if item[1].set_running_or_notify_cancel()]
                if self._batch:
                    self._write(self._batch)
                if ended:
                    return
                busy = len(gathered) > 1
        except BaseException as error:  # nothing else writes: requests would wait for ever
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """Fail what waits, refuse what comes, and report it."""
        lost = isinstance(error, LeaseLostError)
        reason = str(error) if lost else f"the store's writer ended ({type(error).__name__}: {' '.join(str(error).split())})"
        if not lost:
            logging.getLogger(__name__).critical("the store's writer ended", exc_info=error)
        with self._closing:
            self._refusal = reason
        waiting = self._batch
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if item is not None and item[1].set_running_or_notify_cancel():
                waiting = [*waiting, item]
        for _, future in waiting:
            if not future.done():
                future.set_exception(StoreError(f"{reason}; whether this was kept is not known. Ask again when the server is back"))
        self.end.see(reason)

    def _gather(self, busy: bool) -> tuple[list[_Item], bool]:
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

    def _write(self, batch: list[_Item]) -> None:
        done: list[tuple[Future[Any], Any]] = []
        try:
            with self._engine.connect().execution_options(writes=True) as connection, connection.begin():
                self._check(connection)
                for _, group in groupby(batch, _work_of):
                    self._run_group(connection, list(group), done)
                self._failpoint("before commit")
            self._failpoint("after commit")
        except LeaseLostError:
            raise
        except Exception as error:
            self._fail(batch, error)
            return
        self.commits += 1
        self.operations += len(done)
        if self.problem is not None:
            logging.getLogger(__name__).warning("the database can be written again")
        self.problem = None
        try:
            self._on_commit()
        except Exception:  # of the one that is told: what was written stands
            logging.getLogger(__name__).exception("a commit could not be announced")
        for future, value in done:
            future.set_result(value)
        self._failpoint("answered")

    def _run_group(self, connection: Connection, group: list[_Item], done: list[tuple[Future[Any], Any]]) -> None:
        """Items of one `work`, or one item. What it raises undoes it alone, but for errors of the database, which undo the transaction."""
        for _ in group:
            self._failpoint("operation")
        connection.exec_driver_sql("SAVEPOINT operation")  # as text: SQLAlchemy's own compiles each anew
        try:
            values = _values_of(connection, [operation for operation, _ in group])
        except (OperationalError, InterfaceError, LeaseLostError):  # of the database, not of this operation alone
            raise
        except Exception as error:
            connection.exec_driver_sql("ROLLBACK TO SAVEPOINT operation")
            values = [error] if len(group) == 1 else None
        connection.exec_driver_sql("RELEASE SAVEPOINT operation")
        if values is None:
            for item in group:
                self._run_group(connection, [item], done)
            return
        for (_, future), value in zip(group, values, strict=True):
            if isinstance(value, Exception):
                future.set_exception(value)
            else:
                done.append((future, value))

    def _fail(self, batch: list[_Item], error: Exception) -> None:
        first: BaseException = error
        while (earlier := first.__cause__ or first.__context__) is not None:  # SQLite rolls back when its disk is full: undoing fails too
            first = earlier
        why = " ".join(str(getattr(first, "orig", first)).split())
        if self.problem is None:
            logging.getLogger(__name__).warning("the database cannot be written (%s). Until it can, requests are answered with 503", why)
        self.problem = f"the database cannot be written ({driver_words(first)})"
        for _, future in batch:
            if not future.done():
                future.set_exception(StoreError(f"{self.problem}; nothing was kept. Send the request again later"))


def driver_words(error: BaseException) -> str:
    """What a database's driver says, for whoever asks: where its server cannot be reached, neither its address nor its user."""
    said = getattr(error, "orig", None) or error
    if getattr(said, "sqlstate", "") is None:  # of PostgreSQL's errors only those of the connection have none
        return "its server cannot be reached"
    return " ".join(str(said).split())


def _work_of(item: _Item) -> object:
    """Equal for neighbours that are done together."""
    operation, future = item
    return operation.work if isinstance(operation, Together) else future


def _values_of(connection: Connection, operations: Sequence[Operation[Any] | Together[Any]]) -> Sequence[Any]:
    """Of one operation, or of those of one `work`."""
    first = operations[0]
    if not isinstance(first, Together):
        return [first(connection)]
    return first.work(connection, [operation.argument for operation in operations if isinstance(operation, Together)])
