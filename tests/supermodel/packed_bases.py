"""Bases in 16 bits, and the plain checkpoint that a packed one stands for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engine.tiny_runs import job, run_spec, same_bytes, save_base, sha256, train, write_rows
from tlora.engine.check import check
from tlora.engine.generate import Sampling, generate
from tlora.supermodel.load import load_weights


def save_plain(directory: Path, dtype: torch.dtype = torch.bfloat16, **shape: Any) -> Path:
    base = save_base(directory, **{"num_hidden_layers": 2} | shape)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model.save_pretrained(base)
    return base


def unpack(packed: Path, values: dict[str, Tensor], directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """The plain checkpoint in `dtype` that a packed one stands for."""
    model: Any = load_weights(str(packed))
    found = {name: tensor for name, tensor in model.state_dict().items() if name.removesuffix(".weight") not in values}
    found = {name: tensor.clone() for name, tensor in found.items() if not name.endswith((".scale", ".zero"))}
    found |= {f"{name}.weight": value.to(dtype) for name, value in values.items()}
    shutil.copytree(packed, directory)
    save_file(found, directory / "model.safetensors", {"format": "pt"})
    edit(directory / "config.json", quantization_config=None)
    return directory


def check_adapters(packed: Path, unpacked: Path, plain: Path, tmp_path: Path) -> None:
    """Adapters over a packed checkpoint are those over the one that it stands for; `generate` and `check` take it."""
    data = str(write_rows(tmp_path / "d.jsonl", 16))
    jobs = [job("a", data, lora_dropout=0.1), job("b", data, r=9, target_modules=["q_proj", "down_proj"])]
    for base, out in ((packed, "4-bit"), (unpacked, "16-bit"), (plain, "bare")):
        train(base, tmp_path / out, jobs, deterministic=True)
    same_bytes(tmp_path / "4-bit", tmp_path / "16-bit", ("a", "b"))
    assert sha256(tmp_path / "bare" / "a") != sha256(tmp_path / "4-bit" / "a")
    texts = [
        generate(tmp_path / "4-bit" / "a", ["red"], base_model=str(base), sampling=Sampling(max_new_tokens=4))
        for base in (packed, unpacked)
    ]
    assert texts[0] == texts[1]
    found = check(run_spec(packed, tmp_path / "new", jobs), device="cpu")
    assert not found.problems and found.base_bytes < check(run_spec(plain, tmp_path / "new", jobs), device="cpu").base_bytes


def edit(path: Path, **changes: Any) -> None:
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
