"""A stream whose disk has no room."""

from __future__ import annotations

import errno


class FullStream:
    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")
