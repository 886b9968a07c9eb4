"""The benchmark of shared bases runs where there is no GPU, and says what failed. Its ranks are processes, forked as runs are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import shared_base
from tests.forked import REPOSITORY

pytestmark = [pytest.mark.usefixtures("forked_children"), pytest.mark.slow]


def run(directory: Path, *options: str) -> dict[str, Any]:
    """What `python -m bench.shared_base` finds. Its ranks are given more time than a machine that measures would: this one may be busy."""
    arguments = ["--device", "cpu", "--shape", "tiny", "--tokens", "64", "--repeats", "1", "--total-seconds", "1e6"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        patch.setattr(shared_base, "SECONDS", dict.fromkeys(shared_base.PARTS, 1e6))
        patch.setattr(sys, "argv", ["shared_base", *arguments, "--json", str(directory / "found.json"), "--commit", "none", *options])
        shared_base.main()
    return json.loads((directory / "found.json").read_text())["parts"]


def test_a_step_is_measured_on_each_rank_in_every_way(tmp_path: Path) -> None:
    for found in run(tmp_path, "--gpus", "2", "--parts", "step")["step"]:
        assert "error" not in found, found
        ways = {"resident", "resident, no graphs", "copies", "gathers", "gathers, copied out"}
        assert set(found["over_resident"]) == ways and set(found["exposed_fetch_seconds"]) == ways - {"resident", "resident, no graphs"}


def test_a_part_that_fails_leaves_its_reason(tmp_path: Path) -> None:
    found = run(tmp_path, "--gpus", "1", "--parts", "bits,step", "--slots", "1")
    assert all("slots is 1" in part[0]["error"] for part in found.values())
