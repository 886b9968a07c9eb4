"""The progress of a run as plain values, which the engine makes and a watcher displays. No torch here."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from tlora.errors import TloraError
from tlora.job import JobSpec

JobStatus = Literal["preparing", "queued", "training", "evaluating", "saving", "done", "stopped", "failed"]


Shown = TypeVar("Shown")


@dataclass(frozen=True)
class JobProgress:
    """One job's row. Losses are means per trained token, `loss` over the last ten steps as in `JobResult`; `share` is this job's part of
    the last seconds' tokens.
    """

    name: str
    status: JobStatus
    rank: int
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    num_tokens: int = 0
    tokens_per_second: float = 0.0
    share: float = 0.0
    eta_seconds: float | None = None
    reason: str = ""  # why it failed or stopped
    gpu: int | None = None  # where it is, of a run on several GPUs
    parts_on: tuple[int, ...] = ()  # other GPUs that compute some of its replicas

    @property
    def gpus_text(self) -> str:
        """All of them, with commas; "" on a single one."""
        return "" if self.gpu is None else ",".join(map(str, (self.gpu, *self.parts_on)))


@dataclass(frozen=True)
class RunProgress:
    """The whole run. `padding` is padded over computed tokens since the start, tails (`traffic.py`) left out; `stage` says what happens
    before training.
    """

    seconds: float
    jobs: tuple[JobProgress, ...]
    tokens_per_second: float = 0.0
    padding: float = 0.0
    stage: str = ""


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
