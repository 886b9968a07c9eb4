"""The benchmark of shared bases runs where there is no GPU, and says what failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def run(directory: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.shared_base", "--device", "cpu", "--shape", "tiny", "--tokens", "64", "--repeats", "1"]
    subprocess.run(
        [*command, "--json", str(directory / "found.json"), "--commit", "none", *options], cwd=REPOSITORY, check=True, timeout=600
    )
    return json.loads((directory / "found.json").read_text())["parts"]


def test_a_step_is_measured_on_each_rank_in_every_way(tmp_path: Path) -> None:
    for found in run(tmp_path, "--gpus", "2", "--parts", "step")["step"]:
        assert "error" not in found, found
        ways = {"resident", "resident, no graphs", "copies", "gathers", "gathers, copied out"}
        assert set(found["over_resident"]) == ways and set(found["exposed_fetch_seconds"]) == ways - {"resident", "resident, no graphs"}


def test_a_part_that_fails_leaves_its_reason(tmp_path: Path) -> None:
    found = run(tmp_path, "--gpus", "1", "--parts", "bits,step", "--slots", "1")
    assert all("slots is 1" in part[0]["error"] for part in found.values())
