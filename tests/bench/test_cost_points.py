"""The points that constants are fitted to: each is what its name says, and a figure is of whole micro-batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import cost_points
from bench.cost_points import POINTS, USUAL


def test_points_tell_launch_slope_member_and_fill_apart_and_some_are_held_out():
    usual = [point for point in POINTS if point.name in USUAL]
    assert len({point.name for point in POINTS}) == len(POINTS)
    alone = {point.batch_size * point.length for point in usual if point.jobs == 1 and isinstance(point.length, int)}
    assert {128, 512, 2048} <= alone
    assert {point.rank for point in usual} == {8, 16, 64}
    assert {point.jobs for point in usual if not point.held_out} == {1, 4, 8}
    assert sum(point.held_out for point in usual) * 3 <= 24 - 2 * 3  # of three bases


@pytest.mark.parametrize("wrong", [["--points", "128,none"], ["--systems", "ours,none"]])
def test_unknown_points_and_systems_are_one_error(wrong: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cost_points.read_options(["--data", "bench/data", *wrong])
    assert "there is no 'none'; there are" in capsys.readouterr().err


def test_tokens_and_seconds_of_a_micro_batch(tmp_path: Path):
    out = tmp_path / "points.json"
    options = ["--shape", "tiny", "--device", "cpu", "--seconds", "0.01", "--points", "128,1024-of-4", "--systems", "ours"]
    cost_points.run_benchmark(cost_points.read_options([*options, "--data", "bench/data", "--out", str(out), "--commit", "x"]))
    alone, four = json.loads(out.read_text())["rows"]
    assert (alone["tokens_per_micro_batch"], alone["padding_share"], alone["tokens_per_step"]) == (128, 0, 128)
    assert (four["tokens_per_micro_batch"], four["token_budget"], four["tokens_per_step"]) == (4096, 4096, 1024)
    assert four["point"]["held_out"] and not alone["point"]["held_out"]
    assert alone["seconds_per_micro_batch"] > 0
