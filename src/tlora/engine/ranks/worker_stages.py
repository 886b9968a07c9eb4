"""A worker's base in stages, of which its ranks have one each, also ranks that other hosts lend: where it is cut, and what connects them.

Each says how fast its device is and how much memory it has. All find the same cut of that and the same sizes by themselves, and refuse to
begin where these differ. Jobs are not known then: those that do not go through the links are refused.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed import FileStore, PrefixStore

from tlora.adapters.layout import AdapterLayout
from tlora.batching.pipeline_model import PADDING
from tlora.data.base_download import fetch_base
from tlora.engine.ranks.devices import name_of, training_flops
from tlora.engine.ranks.early_stage import EarlyStage
from tlora.engine.ranks.kinds import Gpus, gpus_of
from tlora.engine.ranks.last_stage import StagePipeline
from tlora.engine.ranks.spanning_jobs import RankContext
from tlora.engine.ranks.stage_links import StageLinks, StageSizes
from tlora.errors import CapacityError, ConfigError
from tlora.job import JobSpec
from tlora.link.log import note
from tlora.planning.base_parts import count_parts
from tlora.planning.memory import ACTIVATION_RANK, memory_limit
from tlora.shape.base_parts import WORKER_TOKENS
from tlora.shape.stages import LayerRange
from tlora.sharing.channel import PeerWait, open_words
from tlora.sharing.peers import STAGES_CONNECTED, Peers, Sharing
from tlora.sharing.relayed_memory import RelayedPeers
from tlora.supermodel.cpu_dtype import settle_dtype
from tlora.supermodel.load import layers_of, outline
from tlora.supermodel.stage_base import check_stages
from tlora.supermodel.supermodel import SuperModel
from tlora.wording.numbers import gib
from tlora.worker_protocol import Load, Loaded, Memory

_MEETING_SECONDS = 7200.0
_TOLD_WORDS = 64  # of a device: its name is shorter than 400 bytes


@dataclass(frozen=True)
class BaseCut:
    """`limits`: the bytes that a run may take on each stage's device, by its layers; `tokens` of the largest micro-batch, `adapter`
    numbers of the largest adapter that go through the links, between `peers`.
    """

    limits: Mapping[LayerRange, int]
    tokens: int
    adapter: int
    peers: Peers | RelayedPeers

    @property
    def ranges(self) -> tuple[LayerRange, ...]:
        return tuple(self.limits)

    def why_not(self, longest: int, layout: AdapterLayout) -> str:
        """Why a job with that longest sample and an adapter of that layout cannot train here; "" where it can."""
        if any(shape.tokens for shape in layout.shapes):
            return "trainable_token_indices needs embedding and head in one place, and the base is in stages. Train it over a whole base"
        if longest > self.tokens:
            return f"a sample has {longest:,} tokens, and {self.tokens:,} go through the stages of this base. Lower max_length"
        if layout.numel > self.adapter:
            return f"its adapter has {layout.numel:,} numbers, and {self.adapter:,} go through the stages of this base. Lower r"
        return ""


def cut_base(outlined: SuperModel, load: Load, peers: Peers | RelayedPeers, gpus: Gpus, expected: Sequence[JobSpec]) -> BaseCut:
    """Of a base on the meta device: layers of like predicted seconds on each of `gpus`, as far as it has memory for them. Raises ModelError
    for one that cannot be cut, ConfigError for one with too few layers, CapacityError where a stage does not fit on its device.
    """
    device = torch.device(load.device)
    check_stages(outlined.base, device)
    stages = len(gpus.names)
    layers = len(layers_of(outlined.base.decoder))
    if layers < stages:
        raise ConfigError(f"layout: stages needs a decoder layer for each GPU, and the base has {layers} for {stages}. Give its jobs fewer")
    parts = count_parts(outlined, device, ACTIVATION_RANK)
    cuts = parts.cut_for_any(gpus.speeds, gpus.limits, load.recompute)
    for name, (first, stop), limit in zip(gpus.names, cuts, gpus.limits, strict=True):
        if (taken := parts.stage_bytes(first, stop)) > limit:
            named = f"layers {first} to {stop - 1} of the base"
            raise CapacityError(f"{named} have {gib(taken)}, and the limit of their {name} is {gib(limit)}. Take more GPUs")
    return BaseCut(
        {LayerRange(*cut, layers): limit for cut, limit in zip(cuts, gpus.limits, strict=True)},
        max(WORKER_TOKENS, *(spec.data.max_length for spec in expected), 0),
        max(parts.most_numbers, *(outlined.layout(spec).numel for spec in expected), 0),
        peers,
    )


def cut_for(load: Load, context: RankContext, expected: Sequence[JobSpec]) -> BaseCut | None:
    """Of the base that the rank loads, if it is in stages: returns when all of these are here. Raises as `cut_base`, and RankError."""
    if not context.stages:
        return None
    outlined, device = SuperModel(outline(load.base_model, load.dtype, load.base_precision), load.deterministic), torch.device(load.device)
    peers = _meet(context)
    own = Memory((memory_limit(device, load.memory_limit),), name_of(device), flops=training_flops(device))
    return cut_base(outlined, load, peers, gpus_of(_tell(peers, own), len(context.stages)), expected)


def _meet(context: RankContext) -> Peers | RelayedPeers:
    """The ranks with the other stages."""
    if context.relay is not None and context.apart:
        return RelayedPeers(context.relay, context.number, context.stages)
    store, count = PrefixStore("stages", FileStore(context.store)), len(context.stages)
    return Peers(Sharing(store, context.stage, count, timeout_seconds=_MEETING_SECONDS, occasion=STAGES_CONNECTED))


def _tell(peers: Peers | RelayedPeers, own: Memory) -> dict[int, Memory]:
    """What each stage's device is, by stage."""
    said = [own.limit_bytes[0], own.device, own.flops]
    if isinstance(peers, Peers):
        every = peers.exchange("devices", said)
    else:
        every = _tell_apart(peers, json.dumps(said))
    return {stage: Memory((limit,), device, flops=flops) for stage, (limit, device, flops) in enumerate(every)}


