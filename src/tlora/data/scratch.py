"""Directories in which sets are being made, and the state of an unfinished one that is kept for the next launch.

A directory is kept under its set's key while one process at a time fills it, which holds a lock on a file in it. A progress file says how
long its files are, with their hashes; it is replaced as a whole after they are written. What does not match it is not used. Two processes
that make the same set do not share it: the second has a directory of its own, which is removed with the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import psutil

SCRATCH_PREFIX = "tmp-"
PROGRESS = "progress.json"
STALE_SECONDS = 24 * 3600.0
KEPT_SECONDS = 7 * STALE_SECONDS
_LOCK = "lock"  # holds the process id of the last owner
_READ_BYTES = 1 << 22
Progress = dict[str, Any]
_own: set[str] = set()  # names of this process's private directories


class HashedFile:
    """A file that grows at its end, with the sha256 of its content."""

    def __init__(self, path: Path, known: Sequence[Any] = (0, ""), beat: Callable[[], None] = lambda: None) -> None:
        """`known`: an earlier `state`, of which the content is kept. Raises ValueError where the file does not match it. `beat` is called
        every few MiB.
        """
        self.size, digest = int(known[0]), str(known[1])
        self._hash = hashlib.sha256()
        self._file: BinaryIO = path.open("r+b" if self.size else "wb")
        rest = self.size
        while rest and (content := self._file.read(min(rest, _READ_BYTES))):
            self._hash.update(content)
            rest -= len(content)
            beat()
        if self.size and self._hash.hexdigest() != digest:
            self._file.close()
            raise ValueError(f"{path} has changed")
        self._file.truncate(self.size)
        self._file.seek(self.size)

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._hash.update(content)
        self.size += len(content)

    def state(self) -> list[Any]:
        """Its size and its hash, once all is written."""
        self._file.flush()
        return [self.size, self._hash.hexdigest()]

    def close(self) -> None:
        self._file.close()


class Scratch:
    """A directory that this process alone fills. `keeps`: whether it is left for the next launch."""

    def __init__(self, final: Path, keep: bool) -> None:
        """`keep`: use the one that is kept for the set `final`, unless another process does."""
        final.parent.mkdir(parents=True, exist_ok=True)
        kept = final.parent / f"{SCRATCH_PREFIX}set-{final.name}"
        self._lock = _lock(kept) if keep else None
        self.keeps = self._lock is not None
        self.path = kept if self.keeps else private_directory(final.parent)
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)
            os.utime(kept)  # it is not old any more

    def read_progress(self, identity: object) -> Progress | None:
        """What `write_progress` has written for the same `identity`; None if there is nothing intact."""
        progress = _read_progress(self.path)
        return progress if progress is not None and progress["identity"] == _digest(json.dumps(identity)) else None

    def write_progress(self, identity: object, progress: Progress) -> None:
        """Not synced: where a power cut leaves other bytes, the hashes do not match."""
        text = json.dumps(progress | {"identity": _digest(json.dumps(identity))})
        new = self.path / f"{PROGRESS}.new"
        new.write_text(f"{_digest(text)}\n{text}", encoding="utf-8")
        new.replace(self.path / PROGRESS)

    def open_files(
        self, names: Sequence[str], states: Mapping[str, Sequence[Any]] | None = None, beat: Callable[[], None] = lambda: None
    ) -> dict[str, HashedFile] | None:
        """Empty files, or those that have the `states`; None where one of them does not match its own."""
        files: dict[str, HashedFile] = {}
        try:
            for name in names:
                files[name] = HashedFile(self.path / name, states[name] if states is not None else (0, ""), beat)
        except (OSError, ValueError):
            for file in files.values():
                file.close()
            if states is None:
                raise
            return None
        return files

    def empty(self) -> None:
        """Remove all but the lock, the progress first."""
        (self.path / PROGRESS).unlink(missing_ok=True)
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()

    def leave(self) -> None:
        """The next launch may have it, if there is progress in it."""
        if self.keeps and _has_progress(self.path):
            self._unlock()
        else:
            self.remove()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def private_directory(parent: Path) -> Path:
    """A new directory, known by this process's id."""
    path = parent / f"{SCRATCH_PREFIX}{os.getpid()}-{uuid.uuid4().hex}"
    _own.add(path.name)
    path.mkdir()
    return path


def remove_old(cache_dir: Path) -> None:
    """Remove the directories that no process fills any more: those with progress after a week, others after a day."""
    for path in cache_dir.glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # another process removed it first
            if _is_old(path):
                _remove_unless(path, lambda path: not _is_old(path))


def remove_left_by(cache_dir: Path, process_id: int) -> None:
    """After the end of the process: remove its directories, but for those with progress."""
    for path in cache_dir.glob(f"{SCRATCH_PREFIX}{process_id}-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in _owned_by(cache_dir, process_id):
        _remove_unless(path, _has_progress)


def progress_of(cache_dir: Path, process_id: int) -> list[Progress]:
    """The progress of the directories that the process was the last to fill."""
    saved = (_read_progress(path) for path in _owned_by(cache_dir, process_id))
    return [progress for progress in saved if progress is not None]


def _owned_by(cache_dir: Path, process_id: int) -> list[Path]:
    directories: list[Path] = []
    for lock in cache_dir.glob(f"{SCRATCH_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError, ValueError):
            if int(lock.read_text(encoding="utf-8")) == process_id:
                directories.append(lock.parent)
    return directories


def _is_old(path: Path) -> bool:
    if _is_being_filled(path):  # the clock may have been set since
        return False
    most = KEPT_SECONDS if _has_progress(path) else STALE_SECONDS
    return time.time() - path.stat().st_mtime > most


def _is_being_filled(path: Path) -> bool:
    """Whether the process is there that a private directory is named after; of another host it is not known here. In a container each
    launch may have the same number: of this process its own count.
    """
    number = path.name.removeprefix(SCRATCH_PREFIX).partition("-")[0]
    if number == str(os.getpid()):
        return path.name in _own
    return number.isdecimal() and psutil.pid_exists(int(number))


def _has_progress(path: Path) -> bool:
    return (path / PROGRESS).exists()


def _remove_unless(path: Path, is_wanted: Callable[[Path], bool]) -> None:
    """Remove the directory, unless a process fills it or it is wanted."""
    has_lock = (path / _LOCK).exists()
    lock = _lock(path) if has_lock else None
    if lock is not None or not has_lock:
        with contextlib.suppress(OSError):
            if not is_wanted(path):
                shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def _lock(directory: Path) -> int | None:
    """The descriptor of the locked file in `directory`, which is made if there is none; None where another process holds it, it is another
    user's, or the file system has no locks. The lock ends with this process: those that it forks do not inherit it.
    """
    try:
        directory.mkdir(exist_ok=True)
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except (FileNotFoundError, PermissionError):  # its owner has just removed it, or it is another user's in a cache that several share
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat((directory / _LOCK).stat(), os.fstat(descriptor)):  # or its owner has removed it since it was opened
            return descriptor
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN, errno.ENOENT):  # there are no locks here: no process holds it
            shutil.rmtree(directory, ignore_errors=True)
    os.close(descriptor)
    return None


def _read_progress(directory: Path) -> Progress | None:
    try:
        digest, _, text = (directory / PROGRESS).read_text(encoding="utf-8").partition("\n")
        return cast("Progress", json.loads(text)) if digest == _digest(text) else None
    except (OSError, ValueError):
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
