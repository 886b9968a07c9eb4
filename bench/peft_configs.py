"""The adapters that PEFT gets in these benchmarks: those of our own jobs over the same shape."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig

from bench.shapes import EXPERT_PARAMETERS, SHAPES, experts_per_token

_BESIDE_EXPERTS = ["q_proj", "k_proj", "v_proj", "o_proj"]  # by `all-linear` PEFT adapts routers too, and experts at twice the rank


def lora_config(shape: str, r: int, lora_alpha: float) -> LoraConfig:
    """`all-linear`; of a mixture its experts' parameters too, with rank and alpha divided as by `expert_rank: divide`."""
    targets: dict[str, Any] = {"target_modules": "all-linear"}
    if per_token := experts_per_token(SHAPES[shape]):
        ends = [name.removeprefix("mlp.") for name in EXPERT_PARAMETERS]
        targets = {"target_modules": _BESIDE_EXPERTS, "target_parameters": list(EXPERT_PARAMETERS)}
        targets |= {"rank_pattern": dict.fromkeys(ends, r // per_token), "alpha_pattern": dict.fromkeys(ends, lora_alpha / per_token)}
    return LoraConfig(r=r, lora_alpha=lora_alpha, task_type="CAUSAL_LM", **targets)  # pyright: ignore[reportArgumentType]
