"""The tokens of a micro-batch where memory may run out: halved when it does, doubled again when it has sufficed for a while."""

from __future__ import annotations

CALM = 100  # micro-batches without trouble, after which trouble of before is over
_MOST_CALM = 6400  # each time that a larger budget runs out of memory again, the next is tried after twice as many, up to this


class TokenBudget:
    """`tokens` now. `lower`, where memory has run out; `see_calm`, after each micro-batch that was computed."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._full: int | None = None  # what it was before it was lowered
        self._calm, self._needed, self._grew = 0, CALM, False

    def order(self, tokens: int) -> None:
        """Somebody has chosen it anew: what was learned of the one before is void."""
        self.tokens, self._full = tokens, None
        self._calm, self._needed, self._grew = 0, CALM, False

    def hold(self, longest: int) -> None:
        """A sample is never split: not less than the longest."""
        self.tokens = max(self.tokens, longest)

    def next_lower(self, least: int) -> int | None:
        """Half of it, but not less than `least`; None where it is no more than that."""
        smaller = max(self.tokens // 2, least)
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
