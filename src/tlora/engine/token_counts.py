"""What went through the engine since the start of a run: tokens of each job, and how well they filled the budget, tails apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from tlora.batching.pack import MicroBatch


@dataclass(frozen=True)
class Packing:
    """What some micro-batches were made of: real tokens, computed ones (padding included), and the budgets they were packed into."""

    tokens: int = 0
    computed: int = 0
    offered: int = 0
    micro_batches: int = 0

    def __add__(self, other: Packing) -> Packing:
        return Packing(*(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def __sub__(self, other: Packing) -> Packing:
        return Packing(*(a - b for a, b in zip(self.counts, other.counts, strict=True)))

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.tokens, self.computed, self.offered, self.micro_batches

    @property
    def padding(self) -> float | None:
        """Padded over computed tokens; None where nothing was computed."""
        return 1 - self.tokens / self.computed if self.computed else None

    @property
    def fill(self) -> float | None:
        """Tokens over the budgets; None where there was none."""
        return self.tokens / self.offered if self.offered else None

    def __str__(self) -> str:
        if self.padding is None or self.fill is None:
            return "no micro-batch"
        return f"padding {self.padding:.1%}, fill {self.fill:.1%} over {self.micro_batches:,} micro-batches"


@dataclass
class TokenCounts:
    """Tokens by job and the packing of all micro-batches since the start.

    A micro-batch is of the `tail` when all jobs together had less than one budget of tokens on offer, so that no packing could have
    filled it: at the end of a run, and all through one whose jobs are too small for its budget. All others are `full`.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    full: Packing = Packing()
    tail: Packing = Packing()

    def count(self, packed: MicroBatch, computed: int, left_tokens: int) -> None:
        """Enter a micro-batch that took `computed` tokens with padding; `left_tokens` more were on offer."""
        made = Packing(packed.tokens, computed, packed.budget, 1)
        if packed.tokens + left_tokens < packed.budget:
            self.tail += made
        else:
            self.full += made
        for row in packed.rows:
            self.tokens[row.job_id] = self.tokens.get(row.job_id, 0) + row.tokens

    @property
    def computed(self) -> int:
        """Tokens computed in all, padding included."""
        return self.full.computed + self.tail.computed

    def copy(self) -> TokenCounts:
        return TokenCounts(dict(self.tokens), self.full, self.tail)
