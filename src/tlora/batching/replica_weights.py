"""Shares of a job's replicas, corrected by measured seconds while it trains. Pure; seconds come from its caller.

A GPU that throttles, or that another job computes on as well, ends its part of a global batch later than the others, which wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median_low

from tlora.batching.replicas import ReplicaPlacement, weights_of

FIRST_STEPS = 8  # measured before shares change for the first time; twice as many before each further change
_MARGIN = 0.10  # by which a step must become shorter: predictions of speeds are off by up to a tenth, and steps are as noisy
_MOST_FACTOR = 2.0  # by which a rank's share changes at once


class ReplicaWeights:
    """`span` has the weights that count now.

    After some measured steps the lower median of each rank's tokens a second gives new shares, if with these all ranks would be through
    sooner by a margin. n measured steps change them log2(n / FIRST_STEPS + 1) times at most. No share more than doubles or halves at once
    (before they are made to add up to 1), so that steps which all went wrong cost little.
    """

    def __init__(self, span: ReplicaPlacement) -> None:
        self.span, self.changes = span, 0
        self._rates = {rank: list[float]() for rank in span.ranks}

    def see(self, tokens: Mapping[int, int], seconds: Mapping[int, float]) -> bool:
        """In a step each rank took so long for so many tokens. True: other weights follow. A step in which a rank had no sample does not
        count: nothing is known of its speed.
        """
        if min(tokens.values()) <= 0 or min(seconds.values()) <= 0:
            return False
        for rank, own in self._rates.items():
            own.append(tokens[rank] / seconds[rank])
        if any(len(own) < FIRST_STEPS << self.changes for own in self._rates.values()):
            return False
        speeds = {rank: median_low(own) for rank, own in self._rates.items()}
        for own in self._rates.values():
            own.clear()
        shares, total = {rank: self.span.weight(rank) for rank in speeds}, sum(speeds.values())
        if max(shares[rank] / speeds[rank] for rank in speeds) * total < 1 + _MARGIN:
            return False
        wanted = {rank: min(max(speed / total, shares[rank] / _MOST_FACTOR), shares[rank] * _MOST_FACTOR) for rank, speed in speeds.items()}
        self.span = replace(self.span, weights=weights_of(self.span.replicas, self.span.ranks, wanted))
        self.changes += 1
        return True
