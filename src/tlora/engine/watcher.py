"""What receives the progress of a run and its notable lines, to display them. No torch here."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from tlora.errors import TloraError
from tlora.job import JobSpec
from tlora.progress.view import JobProgress, RunProgress

Shown = TypeVar("Shown")


class Watcher:
    """Receives progress (about four times a second) and notable lines (a checkpoint, a failure) as they happen.

    What a callback raises ends no run: the first time it is said on stderr, and `lost` keeps it for `run.json`.
    """

    def __init__(self, progress: Callable[[RunProgress], None] | None = None, note: Callable[[str], None] | None = None) -> None:
        self._progress, self._note = progress, note
        self.lost = ""

    def progress(self, state: RunProgress) -> None:
        if self._progress:
            self._show(self._progress, state)

    def stages(self, jobs: Sequence[JobSpec] = ()) -> Callable[[str], None]:
        """What shows a stage before training, in which all of `jobs` are prepared, or of a command without any."""
        rows, began = tuple(JobProgress(job.name, "preparing", job.r) for job in jobs), time.monotonic()
        return lambda stage: self.progress(RunProgress(time.monotonic() - began, rows, stage=stage))

    def note(self, line: str) -> None:
        if self._note:
            self._show(self._note, line)

    def _show(self, callback: Callable[[Shown], None], what: Shown) -> None:
        try:
            callback(what)
        except Exception as error:
            if not self.lost:
                self.lost = str(error) if isinstance(error, OSError | TloraError) else f"{type(error).__name__}: {error}"
                with suppress(OSError, ValueError, AttributeError):  # a stderr that is full, or closed, or none at all
                    sys.stderr.write(f"output is lost from here on, and training goes on: {self.lost}\n")
                    sys.stderr.flush()
