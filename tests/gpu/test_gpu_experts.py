"""Experts as targets on a GPU: together is alone byte for byte with `deterministic`, and gradients and steps are PEFT's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.supermodel.test_expert_targets import BOTH, FAMILIES, UP_DOWN, check_against_peft, check_together
from tlora.job import LoraConfig

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
