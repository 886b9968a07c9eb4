"""Small bases of the families that people tune, mixtures all of them: jobs of four kinds in one run that is killed and resumed have the
bytes of a run that was not, and each adapter gives PEFT's logits and, in the program's answers, its words.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners import tuners_utils
from transformers import PretrainedConfig

from tests.data.chat_templates import CHATML, make_tokenizer
from tests.engine.tiny_runs import job, run_spec, same_bytes, train, train_killed, write_rows
from tests.tiny import SHAPE
from tlora.adapters.layout import make_layout
from tlora.adapters.peft import refused_by_peft
from tlora.engine.check import check
from tlora.engine.generate import Sampling, _attach, answer, open_adapter
from tlora.job import LoraConfig

pytestmark = pytest.mark.usefixtures("forked")
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
RULE: dict[str, Any] = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2) | dict.fromkeys(
    ("linear_key_head_dim", "linear_value_head_dim"), 16
)
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "head_dim": 16}
BASES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen3.5-moe": (
        transformers.Qwen3_5MoeTextConfig,
        EXPERTS
        | RULE
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 16,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "gpt-oss": (transformers.GptOssConfig, SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma-4": (
        transformers.Gemma4TextConfig,
        SLIDING
        | {
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "granite-4-h": (
        transformers.GraniteMoeHybridConfig,
        MAMBA
        | {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 96,
            "position_embedding_type": "nope",
        },
    ),
    "nemotron-h": (
        transformers.NemotronHConfig,
        {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 8,
            "head_dim": 16,
        },
    ),
    "lfm2": (transformers.Lfm2MoeConfig, EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 4}),
}
OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
LFM2 = pytest.param("lfm2", marks=pytest.mark.skipif(OLD, reason="its convolution takes no keywords before transformers 5.23"))


def save(directory: Path, family: str) -> Path:
    tokenizer, (kind, fields) = make_tokenizer(CHATML), BASES[family]
    tokenizer.save_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = kind(**SHAPE | fields | {"vocab_size": len(tokenizer) + 3})
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def orders(directory: Path) -> list[dict[str, Any]]:
    """`experts` learn at a larger rate: of two experts a token, each has half of the rank."""
    rows, pairs = str(write_rows(directory / "rows.jsonl", 16)), directory / "pairs.jsonl"
    words = ("a red boat", "the old sea", "one more day", "no wind at all")
    pairs.write_text("".join(json.dumps({"prompt": word, "chosen": words[i - 1], "rejected": word}) + "\n" for i, word in enumerate(words)))
    fields: dict[str, Any] = {"max_steps": 4, "batch_size": 2, "save_steps": 1}
    return [
        job("linears", rows, lora_dropout=0.1, seed=3, **fields),
        job("pairs", {"path": str(pairs)}, objective="dpo", **fields),
        job("experts", rows, target_parameters=["gate_up_proj", "down_proj"], expert_rank="divide", **fields),
        job("tokens", rows, trainable_token_indices=[3, 4, 100], train_on="all", **fields),
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The following .*_pattern keys did not match:RuntimeWarning"
)  # of modules; it applies them to parameters
@pytest.mark.parametrize("family", [*(name for name in BASES if name not in ("lfm2", "nemotron-h")), LFM2])
def test_jobs_of_four_kinds_are_killed_and_resumed_and_give_what_peft_gives(family: str, tmp_path: Path) -> None:
    base, jobs = save(tmp_path / "base", family), orders(tmp_path)
    assert not check(run_spec(base, tmp_path / "out", jobs), device="cpu").problems
    train_killed(base, tmp_path / "out", jobs, deterministic=True)
    results = train(base, tmp_path / "out", jobs, deterministic=True, resume=True)
    assert {name: result.status for name, result in results.items()} == {order["name"]: "done" for order in jobs}
    train(base, tmp_path / "whole", jobs, deterministic=True)
    same_bytes(tmp_path / "out", tmp_path / "whole", list(results))
    for name in results:
        compare_with_peft(base, tmp_path / "out" / name)


def compare_with_peft(base: Path, adapter: Path) -> None:
    ids = torch.arange(10, 40)[None]
    whole = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    opened = open_adapter(adapter)
    with torch.no_grad(), ExitStack() as stack:
        plain = whole(input_ids=ids).logits
        theirs = peft.PeftModel.from_pretrained(whole, adapter).eval()
        expected = theirs(input_ids=ids).logits
        alone = [answer(opened, [prompt], Sampling(max_new_tokens=6))[0] for prompt in ("red", "the old boat")]
        assert answer(opened, ["red", "the old boat"], Sampling(max_new_tokens=6)) == alone, "a shorter prompt sees what fills it up"
        _attach(opened, stack)
        stack.enter_context(opened.experts.adapted(opened.layout, opened.params))
        logits = opened.model(input_ids=ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits, plain, atol=1e-3), adapter.name


def test_an_adapter_that_peft_refuses_is_said_with_the_remedy(tmp_path: Path) -> None:
    """Of each type of base: PEFT itself is asked."""
    layout = make_layout(LoraConfig(), {"layers.0.mixer.out_proj": (64, 64)})
    refused: set[str] = set()
    for kind in transformers.CONFIG_MAPPING:
        try:
            tuners_utils._check_lora_target_modules_mamba(
                peft.LoraConfig(), SimpleNamespace(config=SimpleNamespace(model_type=kind)), "out_proj"
            )
        except ValueError:
            refused.add(kind)
    assert "nemotron_h" in refused and {kind for kind in transformers.CONFIG_MAPPING if refused_by_peft(kind, layout)} == refused
    assert not refused_by_peft("nemotron_h", make_layout(LoraConfig(), {"layers.0.mixer.in_proj": (64, 64)}))
    base, rows = save(tmp_path / "base", "nemotron-h"), str(write_rows(tmp_path / "rows.jsonl", 4))
    jobs = [job("all", rows, max_steps=1), job("less", rows, max_steps=1, exclude_modules=["out_proj"])]
    found = {planned.name: planned.warnings for planned in check(run_spec(base, tmp_path / "out", jobs), device="cpu").jobs}
    said = {name: [line for line in lines if "PEFT" in line] for name, lines in found.items()}
    assert said == {"all": refused_by_peft("nemotron_h", layout), "less": []}
    train(base, tmp_path / "out", jobs)
    whole = transformers.AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(ValueError, match="out_proj"):
        peft.PeftModel.from_pretrained(whole, tmp_path / "out" / "all")
    compare_with_peft(base, tmp_path / "out" / "less")
