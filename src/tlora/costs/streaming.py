"""What streaming a base's decoder layers from the host's memory costs a micro-batch: seconds of the link against those of the products."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamCost:
    """Of one micro-batch: bytes that are fetched for it, what the link brings in a second, and how long its products take."""

    fetched_bytes: int
    link_bytes_per_second: float
    product_seconds: float

    @property
    def link_seconds(self) -> float:
        return self.fetched_bytes / self.link_bytes_per_second

    @property
    def exposed_seconds(self) -> float:
        """That computing waits: copies run beside the products, so only what takes longer than these."""
        return max(0.0, self.link_seconds - self.product_seconds)

    @property
    def seconds(self) -> float:
        return self.product_seconds + self.exposed_seconds


def fetched_layers(num_layers: int, slots: int) -> int:
    """Layers that a micro-batch fetches, forwards and back: where it turns, at either end, the last `slots` are still there.

    >>> fetched_layers(5, 2), fetched_layers(32, 2), fetched_layers(4, 4)
    (6, 60, 0)
    """
    return 2 * max(0, num_layers - slots)
