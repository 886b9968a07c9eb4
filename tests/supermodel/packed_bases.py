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

from tests.engine.tiny_runs import save_base
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


def edit(path: Path, **changes: Any) -> None:
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
