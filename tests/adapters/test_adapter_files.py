"""Adapter files both ways: ours load in PEFT with equal logits, PEFT's load here, and every bad one is refused by name."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_model
from tests.tolerances import LOGITS, assert_close
from tlora.adapters.layout import AdapterLayout, make_layout
from tlora.adapters.pattern_warnings import pattern_warnings
from tlora.adapters.peft import CONFIG_FILE, WEIGHTS_FILE, adapter_config, load_params, read_config, save_adapter
from tlora.adapters.state import init_state
from tlora.errors import ModelError
from tlora.job import JobSpec, LoraConfig
from tlora.planning.start import adopt_adapter_config
from tlora.supermodel.experts import Experts
from tlora.supermodel.inject import find_linears, resolve_targets

IDS = torch.arange(3, 20)[None]
CONFIGS = {
    "all-linear": LoraConfig(r=4, lora_alpha=9),
    "literal": LoraConfig(r=4, target_modules=["q_proj", "down_proj"]),
    "whole-name": LoraConfig(r=2, target_modules=["model.layers.1.self_attn.v_proj"]),
    "rslora": LoraConfig(r=9, lora_alpha=12, use_rslora=True),
    "patterns": LoraConfig(r=3, rank_pattern={"o_proj": 7, "layers.0.mlp.up_proj": 1}, alpha_pattern={"q_proj": 2.5}),
    "overlapping": LoraConfig(
        r=3,
        rank_pattern={"v_proj": 6, "layers.0.self_attn.v_proj": 2, "layers.1.mlp.up_proj": 5, "up_proj": 4},
        alpha_pattern={"v_proj": 64.0, "layers.0.self_attn.v_proj": 8.0, "mlp.gate_proj": 2.5, "gate_proj": 9.0},
    ),
    "patterns-rslora": LoraConfig(r=3, rank_pattern={"o_proj": 4}, alpha_pattern={"o_proj": 2.5}, use_rslora=True),
}


def layout_on(model: Any, lora: LoraConfig) -> AdapterLayout:
    return make_layout(lora, resolve_targets(model, find_linears(model), Experts(model), lora))


def scales_of(peft_model: Any) -> dict[str, tuple[int, float]]:
    """Rank and scale of each module that PEFT adapts."""
    found = {name.removeprefix("base_model.model."): module for name, module in peft_model.named_modules() if hasattr(module, "lora_A")}
    return {name: (module.r["default"], module.scaling["default"]) for name, module in found.items()}


def filled(layout: AdapterLayout, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(layout.numel, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype) / 8


def merged_logits(model: Any, layout: AdapterLayout, params: torch.Tensor) -> torch.Tensor:
    """The base with W + scale * B A written into its weights: what an adapter means, without anybody's adapter code."""
    for shape, a, b in layout.views(params):
        model.get_submodule(shape.module).weight.data += shape.scale * (b.t() @ a)
    return model(IDS).logits


@pytest.mark.parametrize("lora", CONFIGS.values(), ids=CONFIGS)
def test_our_files_load_in_peft_with_equal_logits(lora: LoraConfig, tmp_path: Path) -> None:
    layout = layout_on(make_model(), lora)
    params = filled(layout)
    save_adapter(tmp_path, layout, params, lora, "some/base")
    theirs = peft.PeftModel.from_pretrained(make_model(), str(tmp_path))
    with torch.no_grad():
        found, expected = theirs(input_ids=IDS).logits, merged_logits(make_model(), layout, params)
        plain = make_model()(IDS).logits
    assert_close(found, expected, LOGITS[torch.float32], "logits")
    assert not torch.allclose(found, plain, atol=1e-2), "the adapter does nothing, so nothing was compared"
    assert scales_of(theirs) == {shape.module: (shape.rank, shape.scale) for shape in layout.shapes}


READ_BACK = {name: lora for name, lora in CONFIGS.items() if name != "overlapping"}  # PEFT cannot load its own then: it sorts the keys


@pytest.mark.parametrize("lora", READ_BACK.values(), ids=READ_BACK)
def test_pefts_files_load_here(lora: LoraConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)  # PEFT draws A and B: now and then so large that fp32 rounds above the bound
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,  # type: ignore[arg-type]
        target_modules=lora.target_modules,
        use_rslora=lora.use_rslora,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    theirs = peft.get_peft_model(make_model(), config)
    theirs.save_pretrained(str(tmp_path))
    saved = read_config(tmp_path)
    fields = ("r", "lora_alpha", "target_modules", "use_rslora", "rank_pattern", "alpha_pattern")
    ours = LoraConfig(**{key: saved[key] for key in fields})
    model = make_model()
    layout = layout_on(model, ours)
    params = load_params(tmp_path, layout, torch.float32)
    with torch.no_grad():
        assert_close(merged_logits(model, layout, params), theirs(input_ids=IDS).logits, LOGITS[torch.float32], "logits")


