"""What one rank of `bench.shared_base` does in each part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.machine import wait
from bench.shared_base_rank import JOBS, Rank, open_process_group
from bench.shared_models import share_model
from tlora.kernels.frozen import FrozenLinear, PlainWeight
from tlora.objectives import Dpo
from tlora.sharing.layer_stream import LayerSource, LayerStream
from tlora.sharing.layout import lay_out
from tlora.sharing.peer_memory import PeerMemory, open_peer_memory
from tlora.sharing.peers import Peers
from tlora.sharing.shards import fill
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.held_linear import hold, precisions_on
from tlora.supermodel.inject import find_linears
from tlora.supermodel.load import make_base
from tlora.supermodel.shared_base import shared_weights
from tlora.supermodel.supermodel import SuperModel

WARM_UP = 3  # micro-batches of each kind: compiled, counted, captured


# -- the same bits -----------------------------------------------------------------------------------------------------------------------


def bits(rank: Rank) -> None:
    """Losses and gradients, streamed and resident, each kind by itself: an error in one keeps the others."""
    small = ("qwen3-0.6b", 4, 2048) if rank.device.type == "cuda" else ("tiny", 4, 64)
    kinds = [None, *precisions_on(rank.device, rank.dtype)]
    for precision in kinds:
        name = precision or "16 bits"
        torch.compiler.reset()
        resident = rank.model(*small[:2])
        if precision is not None:
            hold(resident, list(find_linears(resident)), rank.device, precision)
        expected = rank.super_model(make_base(resident, small[0]), deterministic=True)
        base = share_model(rank.model(*small[:2]), small[0], rank.sharing(f"bits-{name}"), rank.device, precision)
        found = rank.super_model(base, deterministic=True)
        for recomputed in sorted({0, min(2, found.num_layers)}):
            expected.recomputed_layers = found.recomputed_layers = recomputed
            differ = _differences(rank, expected, found, small[2])
            rank.note(f"{name}, {recomputed} layers recomputed", "equal" if not differ else f"DIFFER: {differ}")
        assert base.layers is not None
        rank.note(f"{name}: fetches", str(base.layers.stats()))
    Peers(rank.sharing("bits-end"))  # nobody leaves while another reads


def _differences(rank: Rank, expected: SuperModel, found: SuperModel, tokens: int) -> list[str]:
    vocab = expected.base.vocab_size
    pair = _pair(rank, tokens // 2, vocab)
    runs: list[dict[str, Tensor]] = []
    for model in (expected, found):
        run: dict[str, Tensor] = {}
        for seed in range(4):  # the resident one has a graph from the second on
            for name, loss in model.forward_backward(rank.batch(tokens, vocab, seed)).items():
                run[f"loss of {name}, batch {seed}"] = loss.loss_sum.clone()
        passes = [model.begin(pair, {"a": Dpo(0.1)}), model.begin(rank.batch(tokens, vocab, 7))]
        for i, one in enumerate(passes):
            run |= {f"loss of {name}, open pass {i}": loss.loss_sum.clone() for name, loss in one.forward().items()}
        run |= {f"evaluation of {n}": loss.loss_sum.clone() for n, loss in model.evaluate(rank.batch(tokens, vocab, 8)).items()}
        for one in passes:
            one.backward()
        run |= {f"gradient of {name}": model.gradient(name).clone() for name in JOBS}
        for name in JOBS:
            model.zero_grad_of(name)
        runs.append(run)
    wait(rank.device)
    assert all(bool(value.isfinite().all()) for value in runs[0].values()), "the resident base gives NaN"
    return [name for name, value in runs[0].items() if not torch.equal(value, runs[1][name])]


def _pair(rank: Rank, tokens: int, vocab_size: int) -> PackedBatch:
    ids = torch.randint(3, vocab_size, (tokens,), generator=torch.Generator().manual_seed(rank.number)).int().numpy()
    half = tokens // 2
    return collate([BatchRow("a", ids, torch.ones(tokens).numpy(), 1.0, None, (half, tokens - half))], rank.device)


# -- what fetching costs -----------------------------------------------------------------------------------------------------------------


class Gathered:
    """The ranks' memory read by a collective: all ranks ask for the same layers in the same order. As FSDP2, it may copy once more."""

    def __init__(self, memory: PeerMemory, rank: int, count: int, copies_out: bool) -> None:
        self.own, self._rank, self._count, self._copies_out = memory.own, rank, count, copies_out
        self._scratch: Tensor | None = None

    def read(self, peer: int, start: int, target: Tensor) -> None:
        """The stream asks for its own range last; then all are gathered."""
        if peer != self._rank:
            return
        size = target.numel()
        whole = target.as_strided((size * self._count,), (1,), target.storage_offset() - self._rank * size)
        into = whole
        if self._copies_out:
            if self._scratch is None or self._scratch.numel() < whole.numel():
                self._scratch = torch.empty_like(whole)
            into = self._scratch[: whole.numel()]
        dist.all_gather_into_tensor(into, self.own[start : start + size])
        if self._copies_out:
            whole.copy_(into)


