"""A worker's base in stages, of which its ranks have one each, also ranks that other hosts lend: where it is cut, and what connects them.

All ranks find the same cut and the same sizes by themselves, and refuse to begin where these differ. Jobs are not known then: those that
do not go through the links are refused.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed import FileStore, PrefixStore

from tlora.adapters.state import AdapterLayout
from tlora.data.base_download import fetch_base
from tlora.engine.ranks.early_stage import EarlyStage
from tlora.engine.ranks.last_stage import PADDING, StagePipeline
from tlora.engine.ranks.spanning_jobs import RankContext
from tlora.engine.ranks.stage_links import StageLinks, StageSizes
from tlora.errors import CapacityError, ConfigError
from tlora.job import JobSpec
from tlora.link.log import note
from tlora.planning.base_parts import count_parts
from tlora.planning.memory import ACTIVATION_RANK, memory_limit
from tlora.shape.stages import LayerRange, cut_layers
from tlora.sharing.peers import STAGES_CONNECTED, Peers, Sharing
from tlora.sharing.relayed_memory import RelayedPeers
from tlora.supermodel.cpu_dtype import settle_dtype
from tlora.supermodel.load import layers_of, outline
from tlora.supermodel.stage_base import check_stages
from tlora.supermodel.supermodel import SuperModel
from tlora.wording.numbers import gib
from tlora.worker_protocol import Load, Loaded, Memory

_LEAST_TOKENS = 8192  # that a sample or a budget may have, whatever jobs are expected
_RANK = 128  # of an adapter of all linears for which there is room
_MEETING_SECONDS = 7200.0


@dataclass(frozen=True)
class BaseCut:
    """The layers of each stage, and the bytes that its weights take; `tokens` of the largest micro-batch, `adapter` numbers of the largest
    adapter that go through the links.
    """

    ranges: tuple[LayerRange, ...]
    stage_bytes: tuple[int, ...]
    tokens: int
    adapter: int

    def why_not(self, longest: int, layout: AdapterLayout) -> str:
        """Why a job with that longest sample and an adapter of that layout cannot train here; "" where it can."""
        if any(shape.tokens for shape in layout.shapes):
            return "trainable_token_indices needs embedding and head in one place, and the base is in stages. Train it over a whole base"
        if longest > self.tokens:
            return f"a sample has {longest:,} tokens, and {self.tokens:,} go through the stages of this base. Lower max_length"
        if layout.numel > self.adapter:
            return f"its adapter has {layout.numel:,} numbers, and {self.adapter:,} go through the stages of this base. Lower r"
        return ""


def cut_base(outlined: SuperModel, device: torch.device, stages: int, expected: Sequence[JobSpec]) -> BaseCut:
    """Of a base on the meta device: layers of like predicted seconds on each of `stages` ranks. Raises ModelError for one that cannot be
    cut, ConfigError for one with too few layers.
    """
    check_stages(outlined.base, device)
    layers = len(layers_of(outlined.base.decoder))
    if layers < stages:
        raise ConfigError(f"layout: stages needs a decoder layer for each GPU, and the base has {layers} for {stages}. Give its jobs fewer")
    parts = count_parts(outlined, device, ACTIVATION_RANK)
    cuts = cut_layers(parts.layer_weights, parts.head_weights, [1.0] * stages)
    widths = sum(inputs + outputs for inputs, outputs in outlined.targets().values())
    return BaseCut(
        tuple(LayerRange(first, stop, layers) for first, stop in cuts),
        tuple(parts.stage_bytes(*cut) for cut in cuts),
        max(_LEAST_TOKENS, *(spec.data.max_length for spec in expected), 0),
        max(_RANK * widths, *(outlined.layout(spec).numel for spec in expected), 0),
    )


def cut_for(load: Load, context: RankContext, expected: Sequence[JobSpec]) -> BaseCut | None:
    """Of the base that the rank loads, if it is in stages. Raises as `cut_base`."""
    if not context.stages:
        return None
    outlined = SuperModel(outline(load.base_model, load.dtype, load.base_precision), load.deterministic)
    return cut_base(outlined, torch.device(load.device), len(context.stages), expected)


def open_pipeline(cut: BaseCut, model: SuperModel, context: RankContext, send: Callable[[Any], None]) -> StagePipeline:
    """Of the last stage. Raises RankError."""
    return StagePipeline(model, _open_links(cut, model, context), cut.ranges, send)


def _open_links(cut: BaseCut, model: SuperModel, context: RankContext) -> StageLinks:
    """Of the rank's stage, which `model` has, with the others. Raises RankError."""
    tokens = 2 * (cut.tokens + PADDING)  # as a pass for a reference takes them once more
    sizes = StageSizes(tokens, model.base.head.weight_VH.shape[1], cut.adapter, model.bank.dtype, model.bank.sum_dtype)
    if context.relay is not None and context.apart:
        peers = RelayedPeers(context.relay, context.number, context.stages)
    else:
        store, count = PrefixStore("stages", FileStore(context.store)), len(context.stages)
        peers = Peers(Sharing(store, context.stage, count, timeout_seconds=_MEETING_SECONDS, occasion=STAGES_CONNECTED))
    return StageLinks(peers, sizes, model.device, through_host=True)


def open_early_stage(
    load: Load, inbox: queue.SimpleQueue[Any], send: Callable[[Any], None], context: RankContext, expected: Sequence[JobSpec]
) -> EarlyStage:
    """Load the layers of this rank's stage, which is not the last, and no others. Raises TloraError."""
    dtype, _ = settle_dtype(load.base_model, load.dtype, load.device, context.slow_dtypes)
    cut = cut_for(replace(load, dtype=dtype), context, expected)
    assert cut is not None, "an early stage of a base that is not cut"
    fetch_base(load.base_model, note)
    layers, stage_bytes = cut.ranges[context.stage], cut.stage_bytes[context.stage]
    limit_bytes, named = memory_limit(torch.device(load.device), load.memory_limit), f"layers {layers.first} to {layers.stop - 1}"
    if stage_bytes > limit_bytes:
        raise CapacityError(f"{named} of the base have {gib(stage_bytes)}, and the limit is {gib(limit_bytes)}. Take more GPUs")
    model = SuperModel.from_pretrained(load.base_model, dtype, load.device, load.deterministic, load.base_precision, layers)
    note(f"{named} of {layers.count} are loaded, {gib(stage_bytes)}")
    links = _open_links(cut, model, context)
    send(Memory((limit_bytes,)))
    send(Loaded(whole=False))
    return EarlyStage(model, links, inbox)