def _save(model: Any, directory: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # that the base has no directory of its own
        model.save_pretrained(str(directory))


def test_an_adapter_of_peft_with_overlapping_keys_is_continued_and_saved_again(tmp_path: Path) -> None:
    """PEFT takes the first key in the order of its LoraConfig, and sorts the keys when it saves. What it loads again is what counts."""
    drawn = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["v_proj", "up_proj"],
        rank_pattern={"layers.0.self_attn.v_proj": 2, "v_proj": 6, "layers.1.mlp.up_proj": 5},
        alpha_pattern={"layers.0.self_attn.v_proj": 8, "v_proj": 64},
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    _save(peft.get_peft_model(make_model(), drawn), tmp_path / "theirs")
    theirs = peft.PeftModel.from_pretrained(make_model(), str(tmp_path / "theirs"))
    spec, _ = adopt_adapter_config(JobSpec.model_validate({"name": "a", "data": "-"}), tmp_path / "theirs")
    layout = layout_on(make_model(), spec)
    assert {shape.module: (shape.rank, shape.scale) for shape in layout.shapes} == scales_of(theirs)
    (tmp_path / "ours").mkdir()
    save_adapter(tmp_path / "ours", layout, load_params(tmp_path / "theirs", layout, torch.float32), spec, "base")
    again = peft.PeftModel.from_pretrained(make_model(), str(tmp_path / "ours"))
    assert scales_of(again) == scales_of(theirs)
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, theirs(input_ids=IDS).logits)
    _save(again, tmp_path / "once more")
    assert scales_of(peft.PeftModel.from_pretrained(make_model(), str(tmp_path / "once more"))) == scales_of(theirs)


def test_keys_without_effect_and_readers_without_patterns_are_said() -> None:
    lora = CONFIGS["overlapping"]
    rank, alpha, other, vllm = pattern_warnings(lora, layout_on(make_model(), lora))
    assert rank.startswith("rank_pattern: 'layers.0.self_attn.v_proj' has no effect, as 'v_proj' stands before it")
    assert alpha.startswith("alpha_pattern: 'layers.0.self_attn.v_proj' has no effect")
    assert other.startswith("alpha_pattern: 'gate_proj' has no effect, as 'mlp.gate_proj'")
    assert (
        "vLLM reads no rank_pattern and no alpha_pattern: it would scale model.layers.0.self_attn.q_proj" not in vllm
        and "by 10.6667 in place of " in vllm
    )
    swapped = LoraConfig(r=4, alpha_pattern={"layers.0.self_attn.v_proj": 8.0, "v_proj": 64.0})  # the remedy of the second line
    assert [line.split(":")[0] for line in pattern_warnings(swapped, layout_on(make_model(), swapped))] == [
        "vLLM reads no rank_pattern and no alpha_pattern"
    ]
    even = LoraConfig(r=4, lora_alpha=8, rank_pattern={"v_proj": 8}, alpha_pattern={"v_proj": 16.0})
    assert pattern_warnings(even, layout_on(make_model(), even)) == [
        "vLLM reads no rank_pattern: serve this adapter there with max_lora_rank 8 or more"
    ]
    assert pattern_warnings(CONFIGS["all-linear"], layout_on(make_model(), CONFIGS["all-linear"])) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_there_and_back_is_the_same_to_the_last_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    layout = layout_on(make_model(), CONFIGS["patterns"])
    params = filled(layout, dtype)
    save_adapter(tmp_path, layout, params, CONFIGS["patterns"], "base")
    assert torch.equal(load_params(tmp_path, layout, dtype), params)


def test_same_adapter_same_bytes_whatever_the_order_of_modules(tmp_path: Path) -> None:
    lora = CONFIGS["literal"]
    layout = layout_on(make_model(), lora)
    back = AdapterLayout(tuple(reversed(layout.shapes)))
    params = filled(layout)
    parts = [torch.cat([a.flatten(), b.flatten()]) for _, a, b in layout.views(params)]
    files: list[bytes] = []
    for name, which, flat in (("one", layout, params), ("two", back, torch.cat(list(reversed(parts))))):
        (tmp_path / name).mkdir()
        save_adapter(tmp_path / name, which, flat, lora, "base")
        files.append((tmp_path / name / WEIGHTS_FILE).read_bytes())
    assert files[0] == files[1]


def test_config_names_targets_and_whole_alphas_are_integers() -> None:
    layout = layout_on(make_model(), CONFIGS["patterns"])
    config = adapter_config(layout, CONFIGS["patterns"], "some/base")
    assert config["target_modules"] == sorted({s.module.rsplit(".", 1)[-1] for s in layout.shapes})
    assert type(config["lora_alpha"]) is int and config["alpha_pattern"] == {"q_proj": 2.5}
    assert set(config) <= {f.name for f in peft.LoraConfig.__dataclass_fields__.values()}


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, AdapterLayout]:
    lora = CONFIGS["literal"]
    layout = layout_on(make_model(), lora)
    save_adapter(tmp_path, layout, init_state(layout, 0, torch.float32).params, lora, "base")
    return tmp_path, layout


def test_config_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter_config.json: not found"):
        read_config(tmp_path)


