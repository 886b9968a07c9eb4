"""What identifies a file's content without reading it: the rule for facts about files that are kept.

A fact is kept under the file's identity, and holds for a file that has this identity. It is kept on a disk only once the identity is
settled: a change within a tick of the file system's clock leaves the times as they were. What is named by a hash of its content (a
tokenized set, an upload) never changes, and is known by its path.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

_SETTLED_SECONDS = 2.0  # the coarsest times of a file system (FAT)


class FileIdentity(NamedTuple):
    """Changes with every change of the file, and with its replacement by another one. Times in nanoseconds."""

    device: int
    inode: int
    num_bytes: int
    changed: int
    modified: int

    @property
    def is_settled(self) -> bool:
        return time.time() - max(self.changed, self.modified) / 1e9 >= _SETTLED_SECONDS


def identity_of(status: os.stat_result) -> FileIdentity:
    """From `path.stat()`, or from `os.fstat` of an open file."""
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns, status.st_mtime_ns)