def step(rank: Rank) -> None:
    """One model; whether its weights are its own or come from a stream is a matter of where they are looked up."""
    options = rank.options
    before = time.perf_counter()
    weights = rank.model(options.shape, options.layers or (4 if options.shape == "tiny" else None))
    layout = lay_out(shared_weights(weights, options.shape), rank.count)
    peers = Peers(rank.sharing("step"))
    memory = open_peer_memory(layout.rank_bytes, peers, rank.device)
    fill(memory.own, layout, rank.number, lambda name, first, last: weights.get_submodule(name).weight[first:last])
    wait(rank.device)
    peers.exchange("filled", True)
    rank.note("setup_seconds", time.perf_counter() - before)
    model = rank.super_model(make_base(weights, options.shape))
    resident = model.passes.weights
    streams = {"copies": LayerStream(layout, memory, rank.number, options.slots)}
    for name, copies_out in (("gathers", False), ("gathers, copied out", True)) if open_process_group(rank, "gathers") else ():
        gathered = Gathered(memory, rank.number, rank.count, copies_out)
        streams[name] = LayerStream(layout, gathered, rank.number, options.slots)
    batch = rank.batch(options.tokens, model.base.vocab_size)
    kinds: dict[str, tuple[Any, bool]] = {"resident": (resident, True), "resident, no graphs": (resident, False)}
    kinds |= {name: (partial(_look_up, resident, stream), False) for name, stream in streams.items()}
    rank.note("layer_bytes", layout.slot_bytes)
    times = Times(rank, model, batch, peers, streams)
    times.take({name: kinds[name] for name in ("resident", "resident, no graphs", "copies")}, "first")
    times.take({name: kind for name, kind in kinds.items() if name not in ("resident", "resident, no graphs")}, "then")
    rank.note("seconds", times.seconds)
    peers.exchange("end", True)


class Times:
    """Seconds of micro-batches of each kind, and for how many of them computing waited for weights."""

    def __init__(self, rank: Rank, model: SuperModel, batch: PackedBatch, peers: Peers, streams: Mapping[str, LayerStream]) -> None:
        self._rank, self._model, self._batch, self._peers, self._streams = rank, model, batch, peers, streams
        self.seconds: dict[str, list[float]] = {}
        self._exposed: dict[str, list[float]] = {}

    def take(self, kinds: Mapping[str, tuple[Any, bool]], key: str) -> None:
        """Kinds in turns, on all ranks at once; after each turn what is known is kept."""
        self.seconds |= {name: [] for name in kinds}
        self._exposed |= {name: [] for name in kinds if name in self._streams}
        for turn in range(WARM_UP + self._rank.options.repeats):
            for name, (look_up, graphs) in kinds.items():
                self._peers.exchange(f"{key}-{turn}-{name}", True)
                self._take(name, look_up, graphs, turn)
            if turn >= WARM_UP:
                self._report()

    def _take(self, name: str, look_up: Any, graphs: bool, turn: int) -> None:
        stream = self._streams.get(name)
        waited = stream.stats().exposed_seconds if stream else 0.0
        taken = _time(self._rank, self._model, self._batch, look_up, graphs)
        if turn == 0:
            self._rank.say(f"{name}: first micro-batch {taken:.2f} s")
        if turn >= WARM_UP:
            self.seconds[name].append(taken)
            if stream:
                self._exposed[name].append(stream.stats().exposed_seconds - waited)

    def _report(self) -> None:
        medians = {name: statistics.median(found) for name, found in self.seconds.items()}
        self._rank.note("median_seconds", medians)
        self._rank.note("over_resident", {name: medians[name] / medians["resident"] for name in medians})
        self._rank.note("over_resident_without_graphs", {name: medians[name] / medians["resident, no graphs"] for name in medians})
        self._rank.note("exposed_fetch_seconds", {name: statistics.median(found) for name, found in self._exposed.items()})
        self._rank.note("tokens_per_second", {name: self._rank.options.tokens / taken for name, taken in medians.items()})


