"""Wakes whoever watches jobs when the server says that something has happened, instead of asking it again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

import httpx

from tlora.client.connection import Connection
from tlora.errors import ServiceError

_AGAIN_SECONDS = 5.0  # before a stream that has ended is opened anew
_QUIET_SECONDS = 15.0  # that nothing is asked while no event comes and no job runs: the stream may have been cut unseen


class EventStream:
    """A thread that reads the stream of events of the key's tenant. A context manager.

    Where there is no stream (an older server, a proxy that holds it back, too many of them), `wait` only waits.
    """

    def __init__(self, connection: Connection, quiet_seconds: float = _QUIET_SECONDS, sleep: Callable[[float], None] = time.sleep) -> None:
        self._connection, self._quiet_seconds, self._sleep = connection, quiet_seconds, sleep
        self._rung, self._ended = threading.Event(), threading.Event()
        self._open = False

    def __enter__(self) -> EventStream:
        threading.Thread(target=self._listen, name="events", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()

    @property
    def is_open(self) -> bool:
        """Whether events come."""
        return self._open

    def wait(self, seconds: float, *, moves: bool) -> None:
        """Until an event comes, at most `seconds`; longer where nothing `moves` without an event."""
        if not self._open:
            self._sleep(seconds)
            return
        self._rung.wait(seconds if moves else max(seconds, self._quiet_seconds))
        self._rung.clear()

    def _listen(self) -> None:
        while not self._ended.is_set():
            try:
                self._read()
            except ServiceError as error:
                if 400 <= error.status < 500:  # it will not be had
                    return
            except (httpx.HTTPError, RuntimeError):  # cut off, or the connection has been closed
                pass
            finally:
                self._open = False
                self._rung.set()  # what came of it is asked for
            self._ended.wait(_AGAIN_SECONDS)

    def _read(self) -> None:
        with self._connection.stream("/v1/events/stream") as answer:
            for line in answer.iter_lines():
                if self._ended.is_set():
                    return
                if line.startswith(": open"):
                    self._open = True
                    self._rung.set()  # what happened before it was open has no event here
                elif line.startswith("data:"):
                    self._rung.set()
