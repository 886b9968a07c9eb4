"""`bench.streamed` on a CPU: both arms, with more layers than slots, and what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.streamed import main, read_options

TINY = ["--shape", "tiny", "--layers", "3", "--device", "cpu", "--tokens", "48", "--lengths", "8,16", "--jobs", "2", "--repeats", "1"]


@pytest.mark.slow
def test_both_arms_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert main([*TINY, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    streamed, resident = found["arms"]
    assert streamed["fetched_bytes_per_micro_batch"] > 0 == resident["fetched_bytes_per_micro_batch"]
    assert found["ratio"] == streamed["tokens_per_second"] / resident["tokens_per_second"] and found["link_bytes_per_second"] > 0


def test_an_arm_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options(["--arms", "shared"])
    assert "'shared' is none of streamed, resident" in capsys.readouterr().err
