"""What all ranks of a group must decide alike, apart from what a single rank observes."""

from __future__ import annotations

from typing import TypeVar

from tlora.group.job_run import Means
from tlora.group.reports import Status
from tlora.group.wall import Failure

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
        """Of something that all ranks do, a micro-batch or a join: a failure if it failed on any rank."""
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
