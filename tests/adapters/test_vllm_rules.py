"""Saved adapters by the rules that vLLM reads them by: which it takes with equal weights, and which not (docs/reference/files.md says so).

The rules are those of its `lora/peft_helper.py`, `lora_model.py` and `model_manager.py` of 2026: one rank limit and one scale from the
config, no modules_to_save, names that end in lora_A or lora_B, and of a mixture both parameters, the first as `experts.base_layer`.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.supermodel.test_experts import FAMILIES
from tests.tiny import make_model
from tlora.adapters.layout import AdapterLayout
from tlora.adapters.peft import save_adapter
from tlora.adapters.state import init_state
from tlora.job import LoraConfig
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

PREFIX, LARGEST_RANK = "base_model.model.", 16
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts"}
Weights = dict[str, Tensor]


def read_config(directory: Path) -> tuple[int, float]:
    """Rank and the one scale. Patterns, target_parameters and trainable_token_indices are passed over."""
    config = json.loads((directory / "adapter_config.json").read_text())
    rank, alpha = config["r"], config["lora_alpha"]
    assert config["target_modules"] is not None and not config["modules_to_save"] and not config["use_dora"] and config["bias"] == "none"
    assert rank <= LARGEST_RANK
    return rank, alpha / (rank**0.5 if config["use_rslora"] else rank)


def read_tensors(directory: Path) -> dict[str, dict[str, Tensor]]:
    """By module, of A and B."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(directory / "adapter_model.safetensors").items():
        module, _, end = key.removeprefix(PREFIX).rpartition(".lora_")
        if end not in ("A.weight", "B.weight"):
            raise ValueError(f"{key} is unsupported LoRA weight")
        assert ".base_layer" in module or module.rpartition(".")[2] in LINEARS, module
        found.setdefault(module, {})[end[0]] = tensor
    return found


def changes_of(directory: Path, experts: int = 0, by_rank: bool = False) -> Weights:
    """scale * B @ A by module; of experts [E, out, in]. `by_rank`: a model that does not say that its experts are of three dimensions, as
    gpt-oss does, has as many as rows of A are ranks of the config.
    """
    rank, scale = read_config(directory)
    changes: Weights = {}
    for module, parts in read_tensors(directory).items():
        a, b = parts["A"].double(), parts["B"].double()
        if "experts" in module:
            count = a.shape[0] // rank if by_rank else experts
            a, b = a.reshape(count, -1, a.shape[-1]), b.reshape(b.shape[0], -1, count).permute(2, 0, 1)
        changes[module] = scale * b @ a
    for module in [module for module in changes if module.endswith(".experts")]:
        assert f"{module}.base_layer" in changes, "both parameters of a block must be adapted"
    return changes


def own_changes(layout: AdapterLayout, params: Tensor) -> Weights:
    """The same from our state, by vLLM's names."""
    changes: Weights = {}
    for shape, a, b in layout.views(params.double()):
        block, _, end = shape.module.rpartition(".")
        split = (shape.experts, shape.rank, -1)
        product = b.view(split).transpose(1, 2) @ a.view(split) if shape.experts > 1 else b.t() @ a
        name = shape.module if shape.experts == 1 else block + (".base_layer" if end == "gate_up_proj" else "")
        changes[name] = shape.scale * product
    return changes


def save(model: Any, lora: LoraConfig, directory: Path) -> Weights:
    shared = SuperModel(make_base(model, "base"))
    layout = shared.layout(lora)
    params = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0)) if not lora.trainable_token_indices else None
    save_adapter(directory, layout, init_state(layout, 1, torch.float32).params if params is None else params, lora, "some/base")
    return {} if params is None else own_changes(layout, params)


def mixture(family: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family]), dtype=torch.float32)


def alike(found: Weights, true: Weights) -> bool:
    return found.keys() == true.keys() and all(torch.allclose(found[name], true[name], rtol=1e-6, atol=1e-9) for name in true)


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 8}}], ids=str)
def test_dense_adapters_are_read_as_they_are(changes: dict[str, Any], tmp_path: Path) -> None:
    """Also with ranks of their own, as long as all have one scale."""
    true = save(make_model("llama"), LoraConfig(r=4, lora_alpha=16, **changes), tmp_path)
    assert alike(changes_of(tmp_path), true)


def test_a_second_scale_is_not_seen(tmp_path: Path) -> None:
    true = save(make_model("llama"), LoraConfig(r=4, lora_alpha=16, rank_pattern={"q_proj": 2}), tmp_path)
    assert not alike(changes_of(tmp_path), true)


@pytest.mark.parametrize("rank", ["same", "divide"])
def test_experts_are_read_as_they_are(rank: str, tmp_path: Path) -> None:
    lora = LoraConfig(r=6, lora_alpha=16, target_parameters=BOTH, target_modules=["q_proj"], expert_rank=rank)  # type: ignore[arg-type]
    true = save(mixture("qwen3-moe"), lora, tmp_path)
    assert alike(changes_of(tmp_path, experts=8), true)


def test_experts_that_are_counted_by_rank_need_the_rank_of_the_config(tmp_path: Path) -> None:
    """gpt-oss."""
    lora = LoraConfig(r=6, lora_alpha=16, target_parameters=BOTH, target_modules=[])
    true = save(mixture("gpt-oss"), lora, tmp_path)
    assert alike(changes_of(tmp_path, by_rank=True), true)
    divided = save(mixture("gpt-oss"), lora.model_copy(update={"expert_rank": "divide"}), tmp_path)
    assert not any(
        change.shape == divided[module].shape for module, change in changes_of(tmp_path, by_rank=True).items()
    ), "it takes half as many experts"  # fmt: skip


def test_one_parameter_of_two_and_rows_of_the_embedding_are_not_taken(tmp_path: Path) -> None:
    save(mixture("qwen3-moe"), LoraConfig(r=6, target_parameters=BOTH[:1], target_modules=[]), tmp_path)
    with pytest.raises(AssertionError, match="both parameters"):
        changes_of(tmp_path, experts=8)
    save(make_model("llama"), LoraConfig(r=4, trainable_token_indices=[3]), tmp_path)
    with pytest.raises(ValueError, match="trainable_tokens_delta is unsupported LoRA weight"):
        changes_of(tmp_path)
