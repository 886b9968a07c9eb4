"""Measurements that killed their worker are remembered: else each start of a worker would end the same way.

A file stands in the user's cache for as long as a turn of a measurement is computed. One whose process has ended says that it was killed in
it, by the driver or for its memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from tlora.cache_directory import cache_dir
from tlora.engine.calibration import key_of
from tlora.link.process_identity import ProcessIdentity, boot_id, identify
from tlora.worker_protocol import Load


class Attempt:
    """Of this process at one base on one device."""

    def __init__(self, load: Load, device: str) -> None:
        self._path = _directory() / f"{key_of(load, device)}.{os.getpid()}"
        self._identity = identify(os.getpid())

    @contextmanager
    def mark(self) -> Iterator[None]:
        """While this lasts, the end of this process is taken to be the measurement's doing; not where the cache cannot be written."""
        if self._identity is not None:
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text(json.dumps(asdict(self._identity)))
        try:
            yield
        finally:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def find_deadly(load: Load, device: str) -> Path | None:
    """The file of a measurement in which a process was killed; None where there is none. Those of before the last start of this machine
    are removed: what ended them is not known.
    """
    for path in sorted(_directory().glob(f"{key_of(load, device)}.*")):
        with suppress(OSError, ValueError, TypeError):
            found = ProcessIdentity(**json.loads(path.read_text()))
            if found.boot != boot_id():
                path.unlink(missing_ok=True)
            elif not found.is_alive:
                return path
    return None


def _directory() -> Path:
    return cache_dir() / "measuring"
