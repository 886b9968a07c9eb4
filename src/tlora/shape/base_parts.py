"""What a base's layers take on one kind of device, by which it is cut in every form: counted once by a process with torch, kept as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from typing import Any

from tlora.batching.pipeline_model import most_open
from tlora.shape.memory import MOST_GPUS, PLANNED_TOKENS, MemoryModel, StreamedBytes, adapter_bytes, parse_memory
from tlora.shape.stages import LEAST_STAGES, LayerRange, cut_layers
from tlora.shape.work import FEATURE_WEIGHTS

_BOUNDARY_BUFFERS = 4  # of a stage: activations and gradients that come in and go out, each while the last ones are still used
WORKER_TOKENS = 8192  # that a sample or a budget may have in stages of a worker, whatever jobs are expected
_WORKER_RANK = 128  # of an adapter of all linears for which these have room


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

    def cut(self, speeds: Sequence[float], limits: Sequence[int], adapter: int, tokens: int) -> tuple[tuple[int, int], ...]:
        """Layers of like predicted seconds on GPUs of these speeds, as far as each has memory, for an `adapter` of so many numbers and
        micro-batches of so many `tokens`: `cut_layers`.
        """
        return cut_layers(self.layer_weights, self.head_weights, speeds, *fitting([self] * len(speeds), limits, adapter, tokens))

    def cut_for_any(self, speeds: Sequence[float], limits: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """As `cut`, of a worker, whose jobs come and go: for `most_numbers` and `WORKER_TOKENS`."""
        return self.cut(speeds, limits, self.most_numbers, WORKER_TOKENS)

    @property
    def most_numbers(self) -> int:
        """Of an adapter of all linears for which a worker has room."""
        return _WORKER_RANK * sum(self.layer_features)

    def bytes_by_stages(self) -> tuple[int, ...]:
        """Of the fullest of 2, 3, ... stages, cut as a worker cuts them."""
        counts = range(LEAST_STAGES, min(MOST_GPUS, len(self.layers)) + 1)
        cuts = [cut_layers(self.layer_weights, self.head_weights, [1.0] * count) for count in counts]
        return tuple(max(self.stage_bytes(*stage) for stage in stages) for stages in cuts)

    def stage_memory(self, first: int, last: int, in_flight: int) -> MemoryModel:
        """Of a GPU with these layers, and `in_flight` micro-batches whose backward is still to come."""
        memory, count = self.memory, last - first
        own = tuple(phase for phase in memory.phases if not phase.at_head)
        phases = memory.phases if last == len(self.layers) else own or memory.phases
        cut = [phase.of_layers(count, len(self.layers), in_flight) for phase in phases]
        buffers = _BOUNDARY_BUFFERS * self.hidden_size * memory.element_bytes
        return replace(
            memory,
            base_bytes=self.stage_bytes(first, last),
            phases=tuple(replace(phase, bytes_per_token=phase.bytes_per_token + buffers) for phase in cut),
            num_layers=count if memory.num_layers else 0,
            stage=LayerRange(first, last, len(self.layers)),
            elsewhere=(*self.layers[:first], *self.layers[last:]),
        )

    def stage_activations(self, first: int, last: int, in_flight: int, tokens: int, recomputed: int) -> int:
        """Of micro-batches of so many tokens there, with so many layers recomputed, as far as there are."""
        return self.stage_memory(first, last, in_flight).activation_bytes(tokens, recomputed)

    def to_json(self) -> dict[str, Any]:
        in_parts = None if self.in_parts is None else self.in_parts.to_json()
        return asdict(replace(self, memory=self.memory.alone(), in_parts=None)) | {"memory": self.memory.to_json(), "in_parts": in_parts}


class StageRooms:
    """`shape.memory.StageRooms` of a base with these parts. What it has worked out it remembers."""

    def __init__(self, parts: BaseParts) -> None:
        self._parts, self._cut, self._known = parts, cache(parts.cut_for_any), cache(self._take)

    def taken(self, speeds: tuple[float, ...], limits: tuple[int, ...], tokens: int, recomputed: int) -> list[int]:
        return self._known(speeds, limits, tokens, recomputed)

    def _take(self, speeds: tuple[float, ...], limits: tuple[int, ...], tokens: int, recomputed: int) -> list[int]:
        parts, stages = self._parts, len(limits)
        cuts = self._cut(speeds, limits) if stages <= len(parts.layers) else ()
        return [
            parts.stage_bytes(*cut) + parts.stage_activations(*cut, most_open(stage, stages), tokens, recomputed)
            for stage, cut in enumerate(cuts)
        ]


def fitting(parts: Sequence[BaseParts], limits: Sequence[int], adapter: int, tokens: int) -> tuple[Callable[[int, int, int], bool], ...]:
    """As `cut_layers` has it, of stages on devices with these `parts` and limits, with all layers recomputed: whether each holds its part
    of an `adapter` of so many numbers and micro-batches of `tokens`. Where no cut does: whether each has as much room as equal stages would
    have on the smallest device, as schedulers count; else whether the least micro-batch fits, or the weights alone.
    """
    stages, layers = len(parts), len(parts[0].layers)

    @cache
    def beside(stage: int, held: int, at_head: bool, most_tokens: int) -> int:
        first = layers - held if at_head else 0
        return parts[stage].stage_activations(first, first + held, most_open(stage, stages), most_tokens, layers)

    def taken(stage: int, first: int, end: int, most_tokens: int) -> int:
        return parts[stage].stage_bytes(first, end) + beside(stage, end - first, end == layers, most_tokens)

    def holds_job(stage: int, first: int, end: int) -> bool:
        memory, own = parts[stage].memory, -(-adapter * (end - first) // layers)
        return taken(stage, first, end, tokens) + adapter_bytes(own, own, memory.element_bytes, memory.sum_bytes) <= limits[stage]

    alike = tuple(enumerate(cut_layers(parts[0].layer_weights, parts[0].head_weights, [1.0] * stages)))
    rooms = {most: min(limits) - max(taken(stage, *cut, most) for stage, cut in alike) for most in PLANNED_TOKENS}

    def holds_as_alike(stage: int, first: int, end: int) -> bool:
        return rooms[PLANNED_TOKENS[0]] >= 0 and all(limits[stage] - taken(stage, first, end, most) >= rooms[most] for most in rooms)

    def holds_least(stage: int, first: int, end: int) -> bool:
        return taken(stage, first, end, PLANNED_TOKENS[0]) <= limits[stage]

    return holds_job, holds_as_alike, holds_least, lambda stage, first, end: parts[stage].stage_bytes(first, end) <= limits[stage]


@lru_cache(maxsize=8)
def _numbers(layers: tuple[str, ...]) -> Mapping[str, int]:
    """Of decoder layers, by name: a plan asks for each linear of each job in each cut."""
    return {name: number for number, name in enumerate(layers)}


def parse_parts(found: Mapping[str, Any]) -> BaseParts:
    """From `BaseParts.to_json`. Raises ValueError, KeyError, TypeError."""
    values = dict(found)
    for name in ("layer_bytes", "layer_weights", "layer_features", "shared_bytes", "other_weights"):
        values[name] = _integers(values.get(name, ()))
    values["layers"] = tuple(map(str, values["layers"]))
    values["memory"] = parse_memory(values["memory"])
    values["in_parts"] = None if values["in_parts"] is None else parse_memory(values["in_parts"])
    values["streamed"] = StreamedBytes(**values["streamed"]) if values["streamed"] is not None else None
    return BaseParts(**values)


def _integers(found: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(int, found))
