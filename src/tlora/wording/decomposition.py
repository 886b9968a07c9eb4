"""What a gain comes from: a chain of policies, each with one means more than the one before it, and the factor that each brings."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tlora.wording.metrics import TIMES

CHAIN = (  # a policy with its kernels, and what it has that the one before it has not
    ("fifo/peft", "first in, first out"),
    ("fifo/tlora", "kernels"),
    ("backfill/tlora", "backfill"),
    ("sjf/tlora", "shortest first"),
    ("srtf/tlora", "preemption"),
    ("residual_capacity-order-only/tlora", "order"),
    ("residual_capacity-no-sharing/tlora", "growth"),
    ("residual_capacity/tlora", "sharing"),
)


def factors(mean_jct_seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """By what is added, how many times shorter mean JCT gets. The factors of policies that are not there are one with the next.

    Empty unless the first and the last of the chain are there, and one between them.
    """
    gains: list[tuple[str, float]] = []
    added: list[str] = []
    present = [name for name, _ in CHAIN if math.isfinite(mean_jct_seconds.get(name, math.nan))]
    if len(present) < 3 or (present[0], present[-1]) != (CHAIN[0][0], CHAIN[-1][0]):
        return []
    before = mean_jct_seconds[present[0]]
    for name, means in CHAIN[1:]:
        added.append(means)
        if name in present:
            gains.append((" and ".join(added), before / mean_jct_seconds[name]))
            before, added = mean_jct_seconds[name], []
    return gains


def decomposition_text(mean_jct_seconds: Mapping[str, float]) -> str:
    """The factors as one product; empty without them."""
    gains = factors(mean_jct_seconds)
    if not gains:
        return ""
    total = math.prod(factor for _, factor in gains)
    return f"{total:.2f} = " + f" {TIMES} ".join(f"{means} {factor:.2f}" for means, factor in gains)