def _look_up(resident: Callable[[str], FrozenLinear], stream: LayerStream, name: str) -> FrozenLinear:
    linear = resident(name)
    return replace(linear, weight=PlainWeight(stream.tensors(name)["weight"].view(linear.weight.shape)))


def _time(rank: Rank, model: SuperModel, batch: PackedBatch, look_up: Any, graphs: bool) -> float:
    model.passes.weights = look_up
    with _graphs(model, graphs):
        wait(rank.device)
        before = time.perf_counter()
        model.forward_backward(batch)
        wait(rank.device)
        return time.perf_counter() - before


@contextmanager
def _graphs(model: SuperModel, allowed: bool) -> Iterator[None]:
    """A hook in the decoder forbids graphs: they would not call it."""
    hook = None if allowed else model.base.decoder.register_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


# -- bytes alone -------------------------------------------------------------------------------------------------------------------------


def links(rank: Rank) -> None:
    """One layer's bytes into every GPU at once, one after another on a stream of their own: GB/s of what comes from peers, and of all."""
    num_bytes = (1 << 30) // rank.count if rank.device.type == "cuda" else 1 << 20
    peers = Peers(rank.sharing("links"))
    memory = open_peer_memory(num_bytes, peers, rank.device)
    memory.own.fill_(rank.number + 1)
    wait(rank.device)
    peers.exchange("filled", True)
    target = torch.empty(num_bytes * rank.count, dtype=torch.uint8, device=rank.device)

    def copy_all(source: LayerSource = memory) -> None:
        for offset in range(1, rank.count + 1):
            peer = (rank.number + offset) % rank.count
            source.read(peer, 0, target[peer * num_bytes : (peer + 1) * num_bytes])

    ways: dict[str, Callable[[], None]] = {"copies": copy_all}
    if open_process_group(rank, "gathers"):
        for name, copies_out in (("all-gather", False), ("all-gather, copied out", True)):
            ways[name] = partial(copy_all, Gathered(memory, rank.number, rank.count, copies_out))
    for name, way in ways.items():
        target.zero_()
        way()
        wait(rank.device)
        assert [int(target[peer * num_bytes]) for peer in range(rank.count)] == list(range(1, rank.count + 1)), (
            f"{name} brought other bytes"
        )
        peers.exchange(f"warm-{name}", True)
        before = time.perf_counter()
        for _ in range(20):
            way()
        wait(rank.device)
        taken = (time.perf_counter() - before) / 20
        rank.note(name, {"GB/s from peers": num_bytes * (rank.count - 1) / taken / 1e9, "ms": taken * 1e3, "bytes": target.numel()})
        peers.exchange(f"end-{name}", True)


# -- a rank that ends before the others ---------------------------------------------------------------------------------------------------


def early(rank: Rank) -> None:
    """Rank 0 ends, and the others read what it held, after it is gone."""
    num_bytes = 64 << 20 if rank.device.type == "cuda" else 1 << 20
    peers = Peers(rank.sharing("early"))
    memory = open_peer_memory(num_bytes, peers, rank.device)
    memory.own.fill_(rank.number + 1)
    wait(rank.device)
    peers.exchange("filled", True)
    if rank.number == 0:
        return
    while peers.is_alive(0):
        time.sleep(0.01)
    target = torch.empty_like(memory.own)
    for _ in range(20):
        memory.read(0, 0, target)
    wait(rank.device)
    rank.note("memory of a rank that has ended", "is still there" if bool((target == 1).all()) else "IS GONE")
