"""A base that two processes share: the bits of a base that one process holds, with fewer slots than layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore

from bench.shared_models import share_model
from tests.kernels.interpreter import INTERPRETED_ALONE, interpret
from tests.sharing.ranks import Ranks, start_ranks, store_path
from tests.tiny import make_model, make_samples
from tlora.adapters.state import init_state
from tlora.job import BasePrecision, LoraConfig, TrainConfig
from tlora.objectives import Dpo
from tlora.planning.memory import bytes_when_shared
from tlora.planning.memory_probe import _storage_bytes
from tlora.sharing.peers import Sharing
from tlora.supermodel import supermodel
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.head_input import find_head
from tlora.supermodel.held_linear import hold
from tlora.supermodel.inject import find_linears
from tlora.supermodel.load import Base, make_base
from tlora.supermodel.supermodel import SuperModel

pytestmark = INTERPRETED_ALONE
CPU = torch.device("cpu")
LORA = {"a": LoraConfig(r=4), "b": LoraConfig(r=20, lora_dropout=0.2, target_modules=["q_proj", "down_proj"])}
TRAIN = TrainConfig(learning_rate=1e-2, lr_scheduler_type="constant")
SHAPE = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}  # rows are whole groups of NF4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with start_ranks(2) as found:
        yield found


def make_super_model(fast: bool, precision: BasePrecision | None, sharing: Sharing | None) -> SuperModel:
    model = make_model("llama-tied", **SHAPE)
    with pytest.MonkeyPatch.context() as patch:
        if fast:
            interpret(patch)
        else:
            patch.setattr(supermodel, "why_not_fused", lambda *_: "this test takes the plain path")
        if sharing is not None:
            base = share_model(model, "tiny", sharing, CPU, precision)
        else:
            if precision is not None:
                hold(model, list(find_linears(model)), CPU, precision)
            base = make_base(model, "tiny")
        found = SuperModel(base, deterministic=True)
    assert (found.fast_path is not None) == fast
    for job_id, lora in LORA.items():
        state = init_state(found.layout(lora), ord(job_id), torch.float32, CPU)
        noise = torch.randn(state.params.shape, generator=torch.Generator().manual_seed(ord(job_id)))
        found.join(job_id, lora, TRAIN, state=replace(state, params=state.params + 0.05 * noise))
    return found


def batch_of(job_ids: str, seed: int) -> PackedBatch:
    rows = []
    for job_id in job_ids:
        samples = make_samples(2, seed=seed + ord(job_id), low=8, high=8)
        rows += [BatchRow(job_id, s.input_ids, s.loss_weights, 7.0, (ord(job_id), seed, i)) for i, s in enumerate(samples)]
    return collate(rows, CPU, 48)


def pair_of(seed: int) -> PackedBatch:
    pair = make_samples(2, seed=seed, low=6, high=12)
    ids, weights = (torch.cat([torch.from_numpy(getattr(s, key)) for s in pair]).numpy() for key in ("input_ids", "loss_weights"))
    return collate([BatchRow("b", ids, weights, 1.0, (1, 2, seed), tuple(len(s.input_ids) for s in pair))], CPU)


def run_passes(model: SuperModel, seed: int, micro_batches: int) -> list[Tensor]:
    """Losses and adapters of all that reads base weights: whole passes, and open ones in both orders, of which one has a reference pass,
    with an evaluation between.
    """
    found = list[Tensor]()
    for number in range(micro_batches):
        found += [loss.loss_sum for loss in model.forward_backward(batch_of("ab", seed + number)).values()]
    for order in ((0, 1), (1, 0)) if micro_batches else ():
        found += run_open_passes(model, seed, order)
    return [*found, *adapters(model)]


def run_open_passes(model: SuperModel, seed: int, order: tuple[int, int]) -> list[Tensor]:
    passes = [model.begin(pair_of(seed), {"b": Dpo(0.3)}), model.begin(batch_of("b", seed + 9))]
    found = [loss.loss_sum for one in passes for loss in one.forward().values()]
    found += [loss.loss_sum for loss in model.evaluate(batch_of("a", seed + 8)).values()]
    for i in order:
        passes[i].backward()
    return found


def adapters(model: SuperModel) -> list[Tensor]:
    model.optim_step("ab")
    return [model.state(job_id).params for job_id in "ab"]


class Poisoned:
    """The memory of all ranks. Before a layer comes into a slot, the slot holds NaN: whoever reads too early or too late shows it."""

    def __init__(self, model: SuperModel) -> None:
        assert model.base.layers is not None
        self._memory, self._layers = model.base.layers._memory, model.base.layers
        self._layers._memory = self
        self.own = self._memory.own
        self.reads = 0

    def read(self, peer: int, start: int, target: Tensor) -> None:
        slot = next(s for s in self._layers._slots if s.bytes.untyped_storage().data_ptr() == target.untyped_storage().data_ptr())
        if self.reads % self._layers.layout.world_size == 0:
            slot.bytes.fill_(255)
        self.reads += 1
        self._memory.read(peer, start, target)


def check(streamed: SuperModel, true: list[Tensor], found: list[Tensor], reads: int) -> None:
    assert len(true) == len(found)
    assert all(bool(a.isfinite().all()) and torch.equal(a, b) for a, b in zip(true, found, strict=True))
    assert all(m.weight.is_meta for m in streamed._linears.values()), "a rank holds a layer's weight"
    assert streamed.base.layers is not None
    stats = streamed.base.layers.stats()
    assert stats.exposed_seconds > 0 and stats.bytes == stats.layers * streamed.base.layers.layout.slot_bytes
    assert reads > 2 * streamed.base.layers.layout.world_size, "no slot was used twice"


def check_plain_path(rank: int, store: str, precision: BasePrecision | None) -> None:
    """One rank has seven times as many micro-batches as the other."""
    resident, streamed = make_super_model(False, precision, None), make_super_model(False, precision, Sharing(FileStore(store, 2), rank, 2))
    poisoned, micro_batches = Poisoned(streamed), 1 if rank else 7
    true, found = (run_passes(model, 10 * rank, micro_batches) for model in (resident, streamed))
    check(streamed, true, found, poisoned.reads)


def check_kernels(rank: int, store: str, precision: BasePrecision | None, recomputed_layers: int) -> None:
    resident, streamed = make_super_model(True, precision, None), make_super_model(True, precision, Sharing(FileStore(store, 2), rank, 2))
    poisoned = Poisoned(streamed)
    resident.recomputed_layers = streamed.recomputed_layers = recomputed_layers
    found: list[list[Tensor]] = []
    with torch.compiler.set_stance("force_eager"):
        for model in (resident, streamed):
            if precision is not None:
                losses = [loss.loss_sum for loss in model.forward_backward(batch_of("b", rank)).values()]
            else:
                losses = run_open_passes(model, rank, (rank, 1 - rank))
            found.append([*losses, *adapters(model)])
    check(streamed, *found, poisoned.reads)


@pytest.mark.parametrize("precision", [None, pytest.param("fp8", marks=pytest.mark.slow), "nf4"])
def test_streamed_layers_give_the_bits_of_resident_ones(precision: BasePrecision | None, ranks: Ranks, tmp_path: Path) -> None:
    """Two slots for three layers; on other samples on each rank, none of which waits for the other."""
    ranks.run(check_plain_path, store_path(tmp_path), precision)


@pytest.mark.parametrize(
    ("precision", "recomputed_layers"),
    [pytest.param(None, 1, marks=pytest.mark.soak), ("fp8", 2), pytest.param("nf4", 1, marks=pytest.mark.slow)],
)
def test_so_do_they_on_the_kernels_with_layers_that_are_computed_again(
    precision: BasePrecision | None, recomputed_layers: int, ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(check_kernels, store_path(tmp_path), precision, recomputed_layers)


def check_memory(rank: int, store: str, precision: BasePrecision | None) -> None:
    """What is predicted from an outline is what a rank holds."""
    streamed = make_super_model(False, precision, Sharing(FileStore(store, 2), rank, 2))
    model = make_model("llama-tied", **SHAPE)
    if precision is not None:
        hold(model, list(find_linears(model)), CPU, precision)
    base_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    model.to("meta")
    predicted = bytes_when_shared(SuperModel(Base(model, model.model, find_head(model, "tiny"), "tiny")), base_bytes, 2)
    parameters = {p.data_ptr(): p.numel() * p.element_size() for p in streamed.model.parameters() if not p.is_meta}
    assert streamed.base.layers is not None
    assert predicted == sum(parameters.values()) + streamed.base.layers.held_bytes
    buffers = [b.numel() * b.element_size() for b in streamed.model.buffers()]
    assert _storage_bytes(streamed) == predicted + sum(buffers)


@pytest.mark.parametrize("precision", [None, "fp8", "nf4"])
def test_the_memory_of_a_rank_is_predicted_and_counted(precision: BasePrecision | None, ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(check_memory, store_path(tmp_path), precision)
