"""Together = alone = PEFT with `torch.optim.AdamW`, for each family, at the super-model's level."""

from __future__ import annotations

import pytest
import torch

from tests.numerics import checks
from tests.numerics.peft_oracle import fp64_throughout
from tests.numerics.world import Job, super_model
from tests.tiny import FAMILIES, make_samples
from tlora.job import LoraConfig, TrainConfig

FUSED = {"phi3": ["qkv_proj", "gate_up_proj"]}
LATER = [(pytest.mark.slow, ("llama-tied", "qwen2", "qwen3", "mistral", "phi3", "llama")), (pytest.mark.soak, ("gemma3-capped",))]
KEPT_FOR = {family: mark for mark, families in LATER for family in families}


def family_jobs(family: str) -> list[Job]:
    """Three jobs that differ in everything a job can differ in."""
    some = FUSED.get(family, ["q_proj", "v_proj", "down_proj"])
    last = "layers.1.mlp.down_proj"
    return [
        Job(
            "all",
            LoraConfig(r=5, lora_alpha=11, lora_dropout=0.1),
            TrainConfig(learning_rate=3e-3, batch_size=3, seed=1, weight_decay=0.1, warmup_steps=2, max_grad_norm=0.05),
            tuple(make_samples(7, seed=1)),
            steps=3,
        ),
        Job(
            "some",
            LoraConfig(r=16, lora_alpha=4, target_modules=some, use_rslora=True),
            TrainConfig(learning_rate=1e-2, batch_size=1, seed=2, lr_scheduler_type="cosine", adam_beta1=0.8, adam_beta2=0.99),
            tuple(make_samples(3, seed=2, low=2, high=7)),
            steps=4,
            join_at=2,
            pause_after=2,
            pause_for=2,
        ),
        Job(
            "ragged",
            LoraConfig(r=2, rank_pattern={"o_proj": 9, last: 1}, alpha_pattern={last: 3}),
            TrainConfig(learning_rate=2e-3, batch_size=4, seed=3, lr_scheduler_type="constant", max_grad_norm=0, adam_epsilon=1e-6),
            tuple(make_samples(9, seed=3, low=20, high=40)),
            steps=3,
            join_at=1,
        ),
    ]


def check_family(family: str, dtype: torch.dtype) -> None:
    model, jobs = super_model(family, dtype, ()), family_jobs(family)
    checks.check_peft(model, jobs, family, dtype, ())
    checks.check_l1(model, jobs, packing_seed=12)
    if dtype == torch.float32:  # where together and alone round otherwise
        checks.check_l3(model, jobs, packing_seed=13, dtype=dtype)


@pytest.mark.parametrize("family", [pytest.param(family, marks=KEPT_FOR.get(family, [])) for family in FAMILIES])
def test_fp64_equals_peft_and_alone(family: str) -> None:
    """In every run gemma3's layers and gemma2's cap on the logits stand for both together; `test_promises` has llama."""
    with fp64_throughout():
        check_family(family, torch.float64)


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_equals_peft_and_alone(family: str) -> None:
    check_family(family, torch.float32)


@pytest.mark.slow  # in every run the family is in fp64, and llama in fp32 (`test_promises`)
def test_fp32_equals_peft_and_alone_for_one_family() -> None:
    check_family("gemma3", torch.float32)
