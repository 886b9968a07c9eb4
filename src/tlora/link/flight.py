"""Records which jobs a worker computes, in a small file written before each micro-batch that survives a SIGKILL."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import cast

_BYTES = 1 << 16  # of a file at most


class FlightRecorder:
    """Written without fsync: the kernel's copy survives the process. If it cannot be written, nothing is recorded."""

    def __init__(self, directory: Path, name: str = "") -> None:
        """`name` tells the processes of one worker apart (`flight_name`)."""
        self._last: tuple[str, ...] | None = None
        self._handle, self._path = -1, directory / f".flight-{name or os.getpid()}"
        with contextlib.suppress(OSError):
            self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def begin(self, jobs: tuple[str, ...]) -> None:
        """Record that these jobs are computed from now on."""
        if jobs != self._last and self._handle >= 0:
            self._last = jobs
            with contextlib.suppress(OSError):
                os.pwrite(self._handle, json.dumps(jobs).encode() + b"\n", 0)

    def close(self) -> None:
        """The worker ends by itself: remove the record."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
            self._path.unlink(missing_ok=True)


def read_flight(directory: Path, pid: int) -> frozenset[str]:
    """The jobs that the worker which was process `pid` computed last, on all its ranks; empty where that is not known. Their files are
    removed.
    """
    return frozenset[str]().union(*(_read(path) for path in [directory / f".flight-{pid}", *directory.glob(f".flight-{pid}-*")]))


def forget_flight(directory: Path, pid: int, rank: int) -> None:
    """Remove a rank's record: it did not cause the worker's end."""
    _read(directory / f".flight-{flight_name(pid, rank)}")


def flight_name(pid: int, rank: int) -> str:
    """The file name for a rank of the worker that is process `pid`."""
    return f"{pid}-{rank}"


def _read(path: Path) -> frozenset[str]:
    with contextlib.suppress(OSError, ValueError):
        with path.open("rb") as file:
            line = file.read(_BYTES).split(b"\n")[0]
        path.unlink()
        found: object = json.loads(line)
        return frozenset(cast("list[str]", found)) if isinstance(found, list) else frozenset()
    return frozenset()
