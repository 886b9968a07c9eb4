"""What the ranks of a group exchange: where a job's replicas add up their gradients, and what all ranks must decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from tlora.adapters.state import AdapterState
from tlora.group.isolation import Failure
from tlora.group.job_run import BatchLosses, Means
from tlora.group.reports import Status

Result = TypeVar("Result")
End = tuple[Status, str]  # how a job ends, and why


class Decisions:
    """Each method takes what this rank has observed and returns what holds for the group. With one rank that is the same.

    Every rank calls the same methods in the same order, so an exchange between ranks can take place inside them and nowhere else.
    """

    def stop(self, asked: bool) -> bool:
        """Whether the run ends before the next micro-batch."""
        return asked

    def result(self, seen: Result | Failure) -> Result | Failure:
        """The outcome of work that all ranks do, a micro-batch or a join: a failure if it failed on any rank."""
        return seen

    def token_budget(self, fits: int) -> int:
        """Tokens of a micro-batch from now on, after running out of memory, or after it has sufficed for a while."""
        return fits

    def culprits(self, seen: dict[str, str]) -> dict[str, str]:
        """Jobs whose part of a micro-batch fails alone, with the reasons."""
        return seen

    def evaluations(self, means: list[Means]) -> list[Means]:
        """Means of the evaluations that are through; early stopping and the best checkpoint follow from their losses."""
        return means

    def end(self, job_id: str, due: End | None) -> End | None:
        """Whether and how a job ends at its present step."""
        return due


@dataclass(frozen=True)
class SummedGradient:
    """The gradient [P] of a whole global batch, and what other ranks have computed of it: their losses (as `BatchLosses.elsewhere`), by
    replica, and their tokens. `weights`: those of the replicas from the next global batch on; None: as they are.
    """

    gradient_P: Tensor
    elsewhere: Sequence[Sequence[float]] = ()
    tokens: int = 0
    weights: tuple[float, ...] | None = None


class Exchange(Protocol):
    """Flat gradients [P] of one global batch at a time for each job, added in the order of the replicas.

    The order is fixed because sums of floating-point numbers follow from it: a job's bytes are then the same on any number of GPUs, and on
    each of those that compute it. Each of them takes the sum and makes the optimizer step, so no rank waits for new weights. The rank that
    computes a job's first replica is its lead rank, which publishes the state that the job begins with. Nothing here waits for another
    rank, nor for a device.
    """

    def replicas_here(self, job_id: str, replicas: int) -> Sequence[int]:
        """Which of a job's replicas this rank computes."""
        ...

    def offered(self, job_id: str) -> None:
        """This rank's part of the job's next global batch can be computed from now on."""
        ...

    def give(self, job_id: str, step: int, replica: int, gradient_P: Tensor) -> None:
        """The gradient of the next of this rank's replicas, for the global batch after `step` steps; it belongs to the exchange from now
        on.
        """
        ...

    def send(self, job_id: str, step: int, passed: BatchLosses) -> None:
        """Of a job that spans ranks, once for each global batch: all of this rank's replicas have been given, if it has samples of it, and
        so much went through.
        """
        ...

    def take(self, job_id: str, step: int, replicas: Sequence[int]) -> SummedGradient | None:
        """Once this rank has given and sent its own: the sum over `replicas`, once. None while other ranks have not."""
        ...

    def publish(self, job_id: str, state: AdapterState) -> None:
        """Publish the job's initial state; called on its lead rank."""
        ...

    def fetch(self, job_id: str, state: AdapterState) -> bool:
        """Whether the job's initial state has come; it is then in `state`. Called away from the lead rank."""
        ...

    @property
    def has_news(self) -> bool: ...

    def news(self) -> list[str]:
        """Jobs for which another rank has sent or published something since the last call."""
        ...

    def forget(self, job_id: str) -> None:
        """Drop this rank's gradients: its part of the global batch starts over."""
        ...

    def leave(self, job_id: str, failed: str = "") -> None:
        """The job has left this rank's group; elsewhere than on its lead rank perhaps because it `failed`, which others must learn."""
        ...


class RunningSums:
    """The exchange of replicas that one process computes in turn: one buffer [P] for each job, and none between global batches."""

    has_news = False

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def replicas_here(self, job_id: str, replicas: int) -> Sequence[int]:
        return range(replicas)

    def offered(self, job_id: str) -> None:
        pass

    def give(self, job_id: str, step: int, replica: int, gradient_P: Tensor) -> None:
        if job_id in self._sums:
            self._sums[job_id] += gradient_P
        else:
            self._sums[job_id] = gradient_P

    def send(self, job_id: str, step: int, passed: BatchLosses) -> None:
        raise AssertionError(f"{job_id} spans no other rank")

    def take(self, job_id: str, step: int, replicas: Sequence[int]) -> SummedGradient | None:
        return SummedGradient(self._sums.pop(job_id))

    def publish(self, job_id: str, state: AdapterState) -> None:
        pass

    def fetch(self, job_id: str, state: AdapterState) -> bool:
        return False

    def news(self) -> list[str]:
        return []

    def forget(self, job_id: str) -> None:
        self._sums.pop(job_id, None)

    def leave(self, job_id: str, failed: str = "") -> None:
        self.forget(job_id)