def test_adapters_of_a_run_that_is_named_in_place_of_one(tmp_path: Path) -> None:
    """Also of a job that is not finished: its checkpoints are adapters."""
    for number, name in enumerate(("checkpoint-2", "checkpoint-10")):
        (tmp_path / "a" / name).mkdir(parents=True)
        (tmp_path / "a" / name / CONFIG_FILE).write_text("{}")
        os.utime(tmp_path / "a" / name / CONFIG_FILE, (number, number))
        for directory in (tmp_path / "a", tmp_path):
            said = f"The newest of 2 in {directory} is" if number else "There is one:"
            with pytest.raises(ModelError, match=rf"not found\. An adapter is .*{said} {tmp_path / 'a' / name}$"):
                read_config(directory)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe{}", b""])
def test_config_broken(content: bytes, tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(content)
    with pytest.raises(ModelError, match=r"cannot be read .*Save the adapter again"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "why"),
    [({"peft_type": "IA3"}, "peft_type must be LORA, and is 'IA3'"), ({}, "peft_type must be LORA"), ([1], "holds a list, not an object")],
)
def test_config_of_another_kind(config: object, why: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(ModelError, match=why):
        read_config(tmp_path)


STARTS = ["pissa", "pissa_niter_16", "olora", "eva", "corda", "loftq", "lora_ga", "mica"]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("use_dora", True, "use_dora=True: the adapter is DoRA, and only a plain LoRA adapter can be used. Train a plain"),
        ("use_qalora", True, "use_qalora=True.*merge_and_unload"),
        ("use_bdlora", {"nblocks": 2}, "use_bdlora=.*merge_and_unload"),
        ("arrow_config", {"top_k": 3}, "arrow_config=.*merge_and_unload"),
        ("monteclora_config", {"x": 1}, "monteclora_config=.*merge_and_unload"),
        ("kasa_config", {"x": 1}, "kasa_config=.*merge_and_unload"),
        ("modules_to_save", ["lm_head"], r"modules_to_save=\['lm_head'\].*trainable_token_indices.*merge_and_unload"),
        ("lora_bias", True, "lora_bias=True.*merge_and_unload"),
        ("layer_replication", [[0, 1]], r"layer_replication=\[\[0, 1\]\].*merge_and_unload"),
        ("alora_invocation_tokens", [5], r"alora_invocation_tokens=\[5\].*merge_and_unload"),
        *(("init_lora_weights", start, f"init_lora_weights='{start}': .*path_initial_model_for_weight_conversion") for start in STARTS),
        ("bias", "all", "bias='all' trains base weights"),
    ],
)
def test_config_that_cannot_be_continued(key: str, value: object, words: str, saved: tuple[Path, AdapterLayout]) -> None:
    path = saved[0] / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ModelError, match=words):
        read_config(saved[0])


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "Gaussian", "orthogonal"])
def test_config_of_a_start_that_leaves_the_base_alone(start: object, saved: tuple[Path, AdapterLayout]) -> None:
    path = saved[0] / CONFIG_FILE
    defaults = {"layers_to_transform": None, "layers_pattern": "", "exclude_modules": [], "fan_in_fan_out": False, "use_dora": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | defaults | {"init_lora_weights": start}))
    assert read_config(saved[0])["init_lora_weights"] == start


Tensors = dict[str, torch.Tensor]


def _without_one(tensors: Tensors) -> Tensors:
    return {n: t for n, t in tensors.items() if n != min(tensors)}


def _with_one_more(tensors: Tensors) -> Tensors:
    return tensors | {"base_model.model.model.layers.7.q_proj.lora_A.weight": torch.zeros(4, 64)}


def _of_another_rank(tensors: Tensors) -> Tensors:
    return {n: (t[:2] if "lora_A" in n else t[:, :2]).contiguous() for n, t in tensors.items()}


def _with_nan(tensors: Tensors) -> Tensors:
    tensors[min(tensors)][0, 0] = torch.nan
    return tensors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without_one, "has no tensor .*another base model, or has other target_modules"),
        (_with_one_more, "for a layer that this job does not train: .*layers.7.*Add the layer to target_modules"),
        (_of_another_rank, r"is \[2, 64\], and this job needs \[4, 64\].*another rank"),
        (_with_nan, "holds NaN or Inf. Start from a healthy checkpoint"),
    ],
)
def test_weights_that_do_not_fit(change: Callable[[Tensors], Tensors], words: str, saved: tuple[Path, AdapterLayout]) -> None:
    directory, layout = saved
    save_file(change(load_file(directory / WEIGHTS_FILE)), directory / WEIGHTS_FILE)
    with pytest.raises(ModelError, match=words):
        load_params(directory, layout, torch.float32)


def test_weights_missing(saved: tuple[Path, AdapterLayout]) -> None:
    (saved[0] / WEIGHTS_FILE).unlink()
    with pytest.raises(ModelError, match=r"adapter_model.safetensors: not found"):
        load_params(*saved, torch.float32)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_weights_truncated(keep: int, saved: tuple[Path, AdapterLayout]) -> None:
    path = saved[0] / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="is no whole safetensors file"):
        load_params(*saved, torch.float32)
