"""Which worker may write in a job's directory: one at a time, under the number of its attempt.

A claim is a locked file next to the jobs' directories that holds the number. The lock keeps others out as long as the process lives, also
when it is stopped; the number is looked at before each rename, so that a worker whose lock did not hold (a file system that does not
pass locks on to other hosts) cannot put anything in place once a later attempt has begun.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from tlora import durable
from tlora.errors import CheckpointError

CLAIMS = ".claims"  # no name of a job begins with a dot
_LOOK_SECONDS = 0.05


class HeldError(CheckpointError):
    """The job's directory is held by another process, or belongs to a later attempt."""


class JobLease:
    """Held from `take_claim` to `release`."""

    def __init__(self, path: Path, number: int, handle: int) -> None:
        self._path, self._number, self._handle = path, number, handle

    def check(self, _: str = "") -> None:
        """Call before any file is put in place (`durable.Failpoint`). Raises HeldError for a job that was handed over."""
        number = _number_in(self._path)
        if number != self._number:
            raise HeldError(
                f"{self._path.name} was handed over: attempt {number} writes it, and this is {self._number}. Nothing is written"
            )

    def release(self) -> None:
        """May be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def take_claim(jobs: Path, name: str, number: int, wait_seconds: float) -> JobLease:
    """The claim on the directory of the job `name` in `jobs`, for its attempt `number`.

    Raises HeldError if another process still holds it after `wait_seconds`, or a later attempt has begun; CheckpointError if the claim
    cannot be written.
    """
    durable.make_directory(jobs / CLAIMS)
    path = jobs / CLAIMS / name
    try:
        return _claim(path, number, wait_seconds)
    except CheckpointError:
        raise
    except OSError as error:
        raise durable.write_error(path, error) from error


def _claim(path: Path, number: int, wait_seconds: float) -> JobLease:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(handle, path, wait_seconds)
        begun = _number_in(path)
        if begun > number:
            raise HeldError(f"{path.name} was handed over: attempt {begun} has begun, and this is {number}")
        os.pwrite(handle, f"{number} {os.getpid()}\n".encode().ljust(64), 0)
        os.fsync(handle)
    except BaseException:
        os.close(handle)
        raise
    return JobLease(path, number, handle)


def _lock(handle: int, path: Path, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                owner = path.read_text(encoding="ascii", errors="replace").split()[1:2]
                holder = f"process {owner[0]}" if owner else "another process"
                raise HeldError(f"the directory of {path.name} is held by {holder}, which has not ended") from None
            time.sleep(_LOOK_SECONDS)


def _number_in(path: Path) -> int:
    """0 if the file holds none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(path.read_text(encoding="ascii", errors="replace").split()[0])
    return 0
