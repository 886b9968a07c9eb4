"""What a token of a micro-batch costs, as a multiple of the ideal: fixed work, recomputed layers, and a link that is waited for where a
base's decoder layers are streamed from the host's memory.

The one rule for this: the planner chooses by it, `tlora check` predicts with it, and schedulers count recomputation by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tlora.job import Recompute
from tlora.shape.work import FEATURE_WEIGHTS, LAYER_OF_8B, WITH_FEATURES

if TYPE_CHECKING:
    from tlora.shape.memory import MemoryModel

# Of all layers, that which no backward reads left out. Llama-3-8B on one H200: 0.43 with the last linear of each layer, 27 % of its weights
# (bench/results/h200_memory.json), which is no longer computed again: 0.31. On an H100 the rows of
# bench/results/h100_2ecdd65_long_samples_8b.json, 27 of 32 layers for all against for a tenth of the tokens, come to 0.29.
RECOMPUTE_SHARE = 0.31
SLOW_HOST = 1.5
"""By how much slower hosts launch: on an H100's a lone job of 1,400 tokens a step over an 8B, which hides its launches on the host above,
was 5 to 10 % faster with graphs, padding included."""
LAUNCH_SECONDS = 4.2e-3
"""That Python takes to launch a decoder layer, forward and back (one H200's host)."""
HIDES_LAUNCHES = LAUNCH_SECONDS / 5.9e-3 * 8192 * 50e6
"""Work of a micro-batch, in tokens times weights of a layer, from which on the GPU takes longer than Python does to launch it: 1.7B takes
5.9 ms a layer for 8,192 tokens (one H200). Of weights alone, without features, on both sides."""
GRAPH_PRICE = 3
"""Of a shape's CUDA graph, in launches from Python: that one, and two for the capture (130 and 260 ms over a 1.7B base)."""


CPU_BUDGET_CAP, _GPU_BUDGET_CAP = 2048, 8192  # tokens; past them throughput is flat (docs/adr/016-memory-is-counted.md)
# Tokens of an 8B's layer that a micro-batch costs each layer of any base besides its own, for each row of the smallest tile: half a tile's
# rows are empty at its end, and the last turn of all processors is not full. Llama-3-8B on one H200, tiles down to 64 rows: 216 tokens
# (2,048 against 8,192; bench/results/h200_memory.json). With sm_80's, of 128 rows, 400 to 456: so much longer than 30 of 8,026 tokens took
# 171 micro-batches of 1,457 (bench/results/h100_1125f50_small_card_8b.json).
_FIXED_TOKENS = 216 / 64

# Tokens that take as long as to unpack their weights from 4 bits, in forward and in backward: 0.56 bytes of each are read and 2 written, by
# nine tenths of an H200's 4.8 TB/s, beside 17,016 tokens/s of an 8B. By arithmetic: on six pairs of runs, bf16 and nf4, the share of time
# that this makes is off by 2 % at the median, and is left out by 6 % (tests/shape/test_token_cost.py).
_UNPACKING = 2 * (0.56 + 2) / (0.9 * 4.8e12) * 17_016 * 32 * LAYER_OF_8B[0] * WITH_FEATURES


class PipelineCost(NamedTuple):
    """Of a token in one of several stages, as `TokenCost.at`; `bubble`: the share of its time that a stage waits for work."""

    token: float
    bubble: float


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Of one base on one device. A micro-batch costs as much as `fixed_tokens` more would, and over a base that is streamed no less than
    `link_tokens`, of which the products take as long as the link takes to bring the layers. With more than `full_tokens` micro-batches
    become no faster. Of one of several stages: `pipeline` gives what a token costs with micro-batches of up to so many.
    """

    full_tokens: int
    num_layers: int = 0  # that can be recomputed
    fixed_tokens: float = 0.0
    link_tokens: float = 0.0
    pipeline: Callable[[int], PipelineCost] | None = field(default=None, compare=False)

    def products(self, tokens: float, recomputed_layers: int) -> float:
        """Of each token in a micro-batch of so many, without the link."""
        return (1 + self.fixed_tokens / tokens) * recompute_factor(recomputed_layers, self.num_layers)

    def at(self, tokens: float, recomputed_layers: int) -> float:
        """Of each token in a micro-batch of so many, on all layers; 1 where it is ideal."""
        return max(self.products(tokens, recomputed_layers), self.link_tokens / tokens)

    def bubble(self, token_budget: int) -> float:
        """Share of its time that a stage waits."""
        return self.pipeline(token_budget).bubble if self.pipeline is not None else 0.0


def token_cost_on(
    device_type: str, smallest_rows: int, memory: MemoryModel, link_tokens: float = 0.0, fixed_work: float | None = None
) -> TokenCost:
    """Of the base of `memory` on a GPU whose smallest tile has so many rows, or a CPU. `link_tokens`: of one that is streamed.
    `fixed_work`: tokens times weights (with those of features) of a layer that each layer costs besides, where that was measured; what is
    unpacked comes on top.
    """
    full = max(_GPU_BUDGET_CAP, math.ceil(link_tokens)) if device_type == "cuda" else CPU_BUDGET_CAP
    (weights, features), each = LAYER_OF_8B, FEATURE_WEIGHTS if device_type == "cuda" else 0
    ordinary = _FIXED_TOKENS * smallest_rows * (weights + each * features)
    layer = max(memory.layer_weights + each * memory.layer_features, 1)
    besides = (ordinary if fixed_work is None else fixed_work) + _UNPACKING * memory.unpacked_weights
    return TokenCost(full, memory.num_layers, besides / layer, link_tokens)


def recompute_factor(recomputed_layers: float, num_layers: int) -> float:
    """By how much longer a micro-batch takes with so many of `num_layers` recomputed."""
    return 1 + RECOMPUTE_SHARE * recomputed_layers / max(num_layers, 1)


def fixed_depth(recompute: Recompute, num_layers: int) -> int | None:
    """Layers that `recompute` orders to be recomputed; None for "auto"."""
    if recompute == "auto":
        return None
    return {"none": 0, "all": num_layers}[recompute] if isinstance(recompute, str) else min(recompute, num_layers)


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
