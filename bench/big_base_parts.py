"""Parts of `bench.shared_base` over as many layers of a 70B as fit: shared in 16 bits, and in fp8 whole on each GPU."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.machine import wait
from bench.shapes import shape_of
from bench.shared_base_rank import JOBS, STD, Rank
from bench.shared_models import random_rows
from tlora.job import LoraConfig
from tlora.sharing.layout import lay_out
from tlora.sharing.peers import Peers
from tlora.supermodel.assembly import assemble, stand_in
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.held_linear import hold
from tlora.supermodel.inject import find_linears
from tlora.supermodel.load import Base, make_base
from tlora.supermodel.shared_base import Precision, share_linears, shared_weights
from tlora.supermodel.supermodel import SuperModel

_WARM_UP = 2  # micro-batches
_SAMPLES = 400  # of mixed lengths, from which micro-batches are filled


def big(rank: Rank) -> None:
    """Random layers in 16 bits that all ranks share."""
    shape, peers = _shape(rank), Peers(rank.sharing("big"))
    started = time.perf_counter()
    layers, recomputed = _what_fits(rank, shape, 2.0 / rank.count)
    base = _shared_base(rank, shape, layers, peers)
    rank.note("setup_seconds", time.perf_counter() - started)
    assert base.layers is not None
    rank.note("layer_bytes", base.layers.layout.slot_bytes)
    _train(rank, base, recomputed, peers)


def fp8(rank: Rank) -> None:
    """Random layers in fp8 (on a CPU: in 32 bits) that each GPU holds whole: placed jobs need nothing of each other."""
    shape, peers = _shape(rank), Peers(rank.sharing("fp8"))
    started = time.perf_counter()
    layers, recomputed = _what_fits(rank, shape, 1.0)
    base = _whole_base(rank, shape, layers)
    rank.note("setup_seconds", time.perf_counter() - started)
    _train(rank, base, recomputed, peers)


def _shape(rank: Rank) -> str:
    return "llama-3-70b" if rank.device.type == "cuda" else "tiny"


def _tokens(rank: Rank) -> int:
    return min(rank.options.tokens, rank.options.big_tokens) if rank.device.type == "cuda" else 64


def _train(rank: Rank, base: Base, recomputed: int, peers: Peers) -> None:
    """Micro-batches of four jobs of rank 16, on all ranks at once."""
    model = rank.super_model(base, dict.fromkeys(JOBS, LoraConfig(r=16)))
    model.recomputed_layers = min(recomputed, model.num_layers)
    rank.note("layers", model.num_layers)
    rank.note("recomputed_layers", model.recomputed_layers)
    batches = _batches(rank, base.vocab_size)
    rates, exposed = list[float](), list[float]()
    for turn, batch in zip(range(_WARM_UP + rank.options.repeats), itertools.cycle(batches), strict=False):
        peers.exchange(f"turn-{turn}", True)
        waited, started = _waited(model), time.perf_counter()
        model.forward_backward(batch)
        wait(rank.device)
        taken, tokens = time.perf_counter() - started, len(batch.input_ids_T)
        rank.say(f"micro-batch {turn}: {tokens} tokens, {taken:.2f} s")
        if turn >= _WARM_UP:
            rates.append(tokens / taken)
            exposed.append(_waited(model) - waited)
            rate = statistics.median(rates)
            found = {"seconds": _tokens(rank) / rate, "exposed_fetch_seconds": statistics.median(exposed), "tokens": _tokens(rank)}
            rank.note("micro_batch", found | {"tokens_per_second_of_all_ranks": rank.count * rate})
    if rank.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(rank.device)
        rank.note("gib", {"in_use": (total - free) / 2**30, "peak_of_torch": torch.cuda.max_memory_allocated(rank.device) / 2**30})
    peers.exchange("end", True)


def _waited(model: SuperModel) -> float:
    return model.fetches.exposed_seconds if model.fetches is not None else 0.0


def _batches(rank: Rank, vocab_size: int) -> list[PackedBatch]:
    """One micro-batch with a sample of each job; with `--lengths`, several of mixed samples, each as full as the next ones fill it."""
    tokens = _tokens(rank)
    if rank.options.lengths is None:
        return [rank.batch(tokens, vocab_size)]
    low, high = rank.options.lengths
    numbers = np.random.default_rng(rank.number)
    open_lengths = sorted(numbers.integers(low, min(high, tokens), _SAMPLES, endpoint=True).tolist(), reverse=True)
    batches: list[PackedBatch] = []
    for _ in range(rank.options.repeats):
        lengths, left = list[int](), tokens
        for length in list(open_lengths):
            if length <= left:
                lengths.append(length)
                open_lengths.remove(length)
                left -= length
        names = sorted(JOBS)[: len(lengths)] if len(lengths) < len(JOBS) else sorted(JOBS)
        rows = [(names[number % len(names)], length) for number, length in enumerate(lengths)]
        made = [
            BatchRow(name, numbers.integers(3, vocab_size, length, dtype=np.int32), np.ones(length), float(length))
            for name, length in sorted(rows)
        ]
        batches.append(collate(made, rank.device))
    return batches


def _what_fits(rank: Rank, shape: str, bytes_of_a_weight: float) -> tuple[int, int]:
    """Layers, and how many of them backward computes again. In bytes: a layer's part and adapters, and what it keeps of a token."""
    config: Any = shape_of(shape, rank.options.layers)
    if rank.device.type == "cpu":
        return rank.options.layers or 4, 0
    tokens, hidden, inner = _tokens(rank), config.hidden_size, config.intermediate_size
    kv = hidden * config.num_key_value_heads // config.num_attention_heads
    weights = 2 * hidden * (hidden + kv) + 3 * hidden * inner
    job = (12 + 6) * 16 * (2 * 2 * hidden + 2 * (hidden + kv) + 3 * (hidden + inner))
    outputs = 3 * hidden + 2 * kv + 2 * inner
    kept, saved = 2 * (outputs + hidden) + 2 * 7 * 2 * 16, 2 * outputs
    work = 2 * config.vocab_size * hidden * 2 + rank.options.slots * 2 * weights + tokens * (8 * inner + 14 * hidden) + (2 << 30)
    room = 0.95 * torch.cuda.mem_get_info(rank.device)[0] - work
    for layers in range(config.num_hidden_layers, 0, -1):
        left = room - layers * (bytes_of_a_weight * weights + len(JOBS) * job)
        for recomputed in range(layers):
            if tokens * (layers * kept - recomputed * saved) <= left:
                return layers, recomputed
    raise RuntimeError(f"not one layer fits into {room / 2**30:.0f} GiB")


