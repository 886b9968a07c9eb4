"""Limits on the resources that one tenant's data may take: set by a server, enforced in the data worker."""

from __future__ import annotations

import resource
import signal
import sys
from dataclasses import dataclass

from tlora.errors import DataError


@dataclass(frozen=True, slots=True)
class DataLimits:
    """`memory_bytes` of private memory; `seconds` of wall time; at most `row_characters` per row and `rows` rows."""

    memory_bytes: int
    cpu_seconds: int
    seconds: float
    row_characters: int
    rows: int

    def enforce(self) -> None:
        """Limit this process from now on. Too much memory raises MemoryError; too much time ends the process by a signal."""
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_DATA, (self.memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(used.ru_utime + used.ru_stime) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (spent + self.cpu_seconds, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def check_row(self, place: str, number: int, value: object) -> None:
        """Raises DataError with file and row."""
        if number > self.rows:
            raise DataError(f"{place}: the data has more than {self.rows:,} rows; split it")
        if _characters(value) > self.row_characters:
            raise DataError(f"{place}: longer than {self.row_characters:,} characters; a row is one sample: split it")


def describe_signal(number: int) -> str | None:
    """Why `enforce` ended a process with this signal; None for other signals."""
    return {signal.SIGXCPU: "used up its CPU seconds", signal.SIGALRM: "used up its time"}.get(signal.Signals(number))


def _characters(value: object) -> int:
    """The characters of all texts in a value; a number counts as one. The value is a tree, as it was read from a file."""
    count, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str | bytes):
            count += len(item)
        elif isinstance(item, dict):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
        else:
            count += 1
    return count
