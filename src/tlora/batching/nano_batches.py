"""Slices of a job's global batch with equal predicted work, for the stages of a pipeline that would wait otherwise: the nano-batches of
tLoRA (arXiv 2602.07263).

Pure. What work a sample is, and the seconds of a step, are the caller's. tLoRA adapts its number of nano-batches by additive increase and
multiplicative decrease: more slices leave the stages of a pipeline less to wait for, and each costs something by itself, so that seconds
over their number fall first and rise then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tlora.batching.dispatch import Rank, dispatch
from tlora.batching.flow import Flow, Item, enter_line
from tlora.batching.pack import MicroBatch, Row, batches_in_turn

_HALVINGS = 24  # of the range in which the largest slice's work lies: what is left of it is below any sample's
_ABOUT = 1.001  # times the work of a slice that is not more than it
TRIALS = 20  # measured steps
_LAST_TRIALS = 6  # of them, for those that are nearly as fast as the fastest
_MARGIN = 0.03  # of the fastest: by less than that no step is slower, it is noise
_INCREASES = 16  # that lead from none to the most


@dataclass(frozen=True)
class Slicing:
    """`work(job_id, tokens)` of a sample, in any unit. `target` is that of a nano-batch: slices of several jobs share one up to it."""

    work: Callable[[str, int], float]
    target: float


def pack_slices(flows: Sequence[Flow], budget: int, slicing: Slicing, *, in_order: bool) -> MicroBatch | None:
    """Take the next slice of the flow whose turn it is, and of others that fit beside it; None where an evaluation's turn is. Batches take
    turns as in `pack` over several stages.

    A flow's batch is cut into `Flow.slices`, or as many more as it takes for none to have more than `budget` tokens (a longer sample is a
    slice by itself). With `in_order` a slice is a stretch of the job's cursor, so that gradients are added in the order of one process.
    """
    enter_line(flows, lead_tokens=2 * max([budget, *(flow.longest_tokens for flow in flows)]))
    runnable = [flow for flow in flows if flow.runnable]
    if not runnable or min(runnable, key=lambda flow: flow.virtual_time).kind == "eval":
        return None
    runnable = [flow for flow in runnable if flow.kind == "train"]
    rows, taken = list[Row](), 0.0
    for flow in [runnable[number] for number in batches_in_turn(runnable, budget)]:
        slices = cut(flow.pending, flow.slices, budget, lambda tokens, job_id=flow.job_id: slicing.work(job_id, tokens), in_order=in_order)
        own = [flow.pending[position] for position in slices[0]]
        work = sum(slicing.work(flow.job_id, item.tokens) for item in own)
        tokens = sum(item.tokens for item in own) + sum(row.tokens for row in rows)
        if rows and (taken + work > slicing.target * _ABOUT or tokens > budget):
            continue
        for position in reversed(slices[0]):
            flow.take(position)
        flow.slices = len(slices) - 1
        rows += [Row(flow.job_id, item.sample, item.tokens) for item in own]
        taken += work
    tokens = sum(row.tokens for row in rows)
    return MicroBatch("train", tuple(rows), tokens, tokens)


def cut(items: Sequence[Item], slices: int, budget: int, work: Callable[[int], float], *, in_order: bool) -> list[list[int]]:
    """Positions of each of at most so many slices, none empty; of more where one would have over `budget` tokens and several samples.

    In order: stretches, so that the most work of a slice is the least that stretches can have. Else by `dispatch`: a sample goes to the
    slice with the least work, the longest first.
    """
    each = [work(item.tokens) for item in items]
    if in_order:
        return _stretches(items, each, slices, budget)
    slices = max(1, slices)
    while True:
        shares = [list(share) for share in dispatch(each, [Rank()] * slices).items if share]
        if all(len(share) == 1 or sum(items[position].tokens for position in share) <= budget for share in shares):
            return shares
        slices += 1


def _stretches(items: Sequence[Item], each: Sequence[float], slices: int, budget: int) -> list[list[int]]:
    low, high = 0.0, float(sum(each))
    most = max(slices, len(_fill(items, each, high, budget)))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_fill(items, each, middle, budget)) <= most else (middle, high)
    return _fill(items, each, high, budget)


def _fill(items: Sequence[Item], each: Sequence[float], most_work: float, budget: int) -> list[list[int]]:
    """Stretches filled one after another, each with a sample at least."""
    stretches, work, tokens = list[list[int]](), 0.0, 0
    for position, item in enumerate(items):
        work, tokens = work + each[position], tokens + item.tokens
        if not stretches or work > most_work or tokens > budget:
            stretches.append([])
            work, tokens = each[position], item.tokens
        stretches[-1].append(position)
    return stretches


class SliceCount:
    """Into how many slices a global batch is cut: `count` is what to try now and, once `settled`, what was found. It begins at `first`, and
    doubles up to the first slower step.

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
