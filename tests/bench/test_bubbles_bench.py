"""The stream of all jobs beside a flush at each step, over two stages, each a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import bubbles


def test_a_flush_costs_what_arithmetic_says() -> None:
    found = bubbles.predict(jobs=4, micro_batches=8, tokens=64)
    for stages in bubbles.PREDICTED_STAGES:
        own = found[str(stages)]
        assert own["stream_over_flush"] == pytest.approx((8 + stages - 1) / 8)
        assert own["flush_waiting_share"] == pytest.approx((stages - 1) / (8 + stages - 1)) and own["stream_waiting_share"] == 0


@pytest.mark.slow
def test_tiny_jobs_are_timed_both_ways(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    settings = ["--rounds", "1", "--steps", "2", "--jobs", "2", "--micro-batches", "3", "--tokens", "6"]
    bubbles.main([*settings, "--commit", "abc", "--json", str(out)])
    found = json.loads(out.read_text())
    assert all(arm["tokens_per_second"] > 0 and 0 <= arm["waiting_share"] < 1 for arm in found["arms"].values())
    assert found["stream_over_flush"]["median"] > 0 and found["predicted"].keys() == {"2", "4"}


def test_too_little_to_compare_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bubbles.main(["--jobs", "1"])
    assert "give 2 jobs or more" in capsys.readouterr().err
