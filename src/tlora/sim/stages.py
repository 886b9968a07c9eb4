"""Bases of a simulated cluster in stages: what these take of a GPU, counted from the shapes of the bases, and what jobs ask for then."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tlora.protocol import MemoryFound
from tlora.scheduler.gpu_memory import GpuMemory
from tlora.shape.base_parts import BaseParts, with_stages
from tlora.shape.cost import CostModel
from tlora.shape.memory import MOST_GPUS, BaseMemory, MemoryModel, Phase, base_memory
from tlora.shape.stages import LEAST_STAGES
from tlora.sim.mapping import DecoderShape, MappedJob

_ELEMENT_BYTES, _SUM_BYTES = 2, 4  # of a 16-bit base, whose embedding and head stay in 16 bits with weights in 8


@functools.lru_cache(maxsize=64)
def staged_memory(shape: DecoderShape, base_bytes: float, activation_bytes_per_token: float) -> BaseMemory:
    """Of a base of so many bytes in all, cut as a worker cuts it."""
    parts = parts_of(shape, base_bytes, activation_bytes_per_token)
    return with_stages(base_memory(parts.memory, [parts.memory.base_bytes] * MOST_GPUS, 0), parts, ordered=True)


def parts_of(shape: DecoderShape, base_bytes: float, activation_bytes_per_token: float) -> BaseParts:
    """Without recomputation, of which constants know nothing. What a token takes is kept by the layers, each as much, in each micro-batch
    that a stage has open.
    """
    head = shape.vocabulary * shape.hidden
    ends = _ELEMENT_BYTES * head
    decoder_bytes = int(base_bytes) - (1 if shape.tied else 2) * ends
    kept = activation_bytes_per_token / shape.layers
    return BaseParts(
        memory=MemoryModel(int(base_bytes), (Phase(0.0, activation_bytes_per_token, 0.0, kept),), 0, _ELEMENT_BYTES, _SUM_BYTES),
        layers=tuple(f"layers.{number}" for number in range(shape.layers)),
        layer_bytes=(decoder_bytes // shape.layers,) * shape.layers,
        layer_weights=(2 * shape.hidden * (shape.queries + shape.keys) + 3 * shape.hidden * shape.between,) * shape.layers,
        layer_features=(shape.attention_features + shape.mlp_features,) * shape.layers,
        embedding_bytes=ends,
        head_bytes=ends,
        head_weights=head,
        head_features=shape.hidden + shape.vocabulary,
        hidden_size=shape.hidden,
        in_8_bits=False,
        shared_bytes=(),
        streamed=None,
        precision_bytes={},
    )


def memory_found(cost: CostModel, num_gpus: int) -> MemoryFound | None:
    """What GPUs tell at first, as those of a live cluster, if the bytes of bases were counted; None where constants say them."""
    if not cost.memory:
        return None
    return MemoryFound(tuple(range(num_gpus)), (int(min(map(cost.room_bytes, cost.memory))),) * num_gpus)


def asking_for_stages(jobs: Sequence[MappedJob], cost: CostModel, num_gpus: int, shapes: Mapping[str, DecoderShape]) -> list[MappedJob]:
    """The jobs as a live cluster whose bases are ordered in stages lets them ask: for two GPUs or more, as many as hold base and job, and
    no more than the base has layers.
    """
    memory, told = GpuMemory(), memory_found(cost, num_gpus)
    assert told is not None, "bases in stages"
    memory.find(told.gpus, told.memory_bytes)

    def asking(job: MappedJob) -> MappedJob:
        spec, shape = job.job, shapes.get(job.job.base_model)
        if shape is None:  # which is rejected
            return job
        spec = replace(spec, gpus=min(spec.gpus, shape.layers), least_gpus=max(spec.least_gpus, LEAST_STAGES), on_one_host=False)
        spec = memory.with_parts(cost, spec, lambda _: 0)
        return replace(job, job=replace(spec, gpus=max(spec.gpus, spec.least_gpus)))

    return [asking(job) for job in jobs]
