"""Bases with experts and hybrid layers in the benchmarks: their files, and that others get the adapters that ours get."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import get_peft_model

from bench import base_files
from bench.base_files import make_base_here
from bench.peft_configs import lora_config
from bench.real_jobs import jobs_file_of
from bench.shapes import make_model, shape_of
from tlora.jobs_file import read_jobs_file
from tlora.supermodel.load import load_base, make_base
from tlora.supermodel.supermodel import SuperModel

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # of experts, which have that rank
@pytest.mark.parametrize("shape", ["tiny-qwen3-moe", "tiny-gpt-oss", "tiny-qwen3.5"])
def test_peft_trains_as_many_numbers_as_ours(shape: str):
    job = read_jobs_file(jobs_file_of(shape), []).jobs[0]
    ours = SuperModel(make_base(make_model(shape, CPU, torch.float32), shape)).layout(job)
    theirs = get_peft_model(make_model(shape, CPU, torch.float32), lora_config(shape, job.r, job.lora_alpha))
    assert sum(p.numel() for p in theirs.parameters() if p.requires_grad) == ours.numel > 0


def test_files_hold_experts_in_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base_files, "write_tokenizer", lambda *_: None)
    facts = make_base_here("tiny-gpt-oss-mxfp4", tmp_path, "cpu", 3)
    base = load_base(facts["base"])
    layers = base.decoder.layers
    assert len(layers) == 3 and layers[0].mlp.experts.tlora_block.is_held
    widened = layers[0].mlp.experts.down_proj[0].float()
    assert widened.shape == (64, 64) and float(widened.std()) == pytest.approx(0.0057, rel=0.1)


def test_other_numbers_of_layers_repeat_the_kinds_of_layers():
    types = shape_of("qwen3.5-9b", None).layer_types
    assert len(types) == 32 and types[:4] == ["linear_attention"] * 3 + ["full_attention"]
    assert shape_of("qwen3.5-9b", 6).layer_types == types[:6] and shape_of("qwen3.5-9b", 36).layer_types == types + types[:4]
