"""What a base's layers take on one kind of device, by which it is cut in every form: counted once by a process with torch, kept as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from tlora.batching.pipeline_model import most_open, ring_places
from tlora.job import Recompute
from tlora.shape.memory import MOST_GPUS, PLANNED_TOKENS, BaseMemory, MemoryModel, StreamedBytes, adapter_bytes
from tlora.shape.stages import LEAST_STAGES, LayerRange, cut_layers
from tlora.shape.token_cost import fixed_depth
from tlora.shape.work import FEATURE_WEIGHTS

_BOUNDARY_BUFFERS = 4  # of a stage: activations and gradients that come in and go out, each while the last ones are still used
WORKER_TOKENS = 8192  # that a sample or a budget may have in stages of a worker, whatever jobs are expected
_WORKER_RANK = 128  # of an adapter of all linears for which these have room
_ROOMS = 4096  # sets of GPUs whose stages are remembered


@dataclass(frozen=True, slots=True)
class BaseParts:
    """`memory`: of the whole base on one such device, without jobs. Of each decoder layer its name, the bytes of its weights, and how many
    of these each token is multiplied with, and features into and out of its linears; the same of the head, and the bytes of the embedding.
    `shared_bytes`: on each of 1, 2, … GPUs that hold it in parts; empty where it cannot be cut. `streamed`: likewise from the host's
    memory. `no_stages`: why it cannot be cut into stages, if so; `takes_plain_path`: on such a GPU, without our kernels.
    `precision_bytes`: of the whole base in other precisions that the device has. `in_parts`: as `memory`, in parts or streamed, of a base
    that takes other kernels there (a mixture), so that a run has to order it; None of any other. `other_weights`: as
    `layer_weights`, of tokens of jobs that adapt no experts, where others do; empty where that is the same.
    """

    memory: MemoryModel
    layers: tuple[str, ...]
    layer_bytes: tuple[int, ...]
    layer_weights: tuple[int, ...]
    layer_features: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    head_weights: int
    head_features: int
    hidden_size: int
    in_8_bits: bool
    shared_bytes: tuple[int, ...]
    streamed: StreamedBytes | None
    precision_bytes: Mapping[str, int]
    no_stages: str = ""
    takes_plain_path: bool = False
    in_parts: MemoryModel | None = None
    other_weights: tuple[int, ...] = ()

    @property
    def timed_weights(self) -> int:
        """That each token is multiplied with in forward, and as so many more what features take on a GPU."""
        return self.timed_weights_of(0, len(self.layers))

    def timed_weights_of(self, first: int, end: int, adapts_experts: bool = True) -> int:
        """Of the layers from `first` to `end`, with tokens of a job that adapts experts or not; with the last one, also of the head."""
        each = self.layer_weights if adapts_experts else self.other_weights or self.layer_weights
        weights, features = sum(each[first:end]), sum(self.layer_features[first:end])
        if end == len(self.layers):
            weights, features = weights + self.head_weights, features + self.head_features
        return weights + FEATURE_WEIGHTS * features

    @property
    def width(self) -> int:
        """Of the hidden states of all layers."""
        return max(1, len(self.layers)) * self.hidden_size

    def layer_of(self, module: str) -> int | None:
        """The decoder layer that a linear is in."""
        name, numbers = module, _numbers(self.layers)
        while "." in name:
            name = name.rpartition(".")[0]
            if (number := numbers.get(name)) is not None:
                return number
        return None

    def stage_bytes(self, first: int, last: int) -> int:
        """Of the weights on a GPU that holds the layers from `first` up to `last`: the embedding is on the first stage, the head on the
        last, and what is in no layer on all.
        """
        layers = sum(self.layer_bytes[first:last])
        beside = self.memory.base_bytes - sum(self.layer_bytes) - self.embedding_bytes - self.head_bytes
        tied = max(0, -beside)  # head and embedding are one tensor, which the base has once
        at_ends = (self.embedding_bytes if first == 0 else 0) + (self.head_bytes if last == len(self.layers) else 0)
        both = first == 0 and last == len(self.layers)
        return layers + max(0, beside) + at_ends - (tied if both else 0)

    def cut(
        self,
        speeds: Sequence[float],
        limits: Sequence[int],
        adapter: int,
        tokens: int,
        recompute: Recompute = "auto",
        reads_peers: bool = False,
    ) -> tuple[tuple[int, int], ...]:
        """Layers of like predicted seconds on GPUs of these speeds, as far as each has memory, for an `adapter` of so many numbers and
        micro-batches of so many `tokens`, of which all layers or those that are ordered are recomputed: `cut_layers`.
        """
        fits = fitting([self] * len(speeds), limits, adapter, tokens, recompute, reads_peers)
        return cut_layers(self.layer_weights, self.head_weights, speeds, *fits)

    def cut_for_any(self, speeds: Sequence[float], limits: Sequence[int], recompute: Recompute = "auto") -> tuple[tuple[int, int], ...]:
        """As `cut`, of a worker, whose jobs come and go: for `most_numbers` and `WORKER_TOKENS`. A scheduler that has not chosen GPUs yet
        counts equal stages on the smallest: where these have room for jobs, no stage leaves them less.
        """
        holds_job, as_alike, *others = fitting([self] * len(speeds), limits, self.most_numbers, WORKER_TOKENS, recompute)

        def both(stage: int, first: int, end: int) -> bool:
            return holds_job(stage, first, end) and as_alike(stage, first, end)

        return cut_layers(self.layer_weights, self.head_weights, speeds, both, as_alike, holds_job, *others)

    @property
    def most_numbers(self) -> int:
        """Of an adapter of all linears for which a worker has room."""
        return _WORKER_RANK * sum(self.layer_features)

    def bytes_by_stages(self) -> tuple[int, ...]:
        """Of the fullest of 2, 3, ... stages, cut as a worker cuts them."""
        counts = range(LEAST_STAGES, min(MOST_GPUS, len(self.layers)) + 1)
        return tuple(max(self.stage_bytes(*stage) for stage in self.cut_alike(count)) for count in counts)

    def cut_alike(self, stages: int) -> tuple[tuple[int, int], ...]:
        """As `cut`, on equal GPUs that have memory for any cut."""
        return cut_layers(self.layer_weights, self.head_weights, [1.0] * stages)

    def memories(self, cuts: Sequence[tuple[int, int]], reads_peers: bool = False) -> list[MemoryModel]:
        """Of stages that are cut so."""
        return [self.stage_memory(*cut, stage, len(cuts), reads_peers) for stage, cut in enumerate(cuts)]

    def stage_memory(self, first: int, last: int, stage: int, stages: int, reads_peers: bool = False) -> MemoryModel:
        """Of a GPU with these layers, the `stage`-th of so many `stages`, with the micro-batches whose backward is still to come. Where it
        `reads_peers`, links are rings of hidden states and gradients in its memory, else in the host's.
        """
        memory, count, in_flight = self.memory, last - first, most_open(stage, stages)
        own = tuple(phase for phase in memory.phases if not phase.at_head)
        phases = memory.phases if last == len(self.layers) else own or memory.phases
        cut = [phase.of_layers(count, len(self.layers), in_flight) for phase in phases]
        boundary = self.hidden_size * memory.element_bytes
        return replace(
            memory,
            base_bytes=self.stage_bytes(first, last),
            phases=tuple(replace(phase, bytes_per_token=phase.bytes_per_token + _BOUNDARY_BUFFERS * boundary) for phase in cut),
            num_layers=count if memory.num_layers else 0,
            stage=LayerRange(first, last, len(self.layers)),
            elsewhere=(*self.layers[:first], *self.layers[last:]),
            link_bytes=2 * ring_places(stages) * boundary if reads_peers and stages > 1 else 0,
        )


class StageRooms:
    """`shape.memory.StageRooms` of a base with these parts. What it has worked out it remembers."""

    def __init__(self, parts: BaseParts) -> None:
        self._parts, self.fullest_bytes = parts, parts.bytes_by_stages()
        self.boundary_bytes = parts.hidden_size * parts.memory.element_bytes
        self._cut, self._highest, self.slowest = cache(parts.cut_alike), cache(self._find_highest), cache(self._find_slowest)
        self.room, self._memories = lru_cache(_ROOMS)(self._find_room), lru_cache(_ROOMS)(self._count)

    def equal(self, stages: int, tokens: float, recomputed: int) -> float:
        """A micro-batch of fewer tokens counts as the least, for which `BaseParts.cut_for_any` keeps room."""
        tokens = max(tokens, PLANNED_TOKENS[0])
        return max([fixed + tokens * each for _, fixed, each in self._highest(stages, recomputed)])

    def taken(self, speeds: tuple[float, ...], limits: tuple[int, ...], tokens: float, recomputed: int) -> list[int]:
        """Bytes on each of GPUs with these speeds and limits, in the order of their stages."""
        return [memory.base_bytes + memory.activation_bytes(tokens, recomputed) for memory in self._memories(speeds, limits, recomputed)]

    def _find_room(self, speeds: tuple[float, ...], limits: tuple[int, ...], recomputed: int) -> float:
        """The smallest limit, of more GPUs than there are layers."""
        if len(limits) > len(self._parts.layers):
            return min(limits)
        stages = zip(self._memories(speeds, limits, recomputed), limits, strict=True)
        return min([self._room_of(memory, limit, len(limits), recomputed) for memory, limit in stages])

    def _room_of(self, memory: MemoryModel, limit: int, stages: int, recomputed: int) -> float:
        """What the equal stages of a GPU with so much room leave an adapter is no more than what this one leaves its part of it, for any
        micro-batch that they hold; and they hold none that this one does not.
        """
        lines, (least, most), own = memory.lines(recomputed), PLANNED_TOKENS, memory.stage
        assert own is not None, "a stage"
        until = min(max(min([(limit - fixed) / each for fixed, each in lines if each > 0], default=most), least), most)
        tried = {until, *(tokens for tokens in bends(self._highest(stages, recomputed)) if tokens < until)}
        left = {tokens: limit - max([fixed + tokens * each for fixed, each in lines]) for tokens in tried}
        return min([self.equal(stages, tokens, recomputed) + left[tokens] * own.count / (own.stop - own.first) for tokens in tried])

    def _count(self, speeds: tuple[float, ...], limits: tuple[int, ...], recomputed: int) -> list[MemoryModel]:
        return self._parts.memories(self._parts.cut_for_any(speeds, limits, recomputed))

    def _find_slowest(self, stages: int) -> float:
        """Of more than there are layers, those that each have one."""
        weights = [self._parts.timed_weights_of(*stage) for stage in self._cut(min(stages, len(self._parts.layers)))]
        return max(weights) * stages / sum(weights)

    def _find_highest(self, stages: int, recomputed: int) -> list[tuple[float, float, float]]:
        alike = self._parts.memories(self._cut(min(stages, len(self._parts.layers))))
        return highest([line for memory in alike for line in memory.lines(recomputed)])


def highest(lines: Sequence[tuple[float, float]]) -> list[tuple[float, float, float]]:
    """Of lines through tokens, as of `MemoryModel.lines`, those that are the highest somewhere, with the tokens from which on they are.

    >>> highest([(4.0, 0.0), (0.0, 1.0), (2.0, 0.5), (0.0, 2.0)])
    [(0.0, 4.0, 0.0), (2.0, 0.0, 2.0)]
    """
    since, (fixed, each) = 0.0, max(lines)
    found = [(since, fixed, each)]
    while steeper := [(max(since, (fixed - own) / (slope - each)), -slope, own) for own, slope in lines if slope > each]:
        since, falling, fixed = min(steeper)
        each = -falling
        found.append((since, fixed, each))
    return found


def bends(found: Sequence[tuple[float, float, float]], room: float = math.inf) -> list[float]:
    """Of `highest` lines, the tokens of planned micro-batches at which they bend, from the least to the largest that `room` holds, if any.
    What fits beside them at all of these does so in between, as what a micro-batch takes is convex in its tokens.
    """
    least, most = PLANNED_TOKENS
    most = min([most, *((room - fixed) / each for _, fixed, each in found if each > 0)])
    return [least, *(since for since, _, _ in found if least < since < most), most] if most >= least else []


def with_stages(memory: BaseMemory, parts: BaseParts, *, ordered: bool) -> BaseMemory:
    """What is known of the base's bytes where it may be cut into stages, or is, as is `ordered`; `memory` if it cannot be."""
    if parts.no_stages or len(parts.layers) < LEAST_STAGES:
        return memory
    memory = replace(memory, stages=StageRooms(parts))
    return memory.cut() if ordered else memory


