"""What happens when the disk is full, in one place; `durable.is_full` recognises it.

- A save that a later one can replace is left out, noted once, and tried when the next is due (`DiskReserve.full`).
- A save that no later one can replace gets the space that was kept for it, then that of older checkpoints (`DiskReserve.write`).
- A caller that can wait, as a worker, keeps the job's state in memory and tries again (`retry_when_disk_full` with a `Backoff`).

The reserve is a file next to the jobs' directories, as large as what the jobs will write at their ends; it shrinks as they end. It is
named like a leftover, so that the next run removes it after a kill. Only older checkpoints are removed. What a save writes is decided
elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from tlora import durable
from tlora.errors import CheckpointError
from tlora.group.isolation import Failure, try_call
from tlora.wording.numbers import gib

_Result = TypeVar("_Result")

WaitsForRoom = Callable[[str, OSError], bool]
"""Takes a job and the error of its write that found no space, and returns after a while: True to try again, False to give up."""


def retry_when_disk_full(job: str, step: Callable[[], _Result], wait: WaitsForRoom | None) -> _Result | Failure:
    """`try_call(step)`, repeated while the disk is full and `wait` returns True; once without `wait`."""
    while True:
        result = try_call(step)
        error = result.error if isinstance(result, Failure) else None
        if wait is None or not durable.is_full(error) or not wait(job, error):
            return result


ROOM_ON_DISK = "room on the disk for its files: the operator must free some"  # what a job waits for, in its owner's words
_LOOK_SECONDS = 2.0
_NOTE_SECONDS = 600.0  # between two notes of one job


class Backoff:
    """A `WaitsForRoom` that waits until the process is to exit. Safe in several threads."""

    def __init__(
        self, beat: Callable[[], None], ending: threading.Event, note: Callable[[str], None], tell: Callable[[str], None] = lambda _: None
    ) -> None:
        """`beat` is called at each look, so that a wait for a writer is not taken for a hang, and `tell` with the job; `ending` stops all
        waits; `note` gets a line now and then.
        """
        self._beat, self._ending, self._note, self._tell = beat, ending, note, tell
        self._noted: dict[str, float] = {}  # by job

    def __call__(self, job: str, error: OSError) -> bool:
        now = time.monotonic()
        if now - self._noted.get(job, float("-inf")) >= _NOTE_SECONDS and not self._ending.is_set():
            self._noted[job] = now
            self._note(f"{job}: {error}. It waits until there is room, and then goes on by itself")
        self._tell(job)
        gone = self._ending.wait(_LOOK_SECONDS)
        self._beat()
        return not gone


# Kept at most, unless a single job needs more: where a file system cannot allocate without writing, a block at a time is written.
_MOST_BYTES = 1 << 30


class DiskReserve:
    """Bytes kept back for the jobs that have not ended. `needs`: what the last save of each takes, by name.

    Invariant: the file is never larger than what the jobs that have not ended will need. Several threads write and another one trains:
    each save is made inside `saving`, and one that needs room that was kept inside `saving_alone`, so that no other save takes it.
    """

    def __init__(self, directory: Path, needs: Mapping[str, int], note: Callable[[str], None]) -> None:
        self._path, self._needs, self._note = durable.scratch_path(directory), dict(needs), note
        self._told, self._lock = False, threading.Lock()
        self._saves, self._changed = 0, threading.Condition()
        self._kept: dict[Path, set[str]] = {}  # a job's directory -> the checkpoints there that its resume needs
        self._ended: list[Path] = []  # of jobs that have handed their adapters over, and need none
        self._bytes = self._allocate(min(sum(needs.values()), max(_MOST_BYTES, *needs.values(), 0))) if needs else 0

    def _allocate(self, wanted: int) -> int:
        """Reserve at most half of the free space, so that the reserve does not fill the disk; nothing if there is no room."""
        try:
            wanted = min(wanted, shutil.disk_usage(self._path.parent).free // 2)
            with self._path.open("xb") as file:
                if wanted:
                    os.posix_fallocate(file.fileno(), 0, wanted)
        except (OSError, AttributeError):  # macOS has no such call
            self._remove()
            return 0
        return wanted

    @contextmanager
    def saving(self) -> Iterator[None]:
        with self._changed:
            self._saves += 1
        try:
            yield
        finally:
            with self._changed:
                self._saves -= 1
                self._changed.notify_all()

    @contextmanager
    def saving_alone(self) -> Iterator[None]:
        """Wait for the saves that are under way, and block new ones."""
        with self._changed:
            self._changed.wait_for(lambda: not self._saves)
            yield

    def write(self, name: str, write: Callable[[], None], needed_bytes: int) -> None:
        """Call `write`, a save of the job. On a full disk, with `needed_bytes`, again with as much of the reserve, and again as long as
        older checkpoints can go. Raises CheckpointError.
        """
        try:
            with self.saving():
                write()
            return
        except CheckpointError as error:
            if not (durable.is_full(error) and needed_bytes):
                raise
            full = error
        with self.saving_alone():
            for make_room in (partial(self.release, name, needed_bytes), self.remove_older, self.remove_older):
                if not (what := make_room()):
                    continue
                self._note(f"{name}: the disk is full; {what}")
                try:
                    write()
                    return
                except CheckpointError as error:
                    if not durable.is_full(error):
                        raise
                    full = error
        raise full

    def keep(self, directory: Path, checkpoints: set[str], *, ended: bool = False) -> None:
        """Keep only these checkpoints of the job; once it has `ended`, they too may be removed, but last."""
        with self._lock:
            self._kept[directory] = checkpoints
            if ended:
                self._ended.append(directory)

    def forget(self, directory: Path) -> None:
        """Never remove checkpoints of this job again: it may continue elsewhere."""
        with self._lock:
            self._kept.pop(directory, None)

    def remove_older(self) -> str:
        """Inside `saving_alone`: remove the checkpoints that no resume needs, or, if there are none, those of jobs that have ended.
        Returns what was done, in words; empty if there was nothing to remove.
        """
        with self._lock:
            removed = [durable.remove_checkpoints(directory, kept) for directory, kept in self._kept.items()]
            if any(removed):
                return "older checkpoints, which no resume needs, made room for what it must keep"
            ended, self._ended = self._ended, []
            for directory in ended:
                del self._kept[directory]
            removed = [durable.remove_checkpoints(directory, set()) for directory in ended]
            return "the checkpoints of jobs that are done made room for what it must keep" if any(removed) else ""

    def full(self, error: OSError) -> None:
        """A save that a later one can replace found no space: noted once, until a save succeeds again."""
        if not self._told:
            kept = f"{gib(self._bytes)} are kept back for the jobs' last ones. " if self._bytes else ""
            self._note(f"{error}. The jobs go on without checkpoints; each is tried again when the next is due. {kept}")
        self._told = True

    def saved(self) -> None:
        """A save succeeded: the next failure is reported again."""
        self._told = False

    def release(self, name: str, size: int) -> str:
        """Free `size` bytes, or all that is left, for a save that no later one can replace. Returns what was done, in words; empty if
        nothing is left.
        """
        with self._lock:
            if not self._bytes:
                return ""
            self._needs[name] = max(0, self._needs.get(name, 0) - size)
            self._shrink(self._bytes - size)
            return "what it must keep goes where room was kept for it"

    def ended(self, name: str) -> None:
        """The job writes nothing more: free its reserve."""
        with self._lock:
            self._needs.pop(name, None)
            self._shrink(min(self._bytes, sum(self._needs.values())))

    def close(self) -> None:
        with self._lock:
            self._shrink(0)
            self._remove()

    def _shrink(self, size: int) -> None:
        """Truncating a file takes no space; if even that fails, the whole file is removed."""
        self._bytes = max(0, size)
        try:
            if self._bytes:
                os.truncate(self._path, self._bytes)
                return
        except OSError:
            self._bytes = 0
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):  # the next run removes it
            self._path.unlink(missing_ok=True)
