"""One job's queue of samples, global batch by global batch, and its place in the line (start-time fair queueing).

Owns the dependency rule (no sample of batch g+1 before batch g has left) and virtual time. Which samples run together
is `pack.py`; what a sample holds, and when a micro-batch has left, the caller knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class Item:
    """One sample of a global batch: its number in the job's data set and its length."""

    sample: int
    tokens: int


class Flow:
    """A job's samples on offer. `virtual_time` is tokens taken divided by weight, lifted after times without samples.

    Invariant: what is pending belongs to one global batch and stands in the order of the job's cursor.
    """

    def __init__(self, job_id: str, weight: float = 1.0, kind: Kind = "train") -> None:
        assert weight > 0, f"flow of {job_id}: weight {weight} must be positive"
        self.job_id = job_id
        self.weight = weight
        self.kind: Kind = kind
        self.virtual_time = 0.0
        self.pending_tokens = 0
        self.batch_tokens = 0  # of the current global batch
        self.longest_tokens = 0  # likewise
        self.slices = 0  # that what is pending is cut into (`nano_batches.py`); 0: none were chosen since it was offered
        self._pending: list[Item] = []
        self._offered = False
        self._waits_for_entry = False  # offered since the last `enter`

    @property
    def pending(self) -> Sequence[Item]:
        """Samples of the current global batch that no micro-batch has taken yet, in cursor order."""
        return self._pending

    @property
    def runnable(self) -> bool:
        """Something is pending."""
        return bool(self._pending)

    @property
    def begun(self) -> bool:
        """Some of the current global batch is taken, and not all."""
        return 0 < self.pending_tokens < self.batch_tokens

    @property
    def complete(self) -> bool:
        """A global batch was offered and all of it is taken: when that micro-batch has left, the optimizer may step."""
        return self._offered and not self._pending

    def offer(self, items: Sequence[Item]) -> None:
        """Give the next global batch, in cursor order; only when the last micro-batch of the one before has left."""
        assert not self._pending, f"flow of {self.job_id}: {len(self._pending)} samples of the last global batch are still pending"
        assert items, f"flow of {self.job_id}: an empty global batch"
        assert all(item.tokens > 0 for item in items), f"flow of {self.job_id}: a sample without tokens"
        self._pending = list(items)
        self.pending_tokens = self.batch_tokens = sum(item.tokens for item in items)
        self.longest_tokens = max(item.tokens for item in items)
        self._waits_for_entry, self.slices = True, 0

    def take(self, index: int) -> Item:
        """Remove and return `pending[index]`; its tokens move this flow back in the line."""
        item = self._pending.pop(index)
        self.pending_tokens -= item.tokens
        self.virtual_time += item.tokens / self.weight
        return item

    def enter(self, system_time: float, lead_tokens: int) -> None:
        """Take one's place in the line, whose virtual time is `system_time`.

        A flow that joins starts there: it neither hoards credit for the past nor has to catch up. One that comes back with
        its next batch may stand at most its own longest sample before it, which is what it can be short of at the end of a
        batch. No flow starts more than `lead_tokens` behind: tokens that only filled a gap are not held against a flow for ever.
        """
        if self._waits_for_entry:
            credit = self.longest_tokens / self.weight if self._offered else 0.0
            self.virtual_time = max(self.virtual_time, system_time - credit)
            self._waits_for_entry, self._offered = False, True
        self.virtual_time = min(self.virtual_time, system_time + lead_tokens / self.weight)

    @property
    def backlogged(self) -> bool:
        """Runnable, and in the line already when the last micro-batch was packed."""
        return bool(self._pending) and not self._waits_for_entry


def enter_line(flows: Sequence[Flow], lead_tokens: int) -> None:
    """Let all runnable `flows` take their places. The system's virtual time is that of the backlogged flow served least
    or, when none is left over from before, of the flow served most.
    """
    backlogged = [flow.virtual_time for flow in flows if flow.backlogged]
    system_time = min(backlogged) if backlogged else max((flow.virtual_time for flow in flows), default=0.0)
    for flow in flows:
        if flow.runnable:
            flow.enter(system_time, lead_tokens)
