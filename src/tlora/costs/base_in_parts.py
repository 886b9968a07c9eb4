"""Whether a base lies whole on each GPU of a group or in one part for each, and on how many GPUs it fits at all."""

from __future__ import annotations

from collections.abc import Sequence

MOST_GPUS = 16  # on which parts are counted
_MOST_WHOLE = 0.85  # of a GPU's bytes: with less room beside the base hardly a micro-batch fits


def must_share(base_bytes: int, limit_bytes: float) -> bool:
    """Whether the base leaves too little of a GPU's bytes for jobs."""
    return base_bytes > _MOST_WHOLE * limit_bytes


def least_gpus(by_gpus: Sequence[int], limit_bytes: int) -> int | None:
    """The fewest GPUs on which the base leaves room for jobs; None if it does so on none. `by_gpus`: what it takes on each of 1, 2, ..."""
    return next((count for count, own in enumerate(by_gpus, 1) if not must_share(own, limit_bytes)), None)
