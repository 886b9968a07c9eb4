"""Where the replicas of a job that spans several GPUs add up their gradients."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """Flat gradients [P] of one global batch at a time for each job, added in the order of the replicas.

    The order is fixed because sums of floating-point numbers follow from it: a job's bytes are then the same on any number of GPUs.
    """

    def give(self, job_id: str, gradient_P: Tensor) -> None:
        """The next replica's gradient, which belongs to the exchange from now on. Does not wait."""
        ...

    def take(self, job_id: str) -> Tensor:
        """The sum of what was given, once; the next global batch starts anew."""
        ...

    def forget(self, job_id: str) -> None:
        """Drop what was given: the job has left, or its global batch starts over."""
        ...


class RunningSums:
    """The exchange of replicas that one process computes in turn: one buffer [P] for each job, and none between global batches."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def give(self, job_id: str, gradient_P: Tensor) -> None:
        if job_id in self._sums:
            self._sums[job_id] += gradient_P
        else:
            self._sums[job_id] = gradient_P

    def take(self, job_id: str) -> Tensor:
        return self._sums.pop(job_id)

    def forget(self, job_id: str) -> None:
        self._sums.pop(job_id, None)
