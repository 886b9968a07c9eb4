"""Locks on directories: whoever writes a run holds its directory, and a killed process holds nothing. No file is made for it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def try_lock(directory: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """An open lock on `directory`, of `flock`'s `kind`, which lasts until it is closed, also in a process that inherits it; None if another
    holds one that excludes it. Raises OSError.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        os.close(handle)
        raise
    return handle


def is_free(directory: Path) -> bool:
    """Whether it is certain that nothing holds `directory`: not where the file system cannot tell, nor where there is no such directory."""
    try:
        handle = try_lock(directory, fcntl.LOCK_SH)  # shared, for others may look at this moment too
    except OSError:
        return False
    if handle is None:
        return False
    os.close(handle)
    return True