def fitting(
    parts: Sequence[BaseParts],
    limits: Sequence[int],
    adapter: int,
    tokens: int,
    recompute: Recompute = "auto",
    reads_peers: bool = False,
) -> tuple[Callable[[int, int, int], bool], ...]:
    """As `cut_layers` has it, of stages on devices with these `parts` and limits, with all layers recomputed, or those that are ordered:
    whether each holds its part of an `adapter` of so many numbers and micro-batches of `tokens`. Where no cut does: whether each has as
    much room as equal stages would have on the smallest device, as schedulers count; else whether the least micro-batch fits, or the
    weights alone.
    """
    stages, layers = len(parts), len(parts[0].layers)
    ordered = fixed_depth(recompute, layers)
    recomputed = layers if ordered is None else ordered

    @cache
    def beside(stage: int, held: int, at_head: bool, most_tokens: float) -> int:
        first = layers - held if at_head else 0
        return parts[stage].stage_memory(first, first + held, stage, stages, reads_peers).activation_bytes(most_tokens, recomputed)

    def taken(stage: int, first: int, end: int, most_tokens: float) -> int:
        return parts[stage].stage_bytes(first, end) + beside(stage, end - first, end == layers, most_tokens)

    def holds_job(stage: int, first: int, end: int) -> bool:
        memory, own = parts[stage].memory, -(-adapter * (end - first) // layers)
        return taken(stage, first, end, tokens) + adapter_bytes(own, own, memory.element_bytes, memory.sum_bytes) <= limits[stage]

    cuts = enumerate(parts[0].cut_alike(stages))
    alike = highest([line for at, cut in cuts for line in parts[at].stage_memory(*cut, at, stages, reads_peers).lines(recomputed)])
    rooms = {tokens: min(limits) - max(fixed + tokens * each for _, fixed, each in alike) for tokens in bends(alike, min(limits))}

    def holds_as_alike(stage: int, first: int, end: int) -> bool:
        share, limit = (end - first) / layers, limits[stage]
        return bool(rooms) and all(taken(stage, first, end, most) + share * room <= limit for most, room in rooms.items())

    def holds_least(stage: int, first: int, end: int) -> bool:
        return taken(stage, first, end, PLANNED_TOKENS[0]) <= limits[stage]

    return holds_job, holds_as_alike, holds_least, lambda stage, first, end: parts[stage].stage_bytes(first, end) <= limits[stage]


@lru_cache(maxsize=8)
def _numbers(layers: tuple[str, ...]) -> Mapping[str, int]:
    """Of decoder layers, by name: a plan asks for each linear of each job in each cut."""
    return {name: number for number, name in enumerate(layers)}
