"""The log of a worker's process: its stderr, which its controller keeps in a file."""

from __future__ import annotations

import contextlib
import sys


def note(line: str) -> None:
    """If it can be written: a full disk keeps nobody from training, nor a worker from saving its jobs and ending."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201
