"""What a pipeline makes of measured parts, and the parts of a tiny base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import stage_parts
from bench.base_files import make_base_here


def test_the_slowest_stage_and_its_copies_set_the_pace() -> None:
    whole, stages = [{"tokens": 100, "seconds": 2.0}], [[{"seconds": 0.9}], [{"seconds": 1.25}]]
    link = {"bytes_per_token": 10, "to_host_bytes_per_second": 5e3, "from_host_bytes_per_second": 1e4}
    (row,) = stage_parts.compute(whole, stages, link)
    assert row["copy_seconds"] == pytest.approx(0.2 + 0.1) and row["computed_not_measured"]
    assert row["over_gpus_alone"] == pytest.approx(2.0 / 2 / (1.25 + 0.3))


def test_stages_of_a_tiny_base_are_timed(tmp_path: Path) -> None:
    base = make_base_here("tiny", tmp_path, "cpu")["base"]
    out = tmp_path / "out.json"
    small = ["--device", "cpu", "--tokens", "64", "--length", "16", "--jobs", "2", "--rank", "4", "--repeats", "1", "--commit", "a copy"]
    assert stage_parts.main(["--base", base, *small, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [(row["first_layer"], row["stop_layer"]) for (row,) in found["stages"]] == [(0, 1), (1, 2)]
    assert all(row["seconds"] > 0 for rows in [*found["stages"], found["whole"]] for row in rows)
