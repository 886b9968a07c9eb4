"""Which rank computes which item (a sample, a pair, a micro-batch, a job): a pure function of predicted seconds. Every rank decides alike.

LobRA (arXiv 2509.01193) dispatches each batch to unequal replicas by predicted time, under what each can hold, with a solver. Longest first
onto the rank that ends first needs none, and `Dispatch.excess` says how far it can be from the best:
300 samples on 16 ranks of two kinds take 1.3 ms and end 0.2 % above what nothing can beat (bench/results/cpu_d107a79_dispatch.json).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tlora.errors import CapacityError


@dataclass(frozen=True, slots=True)
class Rank:
    """`speed`: seconds of items that it computes in one second. `holds`: positions of the items that fit into its memory; None: all do.
    `busy_seconds`: until it can begin.
    """

    speed: float = 1.0
    holds: Collection[int] | None = None
    busy_seconds: float = 0.0

    def __post_init__(self) -> None:
        assert 0 < self.speed < math.inf and 0 <= self.busy_seconds < math.inf, self


@dataclass(frozen=True, slots=True)
class Dispatch:
    """`items[r]` are positions of rank r's items, in the order given; `ends[r]` is when it is through. No dispatch whatever ends before
    `lower_bound`. All in seconds.
    """

    items: tuple[tuple[int, ...], ...]
    ends: tuple[float, ...]
    lower_bound: float

    @property
    def end(self) -> float:
        return max(self.ends)

    @property
    def excess(self) -> float:
        """Share by which `end` exceeds the lower bound; 0 where it is the best."""
        return self.end / self.lower_bound - 1 if self.lower_bound else 0.0


def dispatch(seconds: Sequence[float], ranks: Sequence[Rank]) -> Dispatch:
    """Longest predicted seconds first, each onto the rank that holds it and is then through first. Of equals, the first.

    `seconds` are those of a rank of speed 1. With equal speeds, and ranks that hold all, `end` is at most 4/3 - 1/(3R) times the best
    (Graham 1969). Raises CapacityError for an item that no rank holds.
    """
    assert all(0 <= own < math.inf for own in seconds), seconds
    permitted = _permitted(len(seconds), ranks)
    speeds, busy = [rank.speed for rank in ranks], [rank.busy_seconds for rank in ranks]
    work, items, ends = [0.0] * len(ranks), [list[int]() for _ in ranks], list(busy)
    for item in sorted(range(len(seconds)), key=lambda item: -seconds[item]):
        own, chosen, end = seconds[item], -1, math.inf
        for number in permitted[item]:
            then = busy[number] + (work[number] + own) / speeds[number]
            if then < end:
                chosen, end = number, then
        work[chosen] += own
        ends[chosen] = end
        items[chosen].append(item)
    return Dispatch(tuple(tuple(sorted(own)) for own in items), tuple(ends), _lower_bound(seconds, ranks, permitted))


def _lower_bound(seconds: Sequence[float], ranks: Sequence[Rank], permitted: Sequence[tuple[int, ...]]) -> float:
    """Before which no dispatch ends: max(total / R, largest), and what stands in its place for unequal ranks.

    For each set S of ranks that the permitted ones of some item are: the k longest items that may go nowhere but into S are on at most k
    of its ranks, so they end no earlier than their seconds over the k greatest speeds, for each k below |S|; and all of them no earlier
    than T with sum over S of speed * max(0, T - busy) = their seconds. Nor does all end before each rank is free.
    """
    bound = max((rank.busy_seconds for rank in ranks), default=0.0)
    groups: dict[tuple[int, ...], list[float]] = {}
    for own, group in zip(seconds, permitted, strict=True):
        groups.setdefault(group, []).append(own)
    for group in groups:
        own = sorted(itertools.chain(*(items for part, items in groups.items() if set(part) <= set(group))), reverse=True)
        speeds = sorted((ranks[number].speed for number in group), reverse=True)
        taken = speed = 0.0
        for longest, fastest in zip(own, speeds[:-1], strict=False):
            taken, speed = taken + longest, speed + fastest
            bound = max(bound, taken / speed)
        bound = max(bound, filled_at(math.fsum(own), [ranks[number] for number in group]))
    return bound


def _permitted(count: int, ranks: Sequence[Rank]) -> list[tuple[int, ...]]:
    """Of each item, the ranks that hold it."""
    kinds: dict[frozenset[int] | None, list[int]] = {}  # ranks by what they hold: there are few kinds
    for number, rank in enumerate(ranks):
        kinds.setdefault(None if rank.holds is None else frozenset(rank.holds), []).append(number)
    found: dict[tuple[bool, ...], tuple[int, ...]] = {}
    permitted: list[tuple[int, ...]] = []
    for item in range(count):
        fits = tuple([held is None or item in held for held in kinds])
        if fits not in found:
            found[fits] = tuple(sorted(itertools.chain(*itertools.compress(kinds.values(), fits))))
        permitted.append(found[fits])
    if () in permitted:
        item = permitted.index(())
        raise CapacityError(f"item {item} fits on none of {len(ranks)} ranks. Shorten it, or give a rank room for it")
    return permitted


def filled_at(seconds: float, ranks: Sequence[Rank]) -> float:
    """When ranks that share `seconds` as finely as they like are through together: T with sum of speed * max(0, T - busy) = seconds."""
    speed = begun = 0.0
    end = math.inf
    for rank in sorted(ranks, key=lambda rank: rank.busy_seconds):
        if rank.busy_seconds >= end:
            break
        speed, begun = speed + rank.speed, begun + rank.speed * rank.busy_seconds
        end = (seconds + begun) / speed
    return end
