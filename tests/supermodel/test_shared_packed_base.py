"""A base whose files are packed, streamed from the host's memory or shared by two ranks: the bytes of the same base on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.conftest import forked as forked
from tests.engine.conftest import tokenize_once as tokenize_once
from tests.engine.tiny_runs import job, run_spec, same_bytes, train, write_rows
from tests.kernels.interpreter import INTERPRETED_ALONE
from tests.sharing.ranks import Ranks, start_ranks, store_path
from tests.supermodel import test_compressed_tensors_checkpoint as compressed_tensors
from tests.supermodel import test_gptq_awq_checkpoint as gptq_awq
from tests.supermodel import test_packed_checkpoint as bitsandbytes
from tests.supermodel.packed_bases import save_plain, unpack
from tests.supermodel.test_shared_load import sharing
from tests.supermodel.test_shared_load import train as train_two_jobs
from tlora.engine.check import check
from tlora.errors import ModelError
from tlora.sharing.host_memory import Streaming
from tlora.supermodel.shared_base import load_shared_base
from tlora.supermodel.supermodel import SuperModel

pytestmark = INTERPRETED_ALONE


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with start_ranks(2) as found:
        yield found


Made = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Of a kind: a base of 3 layers, more than are on the device at a time, and the plain one that it stands for."""
    directory = tmp_path_factory.mktemp("packed")
    return cache(partial(make, directory))


def make(directory: Path, kind: str) -> tuple[Path, Path]:
    dtype = torch.float16 if kind in ("gptq", "awq") else torch.bfloat16
    shape = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    plain, target = save_plain(directory / f"{kind} plain", dtype, **shape), directory / kind
    match kind:
        case "bitsandbytes":
            base, values = bitsandbytes.pack(plain, target, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        case "zero points" | "a part":
            ignore = ("lm_head", "re:.*up_proj") if kind == "a part" else ("lm_head",)
            base, values = compressed_tensors.pack(plain, target, compressed_tensors.ZERO, ignore)
        case _:
            base, values = gptq_awq.pack(plain, target, gptq_awq.KINDS["gptq-64-asymmetric" if kind == "gptq" else "awq-32"])
    return base, unpack(base, values, directory / f"{kind} unpacked", dtype)


@pytest.mark.parametrize("kind", [pytest.param("zero points", marks=pytest.mark.slow), "awq"])
def test_adapters_over_a_streamed_base_are_those_over_the_checkpoint_that_it_stands_for(kind: str, packed: Made, tmp_path: Path) -> None:
    base, plain = packed(kind)
    data = str(write_rows(tmp_path / "d.jsonl", 16))
    jobs = [job("a", data, max_steps=2, lora_dropout=0.1), job("b", data, max_steps=2, r=9, target_modules=["q_proj", "down_proj"])]
    train(base, tmp_path / "streamed", jobs, deterministic=True, layout="streamed")
    train(plain, tmp_path / "plain", jobs, deterministic=True)
    same_bytes(tmp_path / "streamed", tmp_path / "plain", ("a", "b"))
    found, dense = (check(run_spec(each, tmp_path / "new", jobs, layout="streamed"), device="cpu") for each in (base, plain))
    assert not found.problems and found.base_bytes < dense.base_bytes


def check_bytes(rank: int, store: str, base: str, plain: str) -> None:
    """Each rank on samples of its own."""
    alone = SuperModel.from_pretrained(plain, "float32", deterministic=True)
    shared = SuperModel.from_pretrained(base, "float32", deterministic=True, shared=sharing(rank, store))
    assert all(p.is_meta for name, p in shared.model.named_parameters() if "_proj." in name), "a rank holds a layer's weight"
    assert train_two_jobs(shared, 2, rank) == train_two_jobs(alone, 2, rank)
    assert shared.fetches is not None and shared.fetches.layers > 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bitsandbytes", "a part", "gptq"])
def test_ranks_that_share_it_train_to_the_bytes_of_one_process(kind: str, packed: Made, ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(check_bytes, store_path(tmp_path), *map(str, packed(kind)))


def load_streamed(base: Path, **settings: Any) -> None:
    load_shared_base(str(base), "auto", torch.device("cpu"), settings.get("base_precision"), Streaming())


def test_packed_tensors_out_of_layers_are_refused(packed: Made, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for file in packed("gptq")[0].iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    tensors = load_file(base / "model.safetensors")
    found, _ = gptq_awq.packed_tensors(tensors.pop("lm_head.weight"), gptq_awq.KINDS["gptq-64-asymmetric"])
    save_file(tensors | {f"lm_head.{end}": tensor for end, tensor in found.items()}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="1 of its packed tensors are no linears of decoder layers, lm_head.weight first"):
        load_streamed(base)
