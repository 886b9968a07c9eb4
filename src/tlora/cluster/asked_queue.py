"""What users ask of a cluster, in the order of its times: jobs, and requests about jobs. No lock, no clock."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterator

from tlora.protocol import JobRequest, JobSubmitted


class AskedQueue:
    """What has not been taken."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, JobSubmitted | JobRequest]] = []
        self._serial = itertools.count()

    def put(self, asked: JobSubmitted | JobRequest, at_seconds: float) -> None:
        heapq.heappush(self._heap, (at_seconds, next(self._serial), asked))

    @property
    def due_seconds(self) -> float:
        """When the next is to be taken; infinite for none."""
        return self._heap[0][0] if self._heap else math.inf

    @property
    def jobs(self) -> dict[str, JobSubmitted]:
        """Those that have not been taken, in the order of their times."""
        return {asked.job_id: asked for *_, asked in sorted(self._heap, key=lambda entry: entry[:2]) if isinstance(asked, JobSubmitted)}

    def drop_jobs(self, names: Collection[str]) -> None:
        """They have come otherwise. What is asked of them stays."""
        self._heap = [entry for entry in self._heap if not isinstance(entry[2], JobSubmitted) or entry[2].job_id not in names]
        heapq.heapify(self._heap)

    def take(
        self, now: float, admit: Callable[[JobSubmitted], JobSubmitted], is_open: Callable[[str], bool]
    ) -> Iterator[JobSubmitted | JobRequest]:
        """What is due. `admit` returns a job as it comes. A request about a job that is not open, as it has ended, is dropped."""
        while self.due_seconds <= now:
            asked = heapq.heappop(self._heap)[2]
            if isinstance(asked, JobSubmitted):
                yield admit(asked)
            elif is_open(asked.job_id):
                yield asked
