"""A base whose files hold more than its model takes, and a config.json that makes no model."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, GPT2Config, GPTNeoXConfig, PretrainedConfig

from tests.engine.tiny_runs import job, run_spec, save_base, train, write_rows
from tests.tiny import FAMILIES, SHAPE, make_model
from tlora.engine.check import check
from tlora.engine.generate import Sampling, generate, open_adapter
from tlora.engine.watcher import Watcher
from tlora.engine.worker_base import load_base
from tlora.errors import ModelError
from tlora.live.cluster_run import train_on_cluster
from tlora.service.base_shapes import Precision, find_outline
from tlora.supermodel.load import load_config
from tlora.supermodel.weight_files import check_unused, check_weights
from tlora.worker_protocol import Load

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


@pytest.fixture(params=["safetensors", pytest.param("bin", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    """Of the weight files."""
    return request.param


def save(directory: Path, family: str | PretrainedConfig, more: list[str], kind: str = "safetensors") -> str:
    """A base whose file has `more` tensors."""
    model: Any = make_model(family) if isinstance(family, str) else AutoModelForCausalLM.from_config(family)
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    save_file(load_file(path) | {name: torch.ones(4, 4) for name in more}, path, metadata={"format": "pt"})
    return str(pickled(directory) if kind == "bin" else directory)


def pickled(base: Path) -> Path:
    """The base with its weights in a file of `torch.save`."""
    path = base / "model.safetensors"
    torch.save(load_file(path), base / "pytorch_model.bin")
    path.unlink()
    return base


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if number % 3 else []) for number, name in enumerate(FAMILIES)]
)
def test_a_base_as_it_was_saved_leaves_nothing_out(family: str, kind: str, tmp_path: Path) -> None:
    base = save(tmp_path, family, [], kind)
    assert check_weights(base, load_config(base)) is None
    assert check_unused(base, load_config(base), "refuse") == []


def test_files_that_have_changed_are_compared_anew(tmp_path: Path) -> None:
    base = save(tmp_path, "llama", [])
    assert check_weights(base, load_config(base)) is None
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors | {"model.morn.weight": norm}, path, {"format": "pt"})  # as large as before
    with pytest.raises(ModelError, match=r"1 tensor is missing or of another shape, model\.norm\.weight first"):
        check_weights(base, load_config(base))
    save_file(tensors | {"model.norm.weight": norm}, path, {"format": "pt"})
    config = load_config(base)
    assert check_unused(base, config, "refuse") == []
    config.num_hidden_layers -= 1
    with pytest.raises(ModelError, match="tensors of its files are not used"):
        check_unused(base, config, "refuse")


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"]),
        ("llama-tied", ["lm_head.weight"]),
        (GPTNeoXConfig(**SHAPE), ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.masked_bias"]),
        (GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=131), ["h.0.attn.bias", "transformer.h.1.attn.masked_bias"]),
    ],
    ids=["llama", "llama-tied", "gpt-neox", "gpt2"],
)
def test_leftovers_of_no_meaning_are_nothing_to_say(family: Any, more: list[str], tmp_path: Path) -> None:
    base = save(tmp_path, family, more if family != "llama-tied" else [])
    if family == "llama-tied":
        path = tmp_path / "model.safetensors"
        tensors = load_file(path)
        save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path, metadata={"format": "pt"})
    assert check_unused(base, load_config(base), "refuse") == []


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
def test_layers_that_predict_several_tokens_and_other_modalities_are_said(family: Any, more: list[str], kind: str, tmp_path: Path) -> None:
    base = save(tmp_path, family, more, kind)
    [line] = check_unused(base, load_config(base), "refuse")
    count, verb = ("1 tensor", "is") if len(more) == 1 else (f"{len(more)} tensors", "are")
    assert line == f"{count} of {base} {verb} not part of the model that is used, {min(more)} first"


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
def test_what_such_a_model_would_use_is_refused_unless_it_is_meant(family: Any, more: list[str], kind: str, tmp_path: Path) -> None:
    base = save(tmp_path, family, more, kind)
    with pytest.raises(ModelError, match=rf"1 tensor of its files is not used, {re.escape(more[0])} first.*unused_weights: ignore"):
        check_unused(base, load_config(base), "refuse")
    assert check_unused(base, load_config(base), "ignore") == [f"1 tensor of {base} is not part of the model that is used, {more[0]} first"]


@pytest.fixture
def jobs(tmp_path: Path) -> list[dict[str, Any]]:
    return [job("a", str(write_rows(tmp_path / "rows.jsonl", 6)), max_steps=1)]


def changed(base: Path, **config: Any) -> Path:
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return base


WORDS = "9 tensors of its files are not used, model.layers.1.input_layernorm.weight first: its config.json has num_hidden_layers 1"
LEFT = "9 tensors of {} are not part of the model that is used, model.layers.1.input_layernorm.weight first"


@pytest.fixture
def shallow(kind: str, tmp_path: Path) -> Path:
    """A base of two layers, and of one by its config.json."""
    base = changed(save_base(tmp_path / "base", num_hidden_layers=2), num_hidden_layers=1)
    return pickled(base) if kind == "bin" else base


def test_a_base_with_fewer_layers_than_its_files_is_trained_on_a_word_only(
    shallow: Path, jobs: list[dict[str, Any]], tmp_path: Path
) -> None:
    run = run_spec(shallow, tmp_path / "out", jobs)
    [problem] = check(run, device="cpu").problems
    assert WORDS in problem
    with pytest.raises(ModelError, match=re.escape(WORDS)):
        train(shallow, tmp_path / "out", jobs)
    with pytest.raises(ModelError, match=re.escape(WORDS)):
        train_on_cluster(run, device="cpu")
    notes: list[str] = []
    results = train(shallow, tmp_path / "meant", jobs, unused_weights="ignore", watcher=Watcher(note=notes.append))  # the remedy
    assert results["a"].status == "done" and notes.count(LEFT.format(shallow)) == 1
    assert LEFT.format(shallow) in check(run.model_copy(update={"unused_weights": "ignore"}), device="cpu").warnings


@pytest.mark.slow
def test_its_adapter_answers_on_a_word_only(shallow: Path, jobs: list[dict[str, Any]], tmp_path: Path) -> None:
    train(shallow, tmp_path / "out", jobs, unused_weights="ignore")
    adapter = tmp_path / "out" / "a"
    assert LEFT.format(shallow) in open_adapter(adapter).notes, "the run has said the word"
    alone = Path(shutil.copytree(adapter, tmp_path / "alone"))
    with pytest.raises(ModelError, match=rf"{re.escape(WORDS)}.*or give --unused-weights ignore if this is meant"):
        generate(alone, ["red"], base_model=str(shallow))
    told = open_adapter(alone, base_model=str(shallow), unused_weights="ignore").notes  # the remedy
    assert LEFT.format(shallow) in told
    assert generate(alone, ["red"], base_model=str(shallow), sampling=Sampling(4), unused_weights="ignore") == generate(
        adapter, ["red"], sampling=Sampling(4)
    )


def test_a_worker_and_a_server_ask_for_the_word(shallow: Path, tmp_path: Path) -> None:
    load, notes = Load(str(shallow), str(tmp_path / "out"), "cpu", 0.0), list[str]()
    remedy = "set unused_weights: ignore in the server's settings"
    with pytest.raises(ModelError, match=rf"{re.escape(WORDS)}.*or {remedy}"):
        load_base(load, (), None, notes.append)
    load_base(replace(load, unused_weights="ignore"), (), None, notes.append)
    assert LEFT.format(shallow) in notes
    with pytest.raises(ModelError, match=rf"{re.escape(WORDS)}.*or {remedy} if this is meant"):
        find_outline(tmp_path / "bases", str(shallow), Precision(device="cpu"))
    outline = find_outline(tmp_path / "bases", str(shallow), Precision(device="cpu", unused_weights="ignore"))
    assert outline.notes == (LEFT.format("the base"),), "a tenant does not see where it lies"
