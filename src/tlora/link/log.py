"""The log of a worker's process: its stderr, which its controller keeps in a file."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from typing import NoReturn


def note(line: str) -> None:
    """Write `line` to the log if that is possible: a full disk must not stop training, nor a worker that saves its jobs and ends."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201


def show_stacks_when_asked() -> None:
    """Log the stacks of all threads at SIGUSR1, also when the process hangs in a library. No effect on systems without that signal."""
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)


def leave(status: int) -> NoReturn:
    """End this process without joining its threads, which may wait for others; its output is flushed if possible."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)
