"""What was asked of the server, when and by whom, in files beside its store: access.log has every request, audit.log those with a key
that change something. One JSON object a line; neither holds a key, a query or a body.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram

from tlora.cluster.event_log import LogFile

_MOST_WAITING = 10_000  # lines; a disk that stands still takes no more memory than these
_GATHER_SECONDS = 0.02  # that lines wait for others, so that a busy server writes many at once; a kill loses these
_LONGEST_PATH = 300  # characters
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class Answered(NamedTuple):
    """A request whose answer begins. `tenant` and `key_id` are empty where no key was accepted."""

    method: str
    path: str
    address: str
    code: int
    seconds: float
    tenant: str
    key_id: str

    @property
    def changes(self) -> bool:
        return bool(self.key_id) and self.method not in _READING


class RequestLog:
    """Of one server. A thread writes, so that no request waits for the disk. Use `see` in one thread."""

    def __init__(self, directory: Path, file_bytes: int) -> None:
        """`file_bytes`: from which on a new file is begun."""
        directory.mkdir(mode=0o700, exist_ok=True)
        self._queue: SimpleQueue[tuple[float, Answered, int] | None] = SimpleQueue()
        self._lost = 0
        self._failing: set[LogFile] = set()  # since their last lines
        self._access, self._audit = (LogFile(directory / name, file_bytes) for name in ("access.log", "audit.log"))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="request log", daemon=True)
        self._thread.start()

    def see(self, answered: Answered) -> None:
        if self._queue.qsize() >= _MOST_WAITING:
            self._lost += 1
            return
        self._queue.put((time.time(), answered, self._lost))
        self._lost = 0

    def close(self) -> None:
        """Write what waits."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()
        self._access.close()
        self._audit.close()

    def _run(self) -> None:
        ended = False
        while not ended:
            found = [self._queue.get()]
            self._closing.wait(_GATHER_SECONDS)
            try:
                while len(found) < _MOST_WAITING:
                    found.append(self._queue.get_nowait())
            except Empty:
                pass
            ended = None in found
            lines = [(_line(*item), item[1].changes) for item in found if item is not None]
            self._write(self._access, [line for line, _ in lines])
            self._write(self._audit, [line for line, changes in lines if changes])

    def _write(self, file: LogFile, lines: list[str]) -> None:
        try:
            file.write(lines)
            if lines:
                self._failing.discard(file)
        except OSError as error:
            if not self._failing:
                message = "access.log or audit.log cannot be written: %s. Requests are answered without"
                logging.getLogger(__name__).warning(message, error)
            self._failing.add(file)


def _line(at: float, answered: Answered, lost: int) -> str:
    """`lost` counts the lines before this one that the disk was too slow for."""
    line = {
        "time": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
        "address": answered.address,
        "method": answered.method[:20],
        "path": answered.path[:_LONGEST_PATH],
        "code": answered.code,
        "seconds": round(answered.seconds, 4),
        "tenant": answered.tenant,
        "key": answered.key_id,
    }
    return json.dumps(line | {"lost": lost} if lost else line) + "\n"


class RequestNumbers:
    """How many requests were answered, with which codes, for which tenants, and how soon: for Prometheus.

    Of one server. Use in one thread; `registry` may be read in any.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        text = "Requests that were answered; tenant is empty where no key was accepted."
        self._answered = Counter("tlora_requests", text, ["method", "code", "tenant"], registry=self.registry)
        text = "From a request's header to the beginning of its answer."
        self._seconds = Histogram("tlora_request_seconds", text, ["method"], buckets=_BUCKETS, registry=self.registry)
        self._known: dict[tuple[str, int, str], tuple[Counter, Histogram]] = {}  # to look them up by labels takes longer

    def see(self, answered: Answered) -> None:
        method = answered.method if answered.method in _METHODS else "other"  # a client may send any word
        key = (method, answered.code, answered.tenant)
        if key not in self._known:
            self._known[key] = self._answered.labels(*key), self._seconds.labels(method)
        count, seconds = self._known[key]
        count.inc()
        seconds.observe(answered.seconds)
