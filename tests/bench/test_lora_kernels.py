"""No time of a wrong result: the check before the timing must see each kind of mistake."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.interpreter import DEVICE, MARKS, interpreted

with interpreted():
    from bench import lora_kernels

pytestmark = MARKS
PLACE = (DEVICE, torch.float32)


def _case() -> lora_kernels.Case:
    torch.manual_seed(0)
    return lora_kernels.make_case("q/k/v", (32, (32, 16)), (8, 16), 128, PLACE)


def test_the_kernels_pass_the_check_and_are_timed():
    case = _case()
    inputs = lora_kernels.make_inputs(case, 128)
    assert max(lora_kernels.errors(case, inputs[0]).values()) < lora_kernels.MOST_ERROR[torch.float32]
    bare, ours = lora_kernels.time_pair(case, inputs, 1)
    assert bare > 0 and ours > 0


def test_the_bare_base_does_not_pass_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lora_kernels, "run", lora_kernels.run_bare)
    case = _case()
    found = lora_kernels.errors(case, lora_kernels.make_inputs(case, 128)[0])
    assert min(found.values()) > lora_kernels.MOST_ERROR[torch.bfloat16], found


@pytest.mark.parametrize("wrong", ["da", "db"])
def test_gradients_in_the_wrong_rows_do_not_pass_it(wrong: str):
    case = _case()
    swapped = replace(case, **{wrong: [rows.clone() for rows in getattr(case, wrong)]})  # the kernels write to the case's own
    found = lora_kernels.errors(swapped, lora_kernels.make_inputs(case, 128)[0])
    assert found[f"d{wrong[1].upper()} 0"] > lora_kernels.MOST_ERROR[torch.bfloat16]
