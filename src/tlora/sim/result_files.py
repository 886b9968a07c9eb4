"""The files that results go to: checked before anything is simulated, whole at every moment, a table written by one sweep at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from errno import EACCES, EISDIR, EWOULDBLOCK
from pathlib import Path

from tlora.durable import write_file
from tlora.errors import ConfigError
from tlora.sim.trace import find_trace


def check_results(trace: str, results: Sequence[tuple[str, Path]]) -> None:
    """Raises ConfigError where one of `results`, an option and its file each, cannot be written, or is the trace or another result.

    Makes their directories.
    """
    owners = {_target(find_trace(trace)[1]): "--trace"}
    for option, path in results:
        if owner := owners.get(_target(path)):
            raise ConfigError(f"{option} {path} is the file of {owner} too, whose content would be lost. Give another path")
        owners[_target(path)] = option
    for _, path in results:
        _check_writable(path)


def write_result(path: Path, content: str | bytes, remedy: str = "Free space or change its mode there, or give another path") -> None:
    """Make the file, or the one that it links to, hold `content`: the old or the new content at every moment. Raises ConfigError."""
    target = _target(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, content)
    except OSError as error:
        first = error.__cause__ if isinstance(error.__cause__, OSError) else error  # write_file's remedies are those of a training run
        raise ConfigError(f"{path} cannot be written ({first.strerror}). {remedy}") from None


@contextmanager
def held(path: Path) -> Generator[None]:
    """Keep other sweeps from writing `path` meanwhile: each would overwrite the other's rows. Raises ConfigError.

    The lock is a file in the same directory, as the table itself is replaced all the time. A killed sweep holds no lock.
    """
    target = _target(path)
    lock = target.with_name(f".{target.name}.lock")
    handle = None
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(handle).st_nlink:  # its holder deleted it between the two calls
            raise BlockingIOError(EWOULDBLOCK, "locked")
    except OSError as error:
        if handle is not None:
            os.close(handle)
        if isinstance(error, BlockingIOError):
            raise ConfigError(f"out {path} is being written by another sweep. Wait for its end, or give another file") from None
        raise ConfigError(f"out {path} cannot be written ({lock}: {error.strerror}). Put that right, or give another path") from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def _target(path: Path) -> Path:
    """What is really written: links are followed, so that they stay links."""
    return Path(os.path.realpath(path))


def _check_writable(path: Path) -> None:
    target = _target(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(EISDIR, "it is a directory")
        if target.exists() and not target.is_file():
            raise PermissionError(EACCES, "it is no plain file, and a result replaces what is there")
        if not all(os.access(place, os.W_OK) for place in (target.parent, target) if place.exists()):
            raise PermissionError(EACCES, "this user may not write there")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}). Give another path") from None
