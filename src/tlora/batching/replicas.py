"""How a global batch is cut among the replicas of a job that spans several GPUs. Pure, on integers: every rank makes the same cut."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def cut(lengths: Sequence[int], replicas: int) -> list[list[int]]:
    """Positions of the global batch for each replica, each in the batch's order; a unit (sample or pair) is never split.

    The longest unit that is left goes to the replica with the fewest tokens, so that the fullest and the emptiest differ by one unit's
    length at most. Of equals, the first in the batch and the first replica. With fewer units than replicas the last replicas are empty.
    """
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [(0, replica) for replica in range(replicas)]
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        tokens, replica = loads[0]
        shares[replica].append(position)
        heapq.heapreplace(loads, (tokens + lengths[position], replica))
    return [sorted(share) for share in shares]
