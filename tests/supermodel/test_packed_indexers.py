"""Packed checkpoints whose indexers (DeepSeek-V3.2) are packed too: adapters over them, in every place, and answers of sparse attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.numerics.test_indexed_attention import LATENT
from tests.numerics.test_indexed_attention import samples as tokens
from tests.supermodel import test_compressed_tensors_checkpoint as compressed_tensors
from tests.supermodel import test_gptq_awq_checkpoint as gptq_awq
from tests.supermodel import test_packed_checkpoint as bitsandbytes
from tests.supermodel.packed_bases import unpack
from tests.tiny import make_batch, make_model
from tlora.errors import ModelError
from tlora.job import LoraConfig, TrainConfig
from tlora.shape.stages import LayerRange
from tlora.sharing.host_memory import Streaming
from tlora.supermodel import assembly
from tlora.supermodel.held_linear import HeldLinear
from tlora.supermodel.indexers import find_indexers
from tlora.supermodel.load import Base, load_base, outline
from tlora.supermodel.shared_base import load_shared_base
from tlora.supermodel.stage_base import load_stage
from tlora.supermodel.supermodel import SuperModel

CPU = torch.device("cpu")
WIDTHS: dict[str, Any] = {
    "intermediate_size": 128,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 8,
    "index_n_heads": 8,
    "index_topk": 20,
}
Packed = tuple[Path, dict[str, Tensor]]
PACK: dict[str, tuple[torch.dtype, Callable[[Path, Path], Packed]]] = {
    "bitsandbytes": (torch.bfloat16, lambda plain, to: bitsandbytes.pack(plain, to, bnb_4bit_quant_type="nf4")),
    "compressed-tensors": (
        torch.bfloat16,
        lambda plain, to: compressed_tensors.pack(plain, to, compressed_tensors.ZERO | {"symmetric": True}),
    ),
    "gptq": (torch.float16, lambda plain, to: gptq_awq.pack(plain, to, gptq_awq.KINDS["gptq-32-v2"])),
    "awq": (torch.float16, lambda plain, to: gptq_awq.pack(plain, to, gptq_awq.KINDS["awq-32"])),
}


def made(form: str, directory: Path) -> tuple[str, str, list[str]]:
    """The packed checkpoint, the plain one that it stands for, and the packed linears of its indexers."""
    dtype, pack = PACK[form]
    model = make_model("deepseek-v3.2", dtype, **WIDTHS)
    for module in find_indexers(model).values():
        for parameter in module.parameters():
            parameter.data.mul_(4)
    model.save_pretrained(directory / "plain")
    packed, values = pack(directory / "plain", directory / "packed")
    inside = [name for name in values if ".indexer." in name]
    assert inside
    unpacked = unpack(packed, values, directory / "unpacked", dtype)
    return str(packed), str(unpacked), inside


def trained(base: Base) -> Tensor:
    shared = SuperModel(base, deterministic=True)
    shared.join("a", LoraConfig(r=4, target_modules=LATENT), TrainConfig(learning_rate=1e-2, lr_scheduler_type="constant", seed=1))
    shared.forward_backward(make_batch({"a": list(tokens(1, (1, 17, 20)))}))
    shared.optim_step(["a"])
    return shared.leave("a").params


def answer(base: Base) -> Tensor:
    """Longer than an indexer chooses."""
    base.model.set_attn_implementation("eager")
    ids = torch.arange(40, 50)[None]
    return base.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, eos_token_id=None)


@pytest.mark.parametrize("form", PACK)
def test_adapters_and_answers_are_those_over_the_checkpoint_that_it_stands_for(form: str, tmp_path: Path) -> None:
    packed, unpacked, inside = made(form, tmp_path)
    base, plain, counted = load_base(packed), load_base(unpacked), outline(packed)
    for name in inside:
        assert torch.equal(base.model.get_submodule(name).weight, plain.model.get_submodule(name).weight), name
    assert any(isinstance(module, HeldLinear) for module in base.model.modules())
    assert counted.num_parameters == base.num_parameters
    assert counted.num_bytes - base.num_bytes == outline(unpacked).num_bytes - plain.num_bytes  # a float16 family keeps some in float32
    assert torch.equal(trained(load_base(packed)), trained(load_base(unpacked)))
    assert torch.equal(answer(base), answer(plain))


def test_it_is_streamed_and_cut_into_stages(tmp_path: Path) -> None:
    packed, unpacked, inside = made("bitsandbytes", tmp_path)
    expected = load_base(unpacked)
    streamed = load_shared_base(packed, "auto", CPU, None, Streaming())
    stages = [load_stage(packed, "auto", CPU, None, LayerRange(first, first + 1, 2)) for first in (0, 1)]
    for name in inside:
        weight = expected.model.get_submodule(name).weight
        assert torch.equal(streamed.model.get_submodule(name).weight, weight), name
        assert torch.equal(stages[int(name.split(".")[2])].model.get_submodule(name).weight, weight), name
    assert torch.equal(trained(streamed), trained(expected))


def test_indexers_that_stay_without_their_numbers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before: packed tensors that belong nowhere."""
    packed, _, inside = made("bitsandbytes", tmp_path)
    monkeypatch.setattr(assembly, "in_indexer", lambda _: False)
    with pytest.raises(ModelError, match=f"{len(inside)} of its packed tensors are no linear layer's by themselves"):
        load_base(packed)
