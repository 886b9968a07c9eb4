"""Slices of a job's global batch with equal predicted work, for the stages of a pipeline that would wait otherwise: the nano-batches of
tLoRA (arXiv 2602.07263).

Pure. What work a sample is, and the seconds of a step, are the caller's. tLoRA adapts its number of nano-batches by additive increase and
multiplicative decrease: more slices leave the stages of a pipeline less to wait for, and each costs something by itself, so that seconds
over their number fall first and rise then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
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
    doubles up to the first slower step. After that it is halved where a step was slower, and grows by one (or a sixteenth of `most`)
    elsewhere; of the counts that are left it becomes the nearest to that.

    A step that is slower than the fastest by a margin is measured once more. If it is again, nothing beyond that count is tried: seconds
    fall up to the best count and rise from there. When no count is left that could be as fast, and in the last trials, those that are
    nearly as fast as the fastest are measured again, those first that were measured least. Of a count's steps the lower median counts: what
    disturbs a step makes it longer.
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
        slow = {count for count, seconds in tried.items() if seconds > limit}
        if self.settled:
            self.count = fastest
        elif self._left <= _LAST_TRIALS or not self._go_on(fastest, slow):
            near = [count for count, seconds in tried.items() if seconds <= limit + tried[fastest] * _MARGIN]
            self.count = min(near, key=lambda count: (len(self._measured[count]), tried[count]))

    def _go_on(self, fastest: int, slow: Collection[int]) -> bool:
        """To a count that could be as fast, if one is left."""
        if self._is_measured_once(self.count) and (self.count in slow or len(self._measured) == 1):  # the very first steps warm up
            return True
        known = [count for count in slow if not self._is_measured_once(count)]
        least = max((count for count in known if count < fastest), default=0) + 1
        beyond = min((count for count in known if count > fastest), default=self._most + 1)
        left = [n for n in range(least, beyond) if n not in self._measured or (n in slow and self._is_measured_once(n))]
        aim = self._next(self.count in slow)
        self.count = min(left, key=lambda count: (abs(count - aim), count), default=self.count)
        return bool(left)

    def _next(self, was_slow: bool) -> int:
        """By additive increase and multiplicative decrease."""
        self._doubles = self._doubles and not was_slow and self.count < self._most
        if self._doubles:
            return min(self._most, 2 * self.count)
        return self.count // 2 if was_slow or self.count == self._most else self.count + math.ceil(self._most / _INCREASES)

    def _is_measured_once(self, count: int) -> bool:
        return len(self._measured[count]) == 1

    def _seconds(self, count: int) -> float:
        measured = sorted(self._measured[count])
        return measured[(len(measured) - 1) // 2]
