"""A log file of bounded size: beyond a size it continues in a new file; older ones get the suffixes .1 to .5, and the oldest is removed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

KEPT = 5  # older files


class LogFile:
    """Appends to `path`. Opened with the first line, and again after a write that failed; use in one thread."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._file: BinaryIO | None = None
        self._bytes = 0

    def write(self, lines: Sequence[str]) -> None:
        """Write complete lines, flushed on return. Raises OSError, as on a full disk: then some of them may have been written."""
        if not lines:
            return
        try:
            file = self._open()
            for line in lines:
                if self.is_full(line):
                    file = self._turn()
                self._bytes += file.write(line.encode())
            file.flush()
        except OSError:
            with suppress(OSError):  # what was buffered cannot be written either
                self.close()
            raise

    def is_full(self, line: str) -> bool:
        """Whether the line will be the first of a new file."""
        if self._most_bytes is None:
            return False
        self._open()
        return self._bytes > 0 and self._bytes + len(line.encode()) > self._most_bytes

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
