"""Slices of a job's global batch with equal predicted work, for the stages of a pipeline that would wait otherwise: the nano-batches of
tLoRA (arXiv 2602.07263).

Pure. How many slices there are is `slice_count.py`'s, what work a sample is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tlora.batching.dispatch import Rank, dispatch
from tlora.batching.flow import Flow, Item, enter_line
from tlora.batching.pack import MicroBatch, Row, batches_in_turn

_HALVINGS = 24  # of the range in which the largest slice's work lies: what is left of it is below any sample's
_ABOUT = 1.001  # times the work of a slice that is not more than it


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
