"""The time by which things are old enough to be removed. A system clock that is set does not make them older."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_JUMP_SECONDS = 5.0  # beyond what the system's clock is ever slewed by between two looks


class SteadyClock:
    """Unix time less all jumps ahead that the system's clock has made since this began. So nothing seems older than it is: after a jump
    back, what came before it only seems younger. Safe in several threads; a look a minute sees a jump.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._steady = wall, steady
        self._lock = threading.Lock()
        self._seen = wall(), steady()
        self._ahead = 0.0

    def now(self) -> float:
        with self._lock:
            wall, steady = self._wall(), self._steady()
            jump = (wall - self._seen[0]) - (steady - self._seen[1])
            self._seen = wall, steady
            if jump > _JUMP_SECONDS:
                self._ahead += jump
            return wall - self._ahead
