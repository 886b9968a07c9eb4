"""The example of an own policy, but for the process that it is."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_policy.py"


def test_the_policy_written_by_hand_is_as_good_as_the_built_in_one() -> None:
    found = runpy.run_path(str(EXAMPLE))["main"](jobs=100)
    assert found["own"] == pytest.approx(found["sjf"], rel=1e-9) and found["own"] < found["fifo"]
