"""A base whose files hold more than its model takes, and a config.json that makes no model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, PretrainedConfig

from tests.engine.tiny_runs import job, run_spec, save_base, train, write_rows
from tests.tiny import FAMILIES, SHAPE, make_model
from tlora.engine.check import check
from tlora.engine.watcher import Watcher
from tlora.errors import ModelError
from tlora.supermodel.load import load_config
from tlora.supermodel.weight_files import check_unused

LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
DEEPSEEK = DeepseekV3Config(**{**SHAPE, **LATENT, **EXPERTS, "num_key_value_heads": 4}, first_k_dense_replace=1)
GLM = Glm4MoeConfig(**SHAPE, **EXPERTS, head_dim=16, first_k_dense_replace=1, num_nextn_predict_layers=1)


def save(directory: Path, family: str | PretrainedConfig, more: list[str]) -> str:
    """A base whose file has `more` tensors."""
    model: Any = make_model(family) if isinstance(family, str) else AutoModelForCausalLM.from_config(family)
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    save_file(load_file(path) | {name: torch.ones(4, 4) for name in more}, path, metadata={"format": "pt"})
    return str(directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_as_it_was_saved_leaves_nothing_out(family: str, tmp_path: Path) -> None:
    base = save(tmp_path, family, [])
    assert check_unused(base, load_config(base), False) == []


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"]),
        ("llama-tied", ["lm_head.weight"]),
    ],
)
def test_leftovers_of_no_meaning_are_nothing_to_say(family: str, more: list[str], tmp_path: Path) -> None:
    base = save(tmp_path, family, more if family == "llama" else [])
    if family == "llama-tied":
        path = tmp_path / "model.safetensors"
        tensors = load_file(path)
        save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path, metadata={"format": "pt"})
    assert check_unused(base, load_config(base), False) == []


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", ["mtp.layers.0.eh_proj.weight"]),
        ("llama", ["model.vision_tower.blocks.0.attn.q_proj.weight", "multi_modal_projector.linear_1.weight"]),
        ("llama", ["visual.blocks.0.attn.qkv.weight"]),
        (DEEPSEEK, ["model.layers.61.eh_proj.weight", "model.layers.61.enorm.weight"]),  # transformers' own list
        (GLM, ["model.layers.2.eh_proj.weight"]),  # one layer after the last, by its config
    ],
    ids=["mtp", "tower", "visual", "deepseek-v3", "glm4-moe"],
)
def test_layers_that_predict_several_tokens_and_other_modalities_are_said(family: Any, more: list[str], tmp_path: Path) -> None:
    base = save(tmp_path, family, more)
    [line] = check_unused(base, load_config(base), False)
    assert line == f"{len(more)} tensors of {base} are not part of the model that is trained, {min(more)} first"


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", ["model.layers.2.mlp.up_proj.weight"]),
        ("llama", ["model.layers.0.self_attn.q_proj.bias"]),
        ("llama", ["lm_head.bias"]),
        (DEEPSEEK, ["model.layers.3.mlp.gate.weight"]),
    ],
    ids=["a layer", "a bias", "of the head", "deepseek-v3"],
)
def test_what_such_a_model_would_use_is_refused_unless_it_is_meant(family: Any, more: list[str], tmp_path: Path) -> None:
    base = save(tmp_path, family, more)
    with pytest.raises(ModelError, match=rf"1 tensors of its files are not used, {re.escape(more[0])} first.*unused_weights: ignore"):
        check_unused(base, load_config(base), False)
    assert check_unused(base, load_config(base), True) == [
        f"1 tensors of {base} are not part of the model that is trained, {more[0]} first"
    ]


@pytest.fixture
def jobs(tmp_path: Path) -> list[dict[str, Any]]:
    return [job("a", str(write_rows(tmp_path / "rows.jsonl", 6)), max_steps=1)]


def changed(base: Path, **config: Any) -> Path:
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return base


def test_a_base_with_fewer_layers_than_its_files_is_trained_on_a_word_only(jobs: list[dict[str, Any]], tmp_path: Path) -> None:
    base = changed(save_base(tmp_path / "base", num_hidden_layers=2), num_hidden_layers=1)
    words = "9 tensors of its files are not used, model.layers.1.input_layernorm.weight first: its config.json has num_hidden_layers 1"
    [problem] = check(run_spec(base, tmp_path / "out", jobs), device="cpu").problems
    assert words in problem
    with pytest.raises(ModelError, match=re.escape(words)):
        train(base, tmp_path / "out", jobs)
    notes: list[str] = []
    results = train(base, tmp_path / "meant", jobs, unused_weights="ignore", watcher=Watcher(note=notes.append))  # the remedy
    assert results["a"].status == "done" and sum("9 tensors of" in note for note in notes) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "its config.json cannot be read: holds a list, not an object"),
        ("{", "its config.json cannot be read"),
        ('{"model_type": "llama", "num_hidden_layers": 10000000}', "its config.json has num_hidden_layers 10000000, and at most 4096"),
        ('{"model_type": "gemma3", "text_config": {"num_hidden_layers": 1e9}}', "has num_hidden_layers 1000000000.0, and at most 4096"),
        ('{"model_type": "mixtral", "num_local_experts": 10000000}', "has num_local_experts 10000000, and at most 4096"),
    ],
)
def test_a_config_that_makes_no_model_is_one_message(content: str, words: str, jobs: list[dict[str, Any]], tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    (base / "config.json").write_text(content)
    [problem] = check(run_spec(base, tmp_path / "out", jobs), device="cpu").problems
    assert words in problem
    with pytest.raises(ModelError, match=re.escape(words)):
        train(base, tmp_path / "out", jobs)
