"""A kernel's memory group with next to no memory: a process that is put into it is killed for lack of memory, and no other is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup/memory")
_LIMIT_BYTES = 256 << 10


class MemoryGroup:
    """`is_real` is false where this user may make none (not root, or no cgroups): then the signal is sent that the kernel would send."""

    def __init__(self, place: Path | None) -> None:
        self._place = place

    @property
    def is_real(self) -> bool:
        return self._place is not None

    def starve(self, *pids: int) -> None:
        """The next memory that one of the processes asks of the kernel ends it."""
        for pid in pids:
            if self._place is None:
                os.kill(pid, signal.SIGKILL)
            else:
                (self._place / "cgroup.procs").write_text(str(pid))


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    place: Path | None = None
    with suppress(OSError, StopIteration):
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        own = next(path for _, controllers, path in lines if controllers == "memory")
        made = _ROOT / own.strip().lstrip("/") / f"tlora-test-{os.getpid()}"
        made.mkdir()
        place = made
        (made / "memory.limit_in_bytes").write_text(str(_LIMIT_BYTES))
    try:
        yield MemoryGroup(place)
    finally:
        if place is not None:
            with suppress(OSError):  # of a worker that has not ended
                place.rmdir()
