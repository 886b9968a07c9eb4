"""How long a job's optimizer steps take, from one report to the next; the clock is the caller's."""

from __future__ import annotations


class StepTimer:
    """`steps` were through at `now` seconds, when the job joined."""

    def __init__(self, steps: int, now: float) -> None:
        self._told, self._told_at = steps, now
        self._steps, self._at = steps, now

    def see(self, steps: int, now: float) -> None:
        """The job has taken `steps` steps by `now`; the time counts from the change of the number."""
        if steps != self._steps:
            self._steps, self._at = steps, now

    def take(self) -> tuple[int, float] | None:
        """Steps in all, and the mean seconds of each since the last call; None without new steps."""
        if self._steps == self._told:
            return None
        report = self._steps, (self._at - self._told_at) / (self._steps - self._told)
        self._told, self._told_at = self._steps, self._at
        return report
