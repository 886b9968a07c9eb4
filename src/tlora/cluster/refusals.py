"""Notes on refused connections, few of many: a flood of them must not fill a log."""

from __future__ import annotations

import time
from collections.abc import Callable

SAID = 8  # refusals that are noted one by one, before they are counted
WINDOW_SECONDS = 60.0  # between two counts; without a refusal for so long, the next are noted one by one again


class Refusals:
    """At most `SAID` notes after a quiet window, and one for each window while refusals go on. Not for several threads."""

    def __init__(self, note: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._note, self._clock = note, clock
        self._began = clock() - WINDOW_SECONDS
        self._room = SAID  # how many more are noted before they are counted
        self._counted, self._last = 0, ""

    def see(self, reason: str) -> None:
        """A connection was refused."""
        self.look()
        if self._clock() - self._began >= WINDOW_SECONDS:
            self._began, self._room = self._clock(), SAID
        if self._room:
            self._room -= 1
            self._note(f"refused: {reason}")
        else:
            self._counted, self._last = self._counted + 1, reason

    def look(self) -> None:
        """Call now and then: notes the count when its window is over."""
        if self._counted and self._clock() - self._began >= WINDOW_SECONDS:
            self.tell_rest()

    def tell_rest(self) -> None:
        """Note the count now and begin the next window."""
        if self._counted:
            seconds, more = self._clock() - self._began, f"{self._counted:,} more connection{'s' * (self._counted > 1)}"
            self._note(f"refused: {more} in {seconds:.0f} s, the last: {self._last}")
            self._began, self._counted = self._clock(), 0
