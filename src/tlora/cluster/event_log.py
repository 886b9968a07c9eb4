"""The event log of a cluster: one JSON object a line, {"seconds": t, "type": ..., the fields of the event or action}.

A fresh scheduler that gets the same events answers with the same actions, so an incident can be repeated. `sim/trace.py` reads it. A
restarted cluster appends to the same file, and its time continues from the last line: for how long no controller ran is left out.

A server's log is bounded: from a size on it goes on in a new file, and the oldest is removed. Each file begins with the nodes and bases
that there are (`log_head.py`), so that the jobs submitted in it can be replayed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from tlora.cluster.log_head import LogHead
from tlora.errors import ConfigError
from tlora.protocol import (
    Action,
    BaseAdded,
    Event,
    GroupFound,
    JobFinished,
    JobSubmitted,
    StepsDone,
    Tick,
    to_json,
)

KEPT = 5  # older files
_AGAIN_SECONDS = 60.0  # after a write that failed


class LogFile:
    """Appends to `path`. Opened with the first line, and again after a write that failed; use in one thread."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._file: BinaryIO | None = None
        self._bytes = 0
        self._first_bytes = 0  # of the first line, which may begin with all that is there

    def write(self, lines: Sequence[str]) -> None:
        """Write complete lines, flushed on return. Raises OSError, as on a full disk: then some of them may have been written."""
        if not lines:
            return
        try:
            file = self._open()
            for line in lines:
                if self.is_full(line):
                    file = self._turn()
                    self._first_bytes = len(line.encode())
                self._bytes += file.write(line.encode())
            file.flush()
        except OSError:
            with suppress(OSError):  # what was buffered cannot be written either
                self.close()
            raise

    def is_full(self, line: str) -> bool:
        """Whether the line will be the first of a new file. One that begins with as much as a file may have goes on for as much again."""
        if self._most_bytes is None:
            return False
        self._open()
        return self._bytes > 0 and self._bytes + len(line.encode()) > max(self._most_bytes, 2 * self._first_bytes)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> BinaryIO:
        if self._file is None:
            self._file = self._path.open("ab")
            self._bytes = self._file.tell()
        return self._file

    def _turn(self) -> BinaryIO:
        self.close()
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{number}") for number in range(1, KEPT + 1))]
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            if newer.exists():
                newer.replace(older)
        return self._open()


class EventLog:
    """Appends to `path`, flushed line by line: a crash loses at most the last one. Give its `write` to `controller.run`.

    Raises ConfigError for a file that is not a log.
    """

    def __init__(self, path: Path, began_at_seconds: float = 0.0, most_bytes: int | None = None) -> None:
        """`began_at_seconds`: what the back end's clock showed when it began. `most_bytes`: of a file, or a little more."""
        self._begin = (_mend(path) if path.is_file() else 0.0) - began_at_seconds
        self._head = LogHead()
        self._file = LogFile(path, most_bytes)

    def write(self, seconds: float, item: Event | Action) -> None:
        """Raises OSError, as on a full disk."""
        if isinstance(item, JobSubmitted):
            item = self._on_own_clock(item)
        elif isinstance(item, GroupFound):
            item = replace(item, jobs=tuple(self._on_own_clock(job) for job in item.jobs))
        line = self._line(seconds, item)
        if self._file.is_full(line):
            line = "".join(self._line(seconds, one) for one in self._head.events()) + line
        self._head.see(item)
        self._file.write([line])

    def _line(self, seconds: float, item: Event | Action) -> str:
        return json.dumps({"seconds": self._begin + seconds, **to_json(item)}) + "\n"

    def _on_own_clock(self, job: JobSubmitted) -> JobSubmitted:
        times = {"deadline": job.deadline, "submitted_at": job.submitted_at}
        return replace(job, **{key: self._begin + seconds for key, seconds in times.items() if seconds is not None})

    def close(self) -> None:
        self._file.close()


def _mend(path: Path) -> float:
    """Complete a log's last line, or cut it off if a kill has torn it, so that the next one stays whole. Returns the last time in it."""
    last = rest = b""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                rest = line
            elif line.strip():
                last = line
    seconds = _seconds(rest)
    if seconds is not None:
        with path.open("ab") as file:
            file.write(b"\n")
        return seconds
    seconds = _seconds(last) if last else 0.0
    if seconds is None:
        raise ConfigError(
            f'{path} is not an event log: its last line {last[:80]!r} has no finite number under "seconds". '
            "Choose another file, or move this one away"
        )
    os.truncate(path, path.stat().st_size - len(rest))
    return seconds


def _seconds(line: bytes) -> float | None:
    """The line's time; None if it is not a complete line of a log."""
    try:
        seconds = json.loads(line)["seconds"]
        return float(seconds) if type(seconds) in (int, float) and math.isfinite(seconds) else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


class EventRecord:
    """The event log of a server, which `tlora simulate` replays: logs/events.jsonl in its data directory.

    To be called in the controller's thread alone. Reports of steps and ticks are left out: they are nearly all there is, and no replay
    needs them. Where the log cannot be written, as on a full disk, the server says so and goes on without.
    """

    def __init__(self, directory: Path, most_bytes: int) -> None:
        """`most_bytes` of a file; five older ones are kept."""
        self._path, self._most_bytes = directory / "events.jsonl", most_bytes
        self._log: EventLog | None = None
        self._began_at_seconds = 0.0
        self._not_before = 0.0
        self._bases: set[str] = set()

    def begin(self, began_at_seconds: float) -> None:
        """Of a cluster whose clock showed that when it began."""
        self._began_at_seconds = began_at_seconds
        self._open()

    def see(self, now: float, item: Event | Action, bases: Mapping[str, int]) -> None:
        """What has happened, and the bytes of the bases that there are by now."""
        if isinstance(item, StepsDone | Tick):
            return
        if self._log is None and time.monotonic() >= self._not_before:
            self._open()
        if self._log is None:
            return
        try:
            for name in [name for name in bases if name not in self._bases]:
                self._log.write(now, BaseAdded(name, bases[name]))
                self._bases.add(name)
            self._log.write(now, item)
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _open(self) -> None:
        self._bases.clear()
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            self._log = EventLog(self._path, self._began_at_seconds, self._most_bytes)
        except (ConfigError, OSError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        logging.getLogger(__name__).warning("%s cannot be written: %s. Jobs go on; what happens meanwhile is in no log", self._path, error)
        self._not_before = time.monotonic() + _AGAIN_SECONDS
        with suppress(OSError):  # what was buffered cannot be written either
            self.close()


def not_told(names: Iterable[str], events: Path) -> list[str]:
    """Those of `names` whose end is missing in the event log: they ended while no controller ran."""
    left = dict.fromkeys(names)
    mark = f'"{JobFinished.__name__}"'
    if left and events.is_file():
        with events.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if mark in line:
                    for name in [name for name in left if f'"{name}"' in line]:
                        del left[name]
    return list(left)
