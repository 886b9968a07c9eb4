"""The clock of a run that is resumed goes on from the last row of the one before, whatever a kill left behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlora.engine.run_monitor import _last_second


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"seconds": 1.5}\n{"seconds": 2.5}\n', 2.5),
        ('{"seconds": 2.5}\n{"seconds": 3.1, "jobs": {"of', 2.5),
        ('{"seconds": 2.5}\n[1]\n{}\n{"seconds": null}\n', 2.5),
        ("", 0.0),
        (None, 0.0),
    ],
    ids=["whole", "torn", "strange", "empty", "none"],
)
def test_last_second(text: str | None, expected: float, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "run.jsonl").write_text(text)
    assert _last_second(tmp_path / "run.jsonl") == expected
