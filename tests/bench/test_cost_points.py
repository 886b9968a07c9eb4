"""The points that constants are fitted to: each is what its name says, and a figure is of whole micro-batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import cost_points


@pytest.mark.slow
def test_tokens_and_seconds_of_a_micro_batch(tmp_path: Path):
    out = tmp_path / "points.json"
    options = ["--shape", "tiny", "--device", "cpu", "--seconds", "0.01", "--points", "128,1024-of-4", "--systems", "ours"]
    cost_points.run_benchmark(cost_points.read_options([*options, "--data", "bench/data", "--out", str(out), "--commit", "x"]))
    alone, four = json.loads(out.read_text())["rows"]
    assert (alone["tokens_per_micro_batch"], alone["padding_share"], alone["tokens_per_step"]) == (128, 0, 128)
    assert (four["tokens_per_micro_batch"], four["token_budget"], four["tokens_per_step"]) == (4096, 4096, 1024)
    assert four["point"]["held_out"] and not alone["point"]["held_out"]
    assert alone["seconds_per_micro_batch"] > 0