def _outlined(rank: Rank, shape: str, layers: int) -> Any:
    """The model of `shape`; each weight takes the memory of one number."""
    config = shape_of(shape, layers)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config, dtype=rank.dtype).state_dict()
    return assemble(config, rank.dtype, {name: stand_in(tensor.shape, rank.dtype) for name, tensor in names.items()}, shape)


def _draw_all_but(rank: Rank, model: Any, linears: set[str]) -> None:
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight") not in linears:
            parameter.data = _drawn(rank, parameter, 0.02)


def _drawn(rank: Rank, like: Tensor, std: float) -> Tensor:
    drawn = torch.empty(like.shape, dtype=rank.dtype, device=rank.device)
    return drawn.fill_(1.0) if like.ndim == 1 else drawn.normal_(0.0, std)


def _shared_base(rank: Rank, shape: str, layers: int, peers: Peers) -> Base:
    """Each rank draws its own ranges of the layers, and all of the rest."""
    model = _outlined(rank, shape, layers)
    layout = lay_out(shared_weights(model, shape), rank.count)
    _draw_all_but(rank, model, set(layout.places))
    rows = random_rows(0, layout, rank.dtype, rank.device, std=STD)
    return make_base(model, shape, share_linears(model, shape, Precision(None, rank.dtype), rows, peers, rank.device))


def _whole_base(rank: Rank, shape: str, layers: int) -> Base:
    """Linear after linear is drawn and held in fp8: never two copies of all."""
    model = _outlined(rank, shape, layers)
    linears = set(find_linears(model))
    _draw_all_but(rank, model, linears)
    for name in sorted(linears):
        linear = model.get_submodule(name)
        linear.weight.data = _drawn(rank, linear.weight, STD)
        if rank.device.type == "cuda":
            hold(model, [name], rank.device, "fp8")
    return make_base(model.to(rank.device), shape)
