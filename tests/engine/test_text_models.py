"""Bases with other modalities: their text model is trained, its adapters have the names of the whole model, and PEFT loads them into it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from bench.families import families, look, tiny
from bench.timm_towers import small_towers
from tests.data.chat_templates import CHATML, make_tokenizer
from tests.engine.test_train import our_logits
from tests.engine.tiny_runs import job, train, write_rows
from tests.tiny import SHAPE
from tlora.errors import ModelError
from tlora.supermodel.load import hidden_states, load_base, load_config, outline
from tlora.supermodel.text_model import other_parameters
from tlora.supermodel.weight_files import check_unused

TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
SMALL_TOWER = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
FAMILIES: dict[str, Any] = {
    "gemma3": lambda text: transformers.Gemma3Config(text_config=text, vision_config=TOWER, mm_tokens_per_image=4, image_token_index=5),
    "gemma4": lambda text: transformers.Gemma4Config(
        text_config={**text, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": text["vocab_size"]},
        vision_config={**TOWER, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "llama4": lambda text: transformers.Llama4Config(
        text_config={
            **text,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "moe_layers": [1],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 16,
        },
        vision_config={**TOWER, "num_hidden_layers": 1, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "mistral3": lambda text: transformers.Mistral3Config(
        text_config={"model_type": "mistral", **text}, vision_config={"model_type": "pixtral", **TOWER, "head_dim": 16}
    ),
    "qwen3-vl": lambda text: transformers.Qwen3VLConfig(
        text_config={**text, "rope_parameters": ROPE}, vision_config={**SMALL_TOWER, "deepstack_visual_indexes": [0]}
    ),
    "gemma3n": lambda text: transformers.Gemma3nConfig(
        text_config={
            **text,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "vocab_size_per_layer_input": text["vocab_size"] - 8,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
        },
        vision_config={"hidden_size": 32, "vocab_size": 4, "vocab_offset": text["vocab_size"] - 8},
        audio_config={"hidden_size": 32, "vocab_size": 4, "vocab_offset": text["vocab_size"] - 4, "conf_num_hidden_layers": 1},
    ),
    "fast-vlm": lambda text: transformers.FastVlmConfig(
        text_config={"model_type": "qwen2", **text}, vision_config={"model_type": "timm_wrapper", "hidden_size": 32}
    ),
    "qwen2.5-vl": lambda text: transformers.Qwen2_5_VLConfig(text_config={**text, "rope_parameters": ROPE}, vision_config=SMALL_TOWER),
}
IN_EVERY_RUN = ("gemma3", "gemma3n", "mistral3")
PARTS = ("model.language_model", "language_model.model", "model.embed_vision", "model.embed_audio")
PREFIXES = tuple(f"base_model.model.{part}." for part in PARTS)
"""The second is Llama 4's, the last two Gemma 3n's, whose own forward looks up all tokens there too."""


@pytest.fixture(autouse=True)
def without_timm() -> Iterator[None]:
    with small_towers():
        yield


def save_base(directory: Path, family: str) -> Path:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(directory)
    config = FAMILIES[family]({**SHAPE, "vocab_size": len(tokenizer) + 3, "head_dim": 16})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3) if p.ndim > 1 else p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("family", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow) for name in FAMILIES])
def test_the_text_model_is_trained_and_peft_loads_its_adapters_into_the_whole(family: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", family)
    rows = str(write_rows(tmp_path / "rows.jsonl", 8))
    jobs = [job("all", rows, max_steps=3, target_modules="all-linear"), job("two", rows, max_steps=3, target_modules=["q_proj", "v_proj"])]
    assert all(result.status == "done" for result in train(base, tmp_path / "out", jobs).values())
    ids = torch.arange(10, 40)
    for name in ("all", "two"):
        tensors = load_file(tmp_path / "out" / name / "adapter_model.safetensors")
        assert tensors and all(key.startswith(PREFIXES) for key in tensors)
        whole = transformers.AutoModelForImageTextToText.from_pretrained(base)
        with torch.no_grad():
            plain = whole(input_ids=ids[None]).logits[0]
            adapted = peft.PeftModel.from_pretrained(whole, tmp_path / "out" / name)
            logits = adapted(input_ids=ids[None]).logits[0]
        assert {key for key in adapted.state_dict() if "lora_" in key} == {key.replace(".weight", ".default.weight") for key in tensors}
        torch.testing.assert_close(our_logits(base, tmp_path / "out" / name, ids), logits, rtol=1e-4, atol=1e-4)
        assert float((logits - plain).norm()) > 1e-2 * float(plain.norm())


def test_weights_of_other_modalities_are_let_go_and_said(tmp_path: Path) -> None:
    base = save_base(tmp_path, "gemma3")
    whole = transformers.AutoModelForImageTextToText.from_pretrained(base)
    for model in (load_base(str(base)).model, outline(str(base)).model):
        left = {name for name, _ in model.named_parameters()}
        assert left and all(name.startswith(("model.language_model.", "lm_head.")) for name in left)
        assert {name for name, _ in whole.named_parameters()} - left == set(other_parameters(whole))
        assert {name for name, _ in model.named_modules()} == {name for name, _ in whole.named_modules()}, "names that PEFT would match"
    [line] = check_unused(str(base), load_config(str(base)), "refuse")
    assert f"{len(other_parameters(whole))} tensors of" in line and "model.multi_modal_projector." in line


def test_what_a_pass_over_text_runs_besides_is_kept_and_run(tmp_path: Path) -> None:
    """Gemma 3n looks tokens up in embeddings of images and sound: also rows that have such tokens see its own."""
    base = load_base(str(save_base(tmp_path, "gemma3n")))
    assert base.whole_model and outline(str(tmp_path)).whole_model
    left = {name for name, _ in base.model.named_parameters()}
    assert "model.embed_vision.embedding.weight" in left and not any("tower" in name for name in left)
    whole, ids = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path), torch.arange(base.vocab_size - 12, base.vocab_size)
    with torch.no_grad():
        hidden_TH = hidden_states(base, ids, torch.arange(12), (12,))
        torch.testing.assert_close(base.head.logits(hidden_TH), whole(input_ids=ids[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_the_text_model_of_one_that_leaves_its_scale_out_is_saved_as_the_docs_say(tmp_path: Path) -> None:
    whole: Any = transformers.AutoModelForImageTextToText.from_config(tiny(transformers.AyaVisionConfig))
    whole.save_pretrained(tmp_path / "whole")
    with pytest.raises(ModelError, match="leaves out the logit_scale 0.0625 .* Save the text model by itself, as Cohere2ForCausalLM"):
        load_base(str(tmp_path / "whole"))
    text: Any = transformers.Cohere2ForCausalLM(whole.config.text_config)
    text.model, text.lm_head = whole.model.language_model, whole.lm_head
    text.save_pretrained(tmp_path / "text")
    base = load_base(str(tmp_path / "text"))
    weight = dict(whole.named_parameters())["model.language_model.layers.0.self_attn.q_proj.weight"]
    assert base.head.scale == 0.0625 and torch.equal(base.model.model.layers[0].self_attn.q_proj.weight, weight)


def test_a_wrapper_of_a_text_encoder_is_refused_and_not_broken_off(tmp_path: Path) -> None:
    tiny(transformers.BlipConfig).save_pretrained(tmp_path)
    transformers.AutoModelForImageTextToText.from_config(load_config(str(tmp_path))).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="BlipForConditionalGeneration does not run over a text alone: .* Use a causal language model"):
        load_base(str(tmp_path))


@pytest.mark.slow
def test_the_head_of_a_wrapped_text_model_is_found_where_the_wrapper_names_none() -> None:
    found = look("nemotron_h_omni", families()["nemotron_h_omni"])
    assert (found.state, found.note, found.experts) == ("trained", "its text model", "down_proj, up_proj")
