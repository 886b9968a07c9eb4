"""Counts a base's layers, head and embedding on the meta device, for those who plan without torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tlora.adapter_shape import ExpertJobs
from tlora.job import JobSpec, RunSpec
from tlora.kernels.lora_tables import rank_width
from tlora.planning.job_sketch import largest_adapter
from tlora.planning.memory import (
    ACTIVATION_RANK,
    bytes_when_shared,
    bytes_when_streamed,
    can_be_cut,
    may_be_cut,
    measure,
    measure_in_parts,
    possible_precisions,
)
from tlora.shape.base_parts import BaseParts
from tlora.shape.memory import MOST_GPUS, MemoryModel
from tlora.shape.stages import LayerRange
from tlora.supermodel.load import layers_of
from tlora.supermodel.lora_linear import LoraLinear
from tlora.supermodel.multiply_adds import active_weights
from tlora.supermodel.stage_base import why_no_stages
from tlora.supermodel.supermodel import SuperModel


def count_parts(model: SuperModel, device: torch.device, rank: int, adapts_experts: ExpertJobs = False) -> BaseParts:
    """Of `model`, on the meta device, as it would be on a `device` with adapters of up to `rank`, of experts too or not. Raises
    ModelError.
    """
    base, base_bytes = model.base, model.base.num_bytes
    memory = measure(model, base_bytes, device, rank, adapts_experts)
    cut = may_be_cut(model)
    in_parts = measure_in_parts(model, base_bytes, device, rank, adapts_experts) if cut and not can_be_cut(model) else None
    layers, names = layers_of(base.decoder), {module: name for name, module in model.model.named_modules()}
    targets = model.targets()
    layer_names = tuple(names[layer] for layer in layers)
    weights, others = (_layer_weights(model, layer_names, each) for each in (bool(adapts_experts), False))
    features = [sum(k + n for name, (k, n) in targets.items() if name.startswith(f"{layer}.")) for layer in layer_names]
    embedding = model.model.get_input_embeddings().weight
    return BaseParts(
        memory=memory,
        layers=layer_names,
        layer_bytes=tuple(_bytes_of(layer) for layer in layers),
        layer_weights=weights,
        layer_features=tuple(features),
        embedding_bytes=embedding.numel() * embedding.element_size(),
        head_bytes=base.head.weight_VH.numel() * base.head.weight_VH.element_size(),
        head_weights=base.head.weight_VH.numel(),
        head_features=sum(base.head.weight_VH.shape),
        hidden_size=base.head.weight_VH.shape[1],
        in_8_bits=any(isinstance(m, LoraLinear) and m.form.dtype.itemsize == 1 for m in model.model.modules()),
        shared_bytes=tuple(bytes_when_shared(model, base_bytes, count) for count in range(1, MOST_GPUS + 1)) if cut else (),
        streamed=bytes_when_streamed(model, base_bytes, device) if cut else None,
        no_stages=why_no_stages(base, device),
        takes_plain_path=takes_plain_path(memory, device),
        precision_bytes=possible_precisions(model, base_bytes, device),
        in_parts=in_parts,
        other_weights=others if adapts_experts == "some" and others != weights else (),
    )


def counted_adapters(jobs: Sequence[JobSpec]) -> tuple[int, ExpertJobs]:
    """Up to which rank workers that train all `jobs` count activations (`memory_bound.py`), and whether for adapters of experts."""
    rank, adapts_experts = largest_adapter(jobs)
    return rank_width(max(rank, ACTIVATION_RANK)), adapts_experts


def _layer_weights(model: SuperModel, layer_names: Sequence[str], adapts_experts: bool) -> tuple[int, ...]:
    """Of each layer, those that a token is multiplied with; linears in no layer count with the last."""
    each = {name: k * n for name, (k, n) in model.targets().items()} | active_weights(model, adapts_experts)
    weights = [sum(size for name, size in each.items() if name.startswith(f"{layer}.")) for layer in layer_names]
    weights[-1:] = [weights[-1] + sum(each.values()) - sum(weights)] if weights else []
    return tuple(weights)


def takes_plain_path(memory: MemoryModel, device: torch.device) -> bool:
    """Whether a base with that memory is computed without our kernels on a `device` that is a GPU, where stages need them."""
    return device.type == "cuda" and not memory.num_layers


def _bytes_of(layer: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in layer.parameters())


def memory_of_stages(
    stages: Sequence[LayerRange], model: SuperModel, device: torch.device, rank: int, adapts_experts: ExpertJobs = False
) -> tuple[MemoryModel, ...]:
    """Of each of `stages`, with adapters of up to `rank`, of experts too or not. Which of them takes most depends on jobs and tokens: one
    has more layers with experts, whose adapters are large, another more micro-batches in flight or the head.
    """
    return tuple(count_parts(model, device, rank, adapts_experts).memories([(cut.first, cut.stop) for cut in stages]))


def memory_in_parts(run: RunSpec, model: SuperModel, device: torch.device, base_bytes: int) -> MemoryModel:
    """Of a rank of a run that shares its base, a mixture, of which `base_bytes` lie there."""
    return measure_in_parts(model, base_bytes, device, *largest_adapter(run.jobs))


def memory_of_last_stage(run: RunSpec, model: SuperModel, device: torch.device, stages: Sequence[LayerRange]) -> MemoryModel:
    """Of a run's base in these stages, whose devices read each other's memory unless links are ordered to go through the host's."""
    parts, cuts = count_parts(model, device, *largest_adapter(run.jobs)), [(cut.first, cut.stop) for cut in stages]
    return parts.memories(cuts, reads_peers=run.links != "host")[-1]
