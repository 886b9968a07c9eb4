"""What tests of pages share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tlora.directory_lock import try_lock


@pytest.fixture
def hold() -> Iterator[Callable[[Path], None]]:
    """Holds a directory until the test ends, as a living run does."""
    with ExitStack() as stack:

        def hold(directory: Path) -> None:
            lock = try_lock(directory)
            assert lock is not None
            stack.callback(os.close, lock)

        yield hold
