"""How many decoder layers backward computes again, by the tokens of a micro-batch: as few as its memory allows.

A long micro-batch recomputes more than a short one, so that one long sample does not slow down all others. What fits is the memory
model's to say (`planning/memory.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class RecomputePlan:
    """`most_tokens[k]`: tokens up to which a micro-batch fits with k layers recomputed; it never falls with k. Larger micro-batches than
    all of these recompute `most_layers`.
    """

    most_tokens: tuple[int, ...] = ()

    def layers(self, tokens: int) -> int:
        """The least number of layers with which a micro-batch of `tokens` fits."""
        return bisect_left(self.most_tokens, tokens)

    @property
    def most_layers(self) -> int:
        """The largest number of layers recomputed for any micro-batch."""
        return len(self.most_tokens)

    @property
    def varies(self) -> bool:
        """Whether the number depends on the tokens."""
        return any(self.most_tokens)

    def scaled(self, tokens: int, of: int) -> RecomputePlan:
        """What `of` tokens did is done by `tokens`, fewer of them, and so in proportion."""
        return RecomputePlan(tuple([most * tokens // of for most in self.most_tokens]))


def same_for_all(layers: int) -> RecomputePlan:
    """Every micro-batch recomputes `layers`."""
    return RecomputePlan((0,) * layers)