def _tell_apart(peers: RelayedPeers, text: str) -> list[Any]:
    """Words that follow their text, by which each sees that it is there."""
    words, patience = open_words(_TOLD_WORDS + 1, peers), PeerWait(peers)
    words.set_text(1, text, _TOLD_WORDS)
    words.set(0, 1)
    for rank in range(peers.world_size):
        patience.until(lambda rank=rank: words.get(rank, 0) == 1, rank)
    return [json.loads(words.get_text(rank, 1, _TOLD_WORDS)) for rank in range(peers.world_size)]


def open_pipeline(cut: BaseCut, model: SuperModel, send: Callable[[Any], None]) -> StagePipeline:
    """Of the last stage. Raises RankError."""
    return StagePipeline(model, _open_links(cut, model), cut.ranges, send)


def _open_links(cut: BaseCut, model: SuperModel) -> StageLinks:
    """Of the rank's stage, which `model` has, with the others. Raises RankError."""
    tokens = 2 * (cut.tokens + PADDING)  # as a pass for a reference takes them once more
    sizes = StageSizes(tokens, model.base.head.weight_VH.shape[1], cut.adapter, model.bank.dtype, model.bank.sum_dtype, cut.ranges)
    return StageLinks(cut.peers, sizes, model.device, through_host=True)


def open_early_stage(
    load: Load, inbox: queue.SimpleQueue[Any], send: Callable[[Any], None], context: RankContext, expected: Sequence[JobSpec]
) -> EarlyStage:
    """Load the layers of this rank's stage, which is not the last, and no others. Raises TloraError."""
    dtype, _ = settle_dtype(load.base_model, load.dtype, load.device, context.slow_dtypes)
    cut = cut_for(replace(load, dtype=dtype), context, expected)
    assert cut is not None, "an early stage of a base that is not cut"
    fetch_base(load.base_model, note)
    layers = cut.ranges[context.stage]
    model = SuperModel.from_pretrained(load.base_model, dtype, load.device, load.deterministic, load.base_precision, layers)
    note(f"layers {layers.first} to {layers.stop - 1} of {layers.count} are loaded, {gib(model.base.num_bytes)}")
    links = _open_links(cut, model)
    send(Memory((cut.limits[layers],)))
    send(Loaded(whole=False))
    return EarlyStage(model, links, inbox)
