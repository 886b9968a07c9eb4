"""The log of a worker's process: its stderr, which its controller keeps in a file."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn


def note(line: str) -> None:
    """Write `line` to the log if that is possible: a full disk must not stop training, nor a worker that saves its jobs and ends."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201


def show_stacks_when_asked(others: Callable[[], Iterable[int]] = tuple) -> None:
    """Log the stacks of all threads at SIGUSR1, also when the process hangs in a library, and have the processes `others` do the same. No
    effect on systems without that signal.
    """
    if hasattr(signal, "SIGUSR1"):

        def ask(*_: object) -> None:
            for pid in others():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)

        faulthandler.unregister(signal.SIGUSR1)  # else it stays behind what is set next
        signal.signal(signal.SIGUSR1, ask)
        faulthandler.register(signal.SIGUSR1, chain=True)


def leave(status: int) -> NoReturn:
    """End this process without joining its threads, which may wait for others; its output is flushed if possible."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)
