"""A mixture in stages, each on a rank of its own, with experts as targets: the bytes of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import tlora
from tests.data.chat_templates import CHATML, make_tokenizer
from tests.engine.ranks.worlds import fork_children
from tests.engine.tiny_runs import job, run_spec, same_bytes, train, write_rows
from tests.tiny import SHAPE


@pytest.mark.slow
def test_two_stages_of_a_mixture(tmp_path: Path, fork_servers: object, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_children(monkeypatch, tmp_path)
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path / "base")
    shape = {**SHAPE, "vocab_size": len(tokenizer) + 3, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    torch.manual_seed(0)
    transformers.GptOssForCausalLM(transformers.GptOssConfig(**shape, sliding_window=7)).save_pretrained(tmp_path / "base")
    data = str(write_rows(tmp_path / "rows.jsonl", 16, high=6))
    orders = [
        job("experts", data, max_steps=3, target_modules=[], target_parameters=["gate_up_proj", "down_proj"], expert_rank="divide", r=4),
        job("attention", data, max_steps=3, lora_dropout=0.1, seed=3),
    ]
    train(tmp_path / "base", tmp_path / "whole", orders, deterministic=True)
    settings = {"deterministic": True, "token_budget": 64, "layout": "stages"}
    tlora.train(run_spec(tmp_path / "base", tmp_path / "stages", orders, **settings), device="cpu", gpus=2)
    same_bytes(tmp_path / "stages", tmp_path / "whole", ["experts", "attention"])
