"""What users ask of a cluster, in the order of its times: jobs, and requests about jobs. No lock, no clock."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterator

from tlora.protocol import JobRequest, JobSubmitted

AGAIN_SECONDS = 1.0  # between two looks whether the hosts that a job waits for have come


class AskedQueue:
    """What has not been taken; a job that waits for hosts stays, and so does what is asked of it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, JobSubmitted | JobRequest]] = []
        self._later: dict[str, list[JobRequest]] = {}  # about jobs that wait for hosts
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
        for name in names:
            self._follow(name)
        self._keep(lambda asked: not isinstance(asked, JobSubmitted) or asked.job_id not in names)

    def take(
        self, now: float, admit: Callable[[JobSubmitted], JobSubmitted | None], is_open: Callable[[str], bool]
    ) -> Iterator[JobSubmitted | JobRequest]:
        """What is due. `admit` returns the job as it comes, or None while it waits for hosts: a request to hold it follows it then, and one
        to cancel it ends it here. A request about a job that is not open, as it has ended, is dropped.
        """
        while self.due_seconds <= now:
            asked = heapq.heappop(self._heap)[2]
            if isinstance(asked, JobSubmitted):
                if (taken := admit(asked)) is None:
                    self.put(asked, now + AGAIN_SECONDS)
                else:
                    self._follow(asked.job_id)
                    yield taken
            elif is_open(asked.job_id):
                yield asked
            elif not self._has(asked.job_id):
                continue
            elif asked.verb == "cancel":
                self._keep(lambda other, name=asked.job_id: other.job_id != name)
                self._later.pop(asked.job_id, None)
                yield asked
            else:
                self._later.setdefault(asked.job_id, []).append(asked)

    def _follow(self, name: str) -> None:
        """What was asked of a job while it waited comes before what is asked from now on."""
        for request in self._later.pop(name, ()):
            self.put(request, -math.inf)

    def _has(self, name: str) -> bool:
        return any(isinstance(asked, JobSubmitted) and asked.job_id == name for *_, asked in self._heap)

    def _keep(self, stays: Callable[[JobSubmitted | JobRequest], bool]) -> None:
        self._heap = [entry for entry in self._heap if stays(entry[2])]
        heapq.heapify(self._heap)
