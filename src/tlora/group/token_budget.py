"""The tokens of a micro-batch where memory may run out: halved when it does, doubled again when it has sufficed for a while. The layers
that longer samples recompute follow in proportion.
"""

from __future__ import annotations

from tlora.batching.pack import SMALLEST_BUDGET
from tlora.batching.recompute_plan import RecomputePlan

CALM = 100  # micro-batches without trouble, after which trouble of before is over
NO_LAYER = RecomputePlan()
_MOST_CALM = 6400  # each time that a larger budget runs out of memory again, the next is tried after twice as many, up to this


class TokenBudget:
    """`tokens` now. `lower`, where memory has run out; `see_calm`, after each micro-batch that was computed."""

    def __init__(self, tokens: int, recompute: RecomputePlan = NO_LAYER) -> None:
        self.tokens, self._recompute = tokens, recompute
        self._full: int | None = None  # what it was before it was lowered
        self._calm, self._needed, self._grew = 0, CALM, False

    def order(self, tokens: int, recompute: RecomputePlan = NO_LAYER) -> None:
        """Both are chosen anew: what was learned of those before is void."""
        self.tokens, self._recompute, self._full = tokens, recompute, None
        self._calm, self._needed, self._grew = 0, CALM, False

    @property
    def varies(self) -> bool:
        """Whether longer micro-batches recompute more layers."""
        return self._recompute.varies

    @property
    def recompute(self) -> RecomputePlan:
        """What was to fit in the full budget is taken to fit in what is left of it, and so for longer samples."""
        return self._recompute if self._full is None else self._recompute.scaled(self.tokens, self._full)

    def next_lower(self, longest: int, alone: int | None = None) -> int | None:
        """Half of it; None where that does not help: where all micro-batches recompute the same layers, below the `longest` sample; else
        below the smallest budget, or where a sample of `alone` tokens ran out of memory by itself and recomputes all that it can.
        """
        recompute = self.recompute
        if self.varies and alone is not None and recompute.layers(alone) == recompute.most_layers:
            return None
        smaller = max(self.tokens // 2, SMALLEST_BUDGET if self.varies else longest)
        return smaller if smaller < self.tokens else None

    def lower(self, tokens: int) -> None:
        """Memory has run out, and it is `tokens` from now on."""
        if self._grew:
            self._needed, self._grew = min(2 * self._needed, _MOST_CALM), False
        if self._full is None:
            self._full = self.tokens
        self.tokens, self._calm = tokens, 0

    def see_calm(self) -> int | None:
        """One more micro-batch fitted. What the budget may be from now on, where it is time to try a larger one."""
        self._calm += 1
        if self._full is None or self._calm < self._needed:
            return None
        return min(2 * self.tokens, self._full)

    def grow(self, tokens: int) -> None:
        self.tokens, self._calm, self._grew = tokens, 0, True
        if self._full is not None and tokens >= self._full:
            self._full = None

    def room_came(self) -> None:
        """A job has left: a larger one is tried after the next micro-batch."""
        self._calm = max(self._calm, self._needed)
