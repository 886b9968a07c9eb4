"""Both settings of PEFT, with and without dropout, are measured, and wrong gradients are no figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import peft_plugin

TINY = ["--shape", "tiny", "--layers", "1", "--length", "16", "--repeats", "1", "--commit", "a copy"]


def test_a_row_for_each_setting_dropout_and_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peft_plugin, "WARM_UP", 0)
    found = peft_plugin.run_benchmark(peft_plugin.read_options([*TINY, "--json", str(tmp_path / "out.json")]))
    assert json.loads((tmp_path / "out.json").read_text()) == found
    measured = [(row["adapters"], row["dropout"], row["rows"]) for row in found["rows"]]
    assert measured == [(adapters, dropout, rows) for adapters in ("fp32", "bf16") for dropout in (0.0, 0.05) for rows in (1, 4)]
    assert all(0 < row["gradients_differ_by"] <= peft_plugin.NEAR for row in found["rows"]), "nothing was accelerated, or wrongly"
    model = peft_plugin.make_peft_model("tiny", 1, 4, peft_plugin.Setting("fp32", 0.05, False), torch.device("cpu"))
    layer: Any = model.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.lora_A["default"].weight.dtype == torch.float32 and layer.base_layer.weight.dtype == torch.bfloat16


def test_gradients_that_differ_end_the_benchmark(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peft_plugin, "NEAR", 0.0)
    with pytest.raises(AssertionError, match="no figure is worth anything"):
        peft_plugin.run_benchmark(peft_plugin.read_options([*TINY, "--dropouts", "0.05"]))
