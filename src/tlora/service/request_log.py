"""What was asked of the server, when and by whom, in files beside its store: access.log has every request, audit.log those with a key
that change something. One JSON object a line; neither holds a key, a query or a body.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from logging.handlers import QueueListener, RotatingFileHandler
from pathlib import Path
from queue import Full, Queue

KEPT = 5  # older files of each log
_MOST_WAITING = 10_000  # lines; a disk that stands still takes no more memory than these
_LONGEST_PATH = 300  # characters
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class Answered:
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
    """Of one server. A thread writes, so that no request waits for the disk."""

    def __init__(self, directory: Path, file_bytes: int) -> None:
        """`file_bytes`: from which on a new file is begun."""
        self._queue, self._lost, self._failing = Queue[logging.LogRecord](_MOST_WAITING), 0, False
        self._files = [self._open(directory / name, file_bytes) for name in ("access.log", "audit.log")]
        self._files[1].addFilter(lambda record: record.levelno >= logging.WARNING)
        self._listener = QueueListener(self._queue, *self._files)
        self._listener.start()

    def see(self, answered: Answered) -> None:
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "address": answered.address,
            "method": answered.method[:20],
            "path": answered.path[:_LONGEST_PATH],
            "code": answered.code,
            "seconds": round(answered.seconds, 4),
            "tenant": answered.tenant,
            "key": answered.key_id,
        }
        if self._lost:
            line["lost"] = self._lost  # lines before this one, which the disk was too slow for
        level = logging.WARNING if answered.changes else logging.INFO
        try:
            self._queue.put_nowait(logging.makeLogRecord({"msg": json.dumps(line), "levelno": level}))
            self._lost = 0
        except Full:
            self._lost += 1

    def close(self) -> None:
        """Write what waits."""
        self._listener.stop()
        for file in self._files:
            file.close()

    def _open(self, path: Path, file_bytes: int) -> RotatingFileHandler:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        handler = RotatingFileHandler(path, maxBytes=file_bytes, backupCount=KEPT, encoding="utf-8", delay=True)
        handler.handleError = self._tell  # type: ignore[method-assign] # else each line has a traceback
        return handler

    def _tell(self, _: logging.LogRecord) -> None:
        if not self._failing:
            self._failing = True
            why = sys.exc_info()[1]
            logging.getLogger(__name__).warning("access.log or audit.log cannot be written: %s. Requests are answered without", why)
