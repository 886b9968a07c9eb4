"""Orders of micro-batches over a pipeline beside this program's own (`tlora.batching.pipeline_model`).

`Groups` is LoRAFusion's (arXiv 2510.00206): jobs in groups, shortest mean with longest, whose global batches take turns, each packed by
itself. `Groups` with a flush empties the pipeline after each round.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from bench.exact_packing import first_fit_decreasing
from bench.length_mixes import LengthJob
from tlora.batching.pipeline_model import Entry


@dataclass(frozen=True)
class _Sample:
    job: str
    batch: int
    tokens: int


class Groups:
    """Global batches of groups in turn, each packed by itself. Its smallest micro-batch goes last, and takes in one of the next group's
    where that fits. With `flush` all jobs are one group, whose next batches enter when nothing is in flight.
    """

    def __init__(self, jobs: Sequence[LengthJob], budget: int, *, flush: bool) -> None:
        self._budget, self._flush = budget, flush
        groups = [list(jobs)] if flush else head_tail_groups(jobs)
        self._carries = len(groups) > 1
        self._turns = ((group, turn) for turn in itertools.count() for group in groups)
        self._seeds = {job.name: seed for seed, job in enumerate(jobs)}
        self._bins: deque[list[_Sample]] = deque()
        self._carried: list[_Sample] = []
        self._left = Counter[tuple[str, int]]()  # bins with samples of a batch that have not left
        self._flight = 0

    def next(self) -> Entry | None:
        while not self._bins:
            if self._flush and self._flight:
                return None
            self._pack()
        batches = {sample.job: sample.batch for sample in self._bins[0]}
        if any(self._left[name, batch - 1] for name, batch in batches.items()):
            return None
        self._flight += 1
        return Entry(sum(sample.tokens for sample in self._bins.popleft()), batches)

    def retire(self, entry: Entry) -> None:
        self._flight -= 1
        self._left.subtract(entry.batches.items())

    def _pack(self) -> None:
        """The next group's global batches."""
        group, turn = next(self._turns)
        samples = [_Sample(job.name, turn, item.tokens) for job in group for item in job.batch(self._seeds[job.name], turn)]
        packed = first_fit_decreasing([sample.tokens for sample in samples], self._budget)
        bins = sorted(([samples[at] for at in bin] for bin in packed), key=_tokens, reverse=True)
        for bin in bins:
            self._left.update({(sample.job, sample.batch) for sample in bin})
        if self._carried:
            space = self._budget - _tokens(self._carried)
            joined = next((bin for bin in bins if _tokens(bin) <= space), None)
            if joined is not None:
                bins.remove(joined)
            self._bins.append(self._carried + (joined or []))
            self._carried = []
        if bins and self._carries:
            self._carried = bins.pop()
        self._bins.extend(bins)


def _tokens(bin: Sequence[_Sample]) -> int:
    return sum(sample.tokens for sample in bin)


def head_tail_groups(jobs: Sequence[LengthJob]) -> list[list[LengthJob]]:
    """Pairs of the job with the shortest mean and that with the longest, and so on; a job that is left over has a group of its own."""
    ordered = deque(sorted(jobs, key=lambda job: float(job.lengths.mean())))
    groups: list[list[LengthJob]] = []
    while ordered:
        groups.append([ordered.popleft(), *([ordered.pop()] if ordered else [])])
    return groups
