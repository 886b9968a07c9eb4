"""What `tlora plan` predicts today of the points that were measured, and that no constant was fitted to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import plan_points


@pytest.mark.slow
def test_predictions_are_within_the_promised_errors(tmp_path: Path) -> None:
    """Bounds of docs/reference/layouts.md. A change of any constant or formula that breaks them fails here."""
    plan_points.main(["--commit", "test", "--json", str(tmp_path / "points.json")])
    found = json.loads((tmp_path / "points.json").read_text())
    time, memory = found["time"], found["memory"]
    assert time["points"] >= 20 and time["median"] <= 0.05 and time["p95"] <= 0.12, time
    assert memory["median"] <= 0.02 and memory["p95"] <= 0.036, "3 % is the aim, which one base's peak misses"
