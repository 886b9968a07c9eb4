"""A tiny gpt-oss whose experts are in MXFP4, as its makers publish them, and the plain checkpoint that transformers makes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

_SIZES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks [E, N, K / 32, 16] and scales [E, N, K / 32] of a parameter [E, K, N]: the nearest number of each group's scale, whose
    largest number lies between 4 and 8; low nibble first.
    """
    groups = weight.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponent = groups.abs().amax(-1).clamp_min(1e-30).log2().floor() - 2
    scaled = groups / exponent.exp2()[..., None]
    codes = (scaled.abs()[..., None] - _SIZES).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponent + 127).to(torch.uint8)


def pack(model: Any, plain: Path, packed: Path) -> dict[str, Tensor]:
    """Save `model` with its experts in MXFP4 as `packed`, and as `plain` with what transformers makes of these; gives these."""
    model.to(torch.bfloat16).save_pretrained(plain)
    shutil.copytree(plain, packed, dirs_exist_ok=True)
    tensors = load_file(plain / "model.safetensors")
    unpacked, widened = dict[str, Tensor](), dict[str, Tensor]()
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = quantise(tensors.pop(name))
        unpacked |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        widened[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors | unpacked, packed / "model.safetensors", {"format": "pt"})
    save_file(tensors | widened, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": _KEPT}
    (packed / "config.json").write_text(json.dumps(config))
    return widened
