"""Experts as targets on a GPU: together is alone byte for byte with `deterministic`, and gradients and steps are PEFT's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.supermodel.mxfp4_bases import pack
from tests.supermodel.test_expert_targets import BOTH, FAMILIES, UP_DOWN, check_against_peft, check_together, make_model, train
from tlora.job import LoraConfig
from tlora.supermodel.load import load_base
from tlora.supermodel.supermodel import SuperModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_together_is_alone_bitwise(family: str, dtype: torch.dtype) -> None:
    check_together(family, dtype, DEVICE)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_and_steps_are_pefts(family: str, tmp_path: Path) -> None:
    parameters = UP_DOWN if "nemotron" in family else BOTH
    lora = LoraConfig(r=4, target_parameters=parameters, target_modules=["o_proj"])
    check_against_peft(family, lora, tmp_path, device=DEVICE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_in_mxfp4_are_widened_to_the_same_bits(dtype: str, tmp_path: Path) -> None:
    """By the kernel that dequantises linears; adapters of experts have the bytes of training over the widened checkpoint."""
    widened = pack(make_model("gpt-oss", torch.float32), tmp_path / "plain", tmp_path / "packed")
    packed, plain = (SuperModel(load_base(str(tmp_path / name), dtype, DEVICE), deterministic=True) for name in ("packed", "plain"))
    for name, value in widened.items():
        held = packed.model.get_submodule(name)
        assert all(torch.equal(held[expert].cpu(), value[expert].to(held.dtype)) for expert in range(len(value))), name
    together, expected = train(packed, "abc"), train(plain, "abc")
    assert torch.equal(together["a"], expected["a"]) and torch.equal(together["b"], expected["b"])
    for job_id in "abc":
        assert torch.equal(train(packed, job_id)[job_id], together[job_id]), job_id
