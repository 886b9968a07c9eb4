"""File systems in memory, mounted for one test, which a killed test cannot leave behind: each test process has mounts of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_CLONE_NEWNS, _MS_REMOUNT, _MS_REC_PRIVATE, _MNT_DETACH = 0x20000, 32, 0x4000 | 0x40000, 2
_libc = ctypes.CDLL(None, use_errno=True)


def separate_mounts() -> None:
    """What this process and its children mount from now on ends with them. Without the right to mount: nothing."""
    if hasattr(_libc, "unshare") and _libc.unshare(_CLONE_NEWNS) == 0:
        assert _libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) == 0


@contextmanager
def mounted(directory: Path, options: str) -> Iterator[Path]:
    """A file system in memory; skips where this user may not mount one."""
    directory.mkdir()
    if _libc.mount(b"tmpfs", str(directory).encode(), b"tmpfs", 0, options.encode()) != 0:
        pytest.skip("no permission to mount a file system")
    try:
        yield directory
    finally:
        _libc.umount2(str(directory).encode(), _MNT_DETACH)


def resize(directory: Path, size: str) -> None:
    assert _libc.mount(b"tmpfs", str(directory).encode(), b"tmpfs", _MS_REMOUNT, f"size={size}".encode()) == 0
