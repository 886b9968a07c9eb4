"""Where a base's decoder layers are cut into the stages of a pipeline: by predicted seconds. Knows no bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

LEAST_STAGES = 2  # of a base that is ordered in stages
# Between two stages, besides the copies: a thread is woken by the device's event and sets a word, at which the other end looks each 0.1 ms
# (`sharing/channel.py`); that launches about 20 copies and kernels, 6 us each (bench/results/h200_f960408_calibrated.json), and a graph.
LATENCY_SECONDS = 5e-4


@dataclass(frozen=True)
class LayerRange:
    """Decoder layers `first` to `stop` (not included) of `count`."""

    first: int
    stop: int
    count: int

    def __post_init__(self) -> None:
        assert 0 <= self.first < self.stop <= self.count, self

    def __contains__(self, layer: int) -> bool:
        return self.first <= layer < self.stop

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.count


def cut_layers(
    layer_seconds: Sequence[float],
    head_seconds: float,
    speeds: Sequence[float],
    *fits: Callable[[int, int, int], bool],
) -> tuple[tuple[int, int], ...]:
    """First layer and end of each stage, so that the slowest takes as little as can be; head and loss are the last one's.

    One stage for each of `speeds`, in their order, with at least one layer. Of equals, that with the fewest layers on the
    first stages, where the most micro-batches wait for their backward. `fits`: whether a stage has memory for the layers from `first` to
    `end`, and so for fewer before `end`, the strictest first; where no cut does for all stages, that counts for nothing.

    >>> cut_layers([1.0] * 8, 1.0, [1.0, 1.0]), cut_layers([1.0] * 8, 1.0, [2.0, 1.0])
    (((0, 4), (4, 8)), ((0, 6), (6, 8)))
    """
    layers, stages = len(layer_seconds), len(speeds)
    assert 1 <= stages <= layers, (stages, layers)
    until = [0.0, *accumulate(layer_seconds)]
    strictest, *others = fits or (lambda _stage, _first, _end: True,)
    ends = [0.0, *[math.inf] * layers]  # of the best cut of the first so many layers into the stages so far
    came_from: list[list[int]] = []
    for stage, speed in enumerate(speeds):
        last = stage == stages - 1
        found, origin = [math.inf] * (layers + 1), [0] * (layers + 1)
        for end in range(layers if last else stage + 1, layers - (stages - 1 - stage) + 1):
            for first in reversed(range(stage, end)) if stage else (0,):
                own = (until[end] - until[first] + (head_seconds if last else 0.0)) / speed
                if own > found[end] or not strictest(stage, first, end):
                    break  # with more layers it takes no less
                if (slowest := max(ends[first], own)) <= found[end] and slowest < math.inf:
                    found[end], origin[end] = slowest, first
        ends = found
        came_from.append(origin)
    if ends[layers] == math.inf:
        return cut_layers(layer_seconds, head_seconds, speeds, *others)
    cuts, end = list[tuple[int, int]](), layers
    for origin in reversed(came_from):
        cuts.append((origin[end], end))
        end = origin[end]
    return tuple(reversed(cuts))
