"""Bytes: of a base in all its forms, of a micro-batch on one device, of adapters, and how many GPUs that takes.

`MemoryModel` is what a run goes by, counted from the base's layers or measured (`planning/`); `BaseMemory` is the same in a few numbers,
for those who plan without its layers: a scheduler, a server.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol, runtime_checkable

from tlora.adapter_shape import ROW_ALIGNMENT
from tlora.adapters.layout import AdapterLayout, AdapterShape
from tlora.batching.pipeline_model import PADDING
from tlora.batching.recompute_plan import RecomputePlan, same_for_all
from tlora.job import Recompute
from tlora.shape.stages import LayerRange
from tlora.shape.token_cost import fixed_depth

MOST_GPUS = 16  # on which a base in parts is counted
_MOST_WHOLE = 0.85  # of a GPU's bytes: with less room beside the base hardly a micro-batch fits
_COUNTED_TOKENS = (1024, 8192)  # the micro-batches that a scheduler plans
PLANNED_TOKENS = (1024, 16384)  # of the least and the largest micro-batch that a scheduler plans
_ROUNDING = 1e-9  # relative: what is met exactly is met


def adapter_bytes(parameters: int, padded: int, element_bytes: int, sum_bytes: int, flat: int = 3, weights: int = 1) -> int:
    """Of one resident adapter: `flat` vectors of all parameters (weights and two moments), and in the bank, by `padded` rows, `weights`
    copies in the compute dtype and the sum of gradients.
    """
    return flat * sum_bytes * parameters + (weights * element_bytes + sum_bytes) * padded


ADAPTER_BYTES = adapter_bytes(1, 1, 2, 4)  # per trained parameter over a base in 16 bits


@dataclass(frozen=True)
class Phase:
    """What is alive at the peak of one phase of a micro-batch of T tokens with k layers recomputed, beside base and adapters:
    fixed_bytes + T * (bytes_per_token - k * saved_per_layer) bytes. `kept_per_layer`: of these, what each layer keeps of a token until its
    backward; 0 where that is not known, as it was measured. That is of samples of `sample_tokens` tokens; each one more takes
    `sample_bytes`, as each has chunks of its own in a recurrence. `at_head`: where several stages hold the layers, of the last alone.
    """

    fixed_bytes: float
    bytes_per_token: float
    saved_per_layer: float = 0.0
    kept_per_layer: float = 0.0
    sample_bytes: float = 0.0
    sample_tokens: float = 1.0
    at_head: bool = field(default=False, kw_only=True)

    def token_bytes(self, recomputed_layers: int, samples_per_token: float = 0.0) -> float:
        """Of each token in it."""
        more = self.sample_bytes * max(0.0, samples_per_token - 1 / self.sample_tokens)
        return self.bytes_per_token - recomputed_layers * self.saved_per_layer + more

    def of_layers(self, layers: int, of: int, in_flight: int) -> Phase:
        """With `layers` of the `of` that it was counted with, and what `in_flight` micro-batches keep. A recomputed layer saves in each."""
        kept = self.kept_per_layer * (layers * in_flight - of)
        return replace(self, bytes_per_token=self.bytes_per_token + kept, saved_per_layer=self.saved_per_layer * in_flight)


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of the frozen base, of a micro-batch by its phases, and of adapters. The peak of a micro-batch is its highest phase's."""

    base_bytes: int
    phases: tuple[Phase, ...]
    num_layers: int  # that can be recomputed; 0 where none can
    element_bytes: int  # of the compute dtype
    sum_bytes: int  # of the optimizer's
    step_copies: int = 5  # gradient, new weights and moments, denominator; on a GPU a step takes nothing
    layer_weights: int = 0  # that a token is multiplied with in one layer
    layer_features: int = 0  # into and out of its linears
    unpacked_weights: int = 0  # of a layer's linears, from 4 bits, in forward and again in backward
    measured: bool = False
    spanning: frozenset[AdapterLayout] = frozenset()  # of jobs of several replicas; one of equal shape counts as they do
    compared: frozenset[AdapterLayout] = frozenset()  # likewise of jobs that compare with the adapter that they start from
    mailbox_bytes: int = 0  # in which other ranks read these jobs' gradients, for as long as the run lasts
    samples_per_token: float = 0.0  # of the job with the shortest
    stage: LayerRange | None = None  # which layers these are the bytes of, where several stages hold them
    elsewhere: tuple[str, ...] = ()  # names of decoder layers whose adapters lie at other stages
    link_bytes: int = 0  # of each token, in rings between stages that read each other's memory
    refers: bool = False  # whether a job compares with a reference, whose pass takes as many tokens through these

    @property
    def most_recomputed(self) -> int:
        """Past so many layers recomputation saves nothing: backward needs the activations of one layer in any case."""
        return max(0, self.num_layers - 1)

    def job_bytes(self, layout: AdapterLayout) -> int:
        """One resident adapter: weights and two moments, and in the bank weights and gradient sums by padded rows. With several replicas
        also the sum of their gradients (`group/exchange.py`); with a reference of its own also that one's weights.
        """
        here = self._here(layout)
        padded = sum(-(-s.rows // ROW_ALIGNMENT) * ROW_ALIGNMENT * (s.in_features + s.out_features) for s in here)
        flat = 4 if layout in self.spanning else 3
        weights = 2 if layout in self.compared else 1
        return adapter_bytes(sum(s.numel for s in here), padded, self.element_bytes, self.sum_bytes, flat, weights)

    def step_bytes(self, layout: AdapterLayout) -> int:
        """What one optimizer step takes for a moment, and the end of a replica: a copy of its gradient, and what another rank sent."""
        copies = max(self.step_copies, 2) if layout in self.spanning else self.step_copies
        return copies * self.sum_bytes * sum(s.numel for s in self._here(layout))

    def _here(self, layout: AdapterLayout) -> Sequence[AdapterShape]:
        """What of an adapter lies here."""
        others = tuple(f"{name}." for name in self.elsewhere)
        return [shape for shape in layout.shapes if not shape.module.startswith(others)] if others else layout.shapes

    def activation_bytes(self, token_budget: float, recomputed_layers: int = 0) -> int:
        return int(max(fixed + token_budget * each for fixed, each in self._activations(recomputed_layers)))

    def lines(self, recomputed_layers: int) -> list[tuple[float, float]]:
        """Bytes at no token and for each, of base and a micro-batch with so many layers recomputed, which takes the most of them."""
        return [(self.base_bytes + fixed, each) for fixed, each in self._activations(recomputed_layers)]

    def _activations(self, recomputed_layers: int) -> list[tuple[float, float]]:
        """The same without the base, by phases."""
        recomputed, links = min(recomputed_layers, self.most_recomputed), self.link_bytes * (1 + self.refers)
        tokens = [(phase.fixed_bytes, phase.token_bytes(recomputed, self.samples_per_token)) for phase in self.phases]
        return [(fixed + PADDING * links, each + links) for fixed, each in tokens]

    def most_activation_bytes(self, most_tokens: int, recompute: RecomputePlan) -> int:
        """Of any micro-batch of up to `most_tokens`: a shorter one that recomputes fewer layers may take more than the longest."""
        tried = {most_tokens, *(tokens for tokens in recompute.most_tokens if 0 < tokens < most_tokens)}
        return max(self.activation_bytes(tokens, recompute.layers(tokens)) for tokens in tried)

    def total_bytes(self, layouts: Sequence[AdapterLayout], most_tokens: int, recompute: RecomputePlan | int = 0) -> int:
        """Peak with these adapters resident: activations and an optimizer step are never alive together."""
        plan = same_for_all(recompute) if isinstance(recompute, int) else recompute
        return self._beside_activations(layouts) + max(self.most_activation_bytes(most_tokens, plan), self._step_bytes(layouts))

    def room(self, layouts: Sequence[AdapterLayout], limit_bytes: int) -> int:
        """Bytes below the limit that these adapters leave to activations; negative where the adapters do not fit themselves."""
        room = limit_bytes - self._beside_activations(layouts)
        return room if self._step_bytes(layouts) <= room else -1

    def _beside_activations(self, layouts: Sequence[AdapterLayout]) -> int:
        return self.base_bytes + self.mailbox_bytes + sum(self.job_bytes(layout) for layout in layouts)

    def _step_bytes(self, layouts: Sequence[AdapterLayout]) -> int:
        return max((self.step_bytes(layout) for layout in layouts), default=0)

    def most_tokens(self, room_bytes: int, recomputed_layers: int) -> int:
        """Of a micro-batch whose activations take no more than `room_bytes`; 0 where none does."""
        lines = self._activations(recomputed_layers)
        return max(0, min((int((room_bytes - fixed) // each) for fixed, each in lines if each > 0), default=0))

    def alone(self) -> MemoryModel:
        """Without what is known of a run's jobs, and of where other layers lie."""
        alone = replace(self, spanning=frozenset(), compared=frozenset(), mailbox_bytes=0, samples_per_token=0.0, refers=False)
        return replace(alone, stage=None, elsewhere=(), link_bytes=0)

    def least_recomputed(self, room_bytes: int) -> RecomputePlan:
        """The fewest layers with which a micro-batch's activations take no more than `room_bytes`; where none does, all that save some."""
        return RecomputePlan(tuple(accumulate((self.most_tokens(room_bytes, k) for k in range(self.most_recomputed)), max)))


@dataclass(frozen=True)
class StreamedBytes:
    """Of a base: what its decoder layers take in the host's memory, one of them in a slot, and all else on the device."""

    host_bytes: int
    layer_bytes: int
    num_layers: int
    other_bytes: int

    def on_device(self, slots: int) -> int:
        return self.other_bytes + min(slots, self.num_layers) * self.layer_bytes


@runtime_checkable
class StageRooms(Protocol):
    """As `base_parts.StageRooms`: what stages take on each of their GPUs, counted and cut as a worker does it."""

    @property
    def fullest_bytes(self) -> tuple[int, ...]:
        """Weights of the fullest of 2, 3, ... equal stages."""
        ...

    @property
    def boundary_bytes(self) -> int:
        """Of a token's hidden states, which one stage sends to the next."""
        ...

    def slowest(self, stages: int) -> float:
        """How many times as long as an even part of the base's layers and head the slowest of so many equal stages takes."""
        ...

    def equal(self, stages: int, tokens: float, recomputed: int) -> float:
        """Bytes of weights and micro-batches of so many tokens, with so many layers recomputed, on the fullest of so many equal stages."""
        ...

    def room(self, speeds: tuple[float, ...], limits: tuple[int, ...], recomputed: int) -> float:
        """As `BaseMemory.room_on`, with so many layers recomputed."""
        ...


@dataclass(frozen=True, slots=True)
class BaseMemory:
    """Bytes of a base as counted from its layers: of its weights on each of 1, 2, ... GPUs (whole on one, in parts on several), of any
    micro-batch, and of a token of one, without recomputation and with as much of it as there is. `streamed_bytes`: of its weights on one
    GPU to which they are streamed from the host's memory; 0 where they cannot be. `num_layers`: that can be recomputed, 0 where that is
    not known; `ordered_layers` of them are in every micro-batch. `stages`: which GPUs of several hosts may hold; None where that is not
    known, or cannot be. `in_stages`: on several GPUs it is always in these, as is ordered.
    """

    bytes_by_gpus: tuple[int, ...]
    fixed_bytes: float
    token_bytes: float
    least_token_bytes: float
    streamed_bytes: float = 0.0
    num_layers: int = 0
    ordered_layers: int = 0
    in_stages: bool = False
    stages: StageRooms | None = field(default=None, compare=False)

    def room_on(self, speeds: tuple[float, ...], limits: tuple[int, ...]) -> float:
        """Of stages on GPUs with these speeds and limits, in their order: the bytes that equal GPUs need for equal stages with as much room
        for jobs. No less than the smallest has, where that is enough for any: `BaseParts.cut_for_any`.
        """
        stages = self.stages_on(len(limits))
        return min(limits) if stages is None else stages.room(speeds, limits, self._most_recomputed)

    def bytes_on(self, gpus: int, tokens: float, room_bytes: float, *, recomputed: bool = False) -> float:
        """Of weights and a micro-batch of so many tokens on each of `gpus` that have so much room, with as many layers recomputed as are
        ordered, or else as there are.
        """
        if (stages := self.stages_on(gpus)) is not None:
            return stages.equal(gpus, tokens, self._most_recomputed if recomputed else self.ordered_layers)
        return self.weights(gpus, room_bytes) + self.fixed_bytes + (self.least_token_bytes if recomputed else self.token_bytes) * tokens

    def least_layers(self, gpus: int, tokens: float, room_bytes: float, beside_bytes: float) -> int:
        """The fewest layers whose recomputation makes room for a micro-batch of `tokens` and `beside_bytes` on each of `gpus`."""
        if (stages := self.stages_on(gpus)) is not None:
            tried = range(self.ordered_layers, self._most_recomputed)
            more = bisect_left(tried, True, key=lambda layers: stages.equal(gpus, tokens, layers) + beside_bytes <= room_bytes)
            return min(self.num_layers, (self.ordered_layers + more) * gpus) if more else self.ordered_layers  # each recomputes as many
        excess = self.bytes_on(gpus, tokens, room_bytes) + beside_bytes - room_bytes
        if excess <= 0 or not self._saved_bytes:
            return self.ordered_layers
        return min(self.num_layers, math.ceil(excess / (self._saved_bytes * tokens) * (1 - _ROUNDING)))

    def stages_on(self, gpus: int) -> StageRooms | None:
        """In which it always lies on so many GPUs; None where it lies otherwise."""
        return self.stages if gpus > 1 and self.in_stages else None

    @property
    def _most_recomputed(self) -> int:
        """Layers, where memory asks for them."""
        return self.num_layers if self.least_token_bytes < self.token_bytes else self.ordered_layers

    def over(self, *, hosts: bool) -> BaseMemory:
        """With parts over GPUs of several `hosts`, or else of one."""
        return self.cut() if hosts and self.stages is not None and not self.in_stages else self

    def cut(self) -> BaseMemory:
        """Of a base that is ordered in stages."""
        assert self.stages is not None, "a base that is in no stages"
        return replace(self, bytes_by_gpus=(self.bytes_by_gpus[0], *self.stages.fullest_bytes), in_stages=True)

    def recomputing(self, recompute: Recompute) -> BaseMemory:
        """Of a cluster whose `recompute` orders it; itself with "auto"."""
        layers = fixed_depth(recompute, self.num_layers)
        if layers is None or not self.num_layers:
            return self
        token_bytes = self.token_bytes - layers * self._saved_bytes if layers < self.num_layers else self.least_token_bytes
        return replace(self, token_bytes=token_bytes, least_token_bytes=token_bytes, ordered_layers=layers)

    @property
    def _saved_bytes(self) -> float:
        """Of a token, by each layer; the activations of one are needed in any case."""
        return (self.token_bytes - self.least_token_bytes) / max(1, self.num_layers - 1)

    def weights(self, gpus: int, room_bytes: float) -> float:
        """On each of `gpus` GPUs that have so much room. One streams what leaves it too little, as its worker does."""
        if (gpus == 1 and not must_share(self.bytes_by_gpus[0], room_bytes)) or self.is_whole(room_bytes):
            return self.bytes_by_gpus[0]
        if gpus == 1 and self.streamed_bytes:
            return self.streamed_bytes
        return self.bytes_by_gpus[min(gpus, len(self.bytes_by_gpus)) - 1]

    def is_whole(self, room_bytes: float) -> bool:
        """Whether it lies whole on each of several GPUs that have so much room."""
        return not self.in_stages and not must_share(self.bytes_by_gpus[0], room_bytes)

    def least_weights(self, gpus: int) -> float:
        """On a GPU, of up to `gpus` on which the base may lie, whatever the form."""
        least = min(self.bytes_by_gpus[:gpus])
        return min(least, self.streamed_bytes) if self.streamed_bytes else least


def must_share(base_bytes: int, limit_bytes: float) -> bool:
    """Whether the base leaves too little of a GPU's bytes for jobs."""
    return base_bytes > _MOST_WHOLE * limit_bytes


def least_gpus(by_gpus: Sequence[int], limit_bytes: int) -> int | None:
    """The fewest GPUs on which the base leaves room for jobs; None if it does so on none. `by_gpus`: what it takes on each of 1, 2, ..."""
    return next((count for count, own in enumerate(by_gpus, 1) if not must_share(own, limit_bytes)), None)


def base_memory(memory: MemoryModel, by_gpus: Sequence[int], streamed_bytes: float) -> BaseMemory:
    """`memory`, counted for adapters that come later, as lines through micro-batches such as a scheduler plans. `by_gpus`: bytes of the
    base's weights on each of 1, 2, ... GPUs.
    """

    def line(layers: int) -> tuple[float, float]:
        few, many = (memory.activation_bytes(tokens, layers) for tokens in _COUNTED_TOKENS)
        slope = (many - few) / (_COUNTED_TOKENS[1] - _COUNTED_TOKENS[0])
        return max(0.0, few - slope * _COUNTED_TOKENS[0]), slope

    (fixed, slope), (_, least) = line(0), line(memory.most_recomputed)
    return BaseMemory(tuple(by_gpus), fixed, slope, least, streamed_bytes, memory.num_layers)
