"""How many layers of a streamed base are on the device at a time. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

MOST_FILLED = 0.95  # of the memory limit, with slots beyond two: what the run measures may be some hundredths more than was counted
# By how much products may be faster than predicted: those of a 70B in fp8 on an H100 were, and waited for the link a quarter of the time
# (bench/results/h100_71836d0_streamed_70b_fp8.json). More tokens that recompute more layers cost less than that.
FASTER_PRODUCTS = 1.2
_ABOUT_EQUAL = 1.01  # times the least cost: of such choices the one that fetches least, in case the link is slower for a while
_TRIED = 16  # numbers of layers on the device that are looked at first
_Plan = TypeVar("_Plan")


def choose_slots(
    most: int, plan_with: Callable[[int], _Plan | None], lacks: Callable[[_Plan], Any], cost: Callable[[_Plan], float]
) -> _Plan | None:
    """The plan with as many layers on the device as serve best, from two to `most`: the least that `lacks` gives, then the least `cost`.

    `plan_with` gives none where so many do not fit; None where none fits.
    """
    found = dict[int, _Plan]()

    def try_all(tried: range) -> int | None:
        for slots in tried:
            if slots not in found and (plan := plan_with(slots)) is not None:
                found[slots] = plan
        lacking = {slots: lacks(each) for slots, each in found.items()}
        costs = {slots: cost(each) for slots, each in found.items() if lacking[slots] == min(lacking.values())}
        return max((slots for slots, each in costs.items() if each <= _ABOUT_EQUAL * min(costs.values())), default=None)

    step = max(1, (most - 2) // _TRIED)
    near = try_all(range(2, most + 1, step))
    best = None if near is None else try_all(range(max(2, near - step), min(most, near + step) + 1))
    return None if best is None else found[best]
