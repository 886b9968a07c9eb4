"""Into how many slices a global batch is cut: found by measured step times in a few trials, then kept. Pure; seconds come from its caller.

tLoRA (arXiv 2602.07263) adapts its number of nano-batches by additive increase and multiplicative decrease. More slices leave the stages of
a pipeline less to wait for, and each costs something by itself; seconds over their number fall first and rise then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

TRIALS = 20  # measured steps
_LAST_TRIALS = 6  # of them, for those that are nearly as fast as the fastest
_MARGIN = 0.03  # of the fastest: by less than that no step is slower, it is noise
_INCREASES = 16  # that lead from none to the most


class SliceCount:
    """`count` is what to try now and, once `settled`, what was found. It begins at `first`, and doubles up to the first slower step.

    A step that is slower than the fastest by a margin is measured once more; if it is again, `count` is halved, and grows by one (or a
    sixteenth of `most`) a step from there. The last trials go to the counts that are nearly as fast as the fastest, those that were
    measured least first. Of a count's steps the lower median counts: what disturbs a step makes it longer.
    """

    def __init__(self, most: int, first: int, trials: int = TRIALS) -> None:
        assert most > 0 and first > 0, (most, first)
        self._most, self.count = most, min(first, most)
        self._left = trials if most > 1 else 0
        self._measured: dict[int, list[float]] = {}
        self._doubles = True

    @property
    def settled(self) -> bool:
        return not self._left

    @property
    def tried(self) -> Mapping[int, float]:
        """Seconds of a step, by the count, as far as they were measured."""
        return {count: self._seconds(count) for count in sorted(self._measured)}

    def see(self, step_seconds: float) -> None:
        """A step with `count` slices took so long."""
        assert not self.settled and 0 < step_seconds < math.inf, step_seconds
        self._measured.setdefault(self.count, []).append(step_seconds)
        self._left -= 1
        tried = self.tried
        fastest = min(tried, key=tried.__getitem__)  # of equals the least
        limit = tried[fastest] * (1 + _MARGIN)
        if self.settled:
            self.count = fastest
        elif self._left <= _LAST_TRIALS:
            near = [count for count, seconds in tried.items() if seconds <= limit + tried[fastest] * _MARGIN]
            self.count = min(near, key=lambda count: (len(self._measured[count]), tried[count]))
        elif tried[self.count] <= limit:
            self._increase()
        elif len(self._measured[self.count]) > 1:
            self._decrease()

    def _increase(self) -> None:
        if self.count == self._most:
            self._decrease()
        else:
            more = self.count if self._doubles else math.ceil(self._most / _INCREASES)
            self.count = min(self._most, self.count + more)

    def _decrease(self) -> None:
        self._doubles, self.count = False, max(1, self.count // 2)

    def _seconds(self, count: int) -> float:
        measured = sorted(self._measured[count])
        return measured[(len(measured) - 1) // 2]
