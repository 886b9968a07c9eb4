"""Which GPUs of unequal memory hold which jobs beside a whole base: the one rule of a run, `tlora check` and `tlora plan`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tlora.job import JobSpec


class _Adapter(Protocol):
    @property
    def numel(self) -> int: ...


class _Job(Protocol):
    @property
    def spec(self) -> JobSpec: ...
    @property
    def longest(self) -> int: ...
    @property
    def layout(self) -> _Adapter | None: ...


_J = TypeVar("_J", bound=_Job)


def find_holders(
    jobs: Sequence[_J], limits: Sequence[int], refused: Callable[[Sequence[_J], int], Sequence[_J]]
) -> dict[str, tuple[int, ...]] | None:
    """By name, of jobs for which some of the GPUs with `limits` bytes have too little memory, those that hold them. `refused(jobs, limit)`:
    those that do not fit on such a GPU where `jobs` share it. None where a job fits on none.

    The job with the longest sample, then the largest adapter, goes first, as micro-batches are made for the longest sample of all that are
    left.
    """
    holds: dict[str, tuple[int, ...]] = {}
    for limit in sorted(set(limits)):  # the largest last: what `refused` leaves behind is as of there
        here = list(jobs)
        while away := refused(here, limit):
            largest = max(away, key=lambda job: (job.longest, job.layout.numel if job.layout is not None else 0))
            holds[largest.spec.name] = tuple(gpu for gpu, other in enumerate(limits) if other > limit)
            here = [job for job in here if job is not largest]
    return holds if all(holds.values()) else None
