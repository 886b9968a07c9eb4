"""Mixtures whose layers are shared by processes or streamed: experts are rows of a layer as linears are, with the bytes of a base of one's
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from torch.distributed import FileStore

from tests.cases import in_every_run
from tests.kernels.interpreter import INTERPRETED_ALONE
from tests.planted import planted
from tests.sharing.ranks import Ranks, start_ranks, store_path
from tests.supermodel import test_expert_targets as targets
from tests.supermodel.mxfp4_bases import pack
from tlora.job import TrainConfig
from tlora.planning import memory
from tlora.planning.memory import bytes_when_shared, bytes_when_streamed, can_be_cut
from tlora.sharing.host_memory import Streaming
from tlora.sharing.peers import Sharing
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.held_experts import HeldExperts
from tlora.supermodel.load import outline
from tlora.supermodel.shared_base import held_in_parts
from tlora.supermodel.supermodel import SuperModel

pytestmark = INTERPRETED_ALONE
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of three layers, as there are two slots."""
    directory, sizes = tmp_path_factory.mktemp("bases"), targets.SIZE | {"num_hidden_layers": 3}
    three = transformers.GptOssConfig(**sizes, head_dim=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
    with patch.dict(targets.FAMILIES, {"gpt-oss": three}):
        pack(targets.make_model("gpt-oss", torch.float32), directory / "plain", directory / "packed")
    return {kind: directory / kind for kind in ("plain", "packed")}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with start_ranks(2) as found:
        yield found


def load(directory: Path | str, shared: Sharing | Streaming | None = None) -> SuperModel:
    return SuperModel.from_pretrained(str(directory), "float32", deterministic=True, shared=shared)


def check_bytes(shared: SuperModel, directory: Path | str, job_ids: str, alone: str, steps: int = 2) -> None:
    """Together with a job at attention alone, and those of `alone` by themselves; over a plain base of one's own the job at attention takes
    transformers' products.
    """
    names = [name for name, module in shared.model.named_modules() if isinstance(module, HeldExperts)]
    assert len(names) == 6 and all(p.is_meta for name in names for p in shared.model.get_submodule(name).parameters())
    together, expected = targets.train(shared, "abc", steps), targets.train(load(directory), "abc", steps)
    for job_id in job_ids:
        assert torch.equal(together[job_id], expected[job_id]), job_id
    for job_id in alone:
        assert torch.equal(targets.train(shared, job_id, steps)[job_id], together[job_id]), job_id
    assert shared.fetches is not None and shared.fetches.layers > 8


@pytest.mark.parametrize("adapts_experts", [False, True], ids=["attention", "experts"])
@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_what_a_pass_over_it_keeps_is_what_is_counted(kind: str, adapts_experts: bool, bases: dict[str, Path]) -> None:
    """Before it is loaded, of the plain base that it will be in parts; which is then what it was, with layers that a GPU compiles."""
    counted = SuperModel(outline(str(bases[kind]), "float32"))
    shared = SuperModel.from_pretrained(str(bases[kind]), "float32", shared=Streaming())
    lora = memory._probe_lora(counted, 16, adapts_experts)
    for model in (counted, shared):
        model.join("a", lora, TrainConfig(max_steps=1))
    with held_in_parts(counted.model):
        expected = memory._saved_bytes(counted, "a", 64, CPU)
    kept: dict[int, torch.Tensor] = {}
    own = {t.untyped_storage()._cdata for t in (*shared.model.parameters(), *shared.model.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    batch = collate([BatchRow("a", np.arange(64, dtype=np.int32), np.ones(64, np.float32))], "cpu")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        shared.plain_path.decode(batch, shared.passes.weights, shared.bank, {}, True)
    assert sum(tensor.untyped_storage().nbytes() for number, tensor in kept.items() if number not in own) == expected
    counted.leave("a")
    whole, apart = (count(counted, 0, GPU, 16, adapts_experts) for count in (memory.measure, memory.measure_in_parts))
    assert (whole.num_layers, apart.num_layers) == (3 if kind == "plain" else 0, 0)
    assert memory.may_be_cut(counted) and not can_be_cut(counted), "by order alone"
    alone = SuperModel(outline(str(bases[kind]), "float32"), deterministic=True)
    assert memory.takes_fast_path(alone) == (kind == "plain"), "a deterministic run over plain ones is compiled too"


@pytest.mark.parametrize(("kind", "job_ids"), in_every_run([("plain", "ab"), ("packed", "abc")], 1))
def test_a_streamed_mixture_trains_to_the_bytes_of_one_process(kind: str, job_ids: str, bases: dict[str, Path]) -> None:
    shared, counted = load(bases[kind], Streaming()), SuperModel(outline(str(bases[kind]), "float32"))
    check_bytes(shared, bases[kind], job_ids, alone=job_ids)
    assert shared.base.layers is not None
    layout, found = shared.base.layers.layout, bytes_when_streamed(counted, counted.base.num_bytes, CPU)
    assert (found.host_bytes, found.layer_bytes, found.num_layers) == (layout.rank_bytes, layout.slot_bytes, 3)


def check_on_rank(rank: int, store: str, directory: str, job_ids: str) -> None:
    check_bytes(load(directory, Sharing(FileStore(store, 2), rank, 2)), directory, job_ids, alone="a", steps=1)


@pytest.mark.parametrize(("kind", "job_ids"), in_every_run([("plain", "ab"), ("packed", "abc")], 1))
def test_ranks_that_share_it_train_to_the_bytes_of_one_process(
    kind: str, job_ids: str, bases: dict[str, Path], ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(check_on_rank, store_path(tmp_path), str(bases[kind]), job_ids)


def test_it_is_counted_and_chosen_by_order_alone(bases: dict[str, Path]) -> None:
    model = SuperModel(outline(str(bases["plain"]), "float32"))
    whole = model.base.num_bytes
    assert not can_be_cut(model) and bytes_when_shared(model, whole, 4) < whole


def test_planted_another_experts_rows_are_caught(bases: dict[str, Path]) -> None:
    healthy = HeldExperts.__getitem__

    def next_one(self: HeldExperts, expert: int) -> torch.Tensor:
        return healthy(self, (int(expert) + 1) % self.shape[0])

    shared = load(bases["plain"], Streaming())
    with planted((HeldExperts, "__getitem__", next_one)), pytest.raises(AssertionError):
        check_bytes(shared, bases["plain"], "ab", alone="ab")
