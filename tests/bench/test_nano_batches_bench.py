"""The steps of a lone job over two stages, each a process, with every number of slices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import nano_batches
from tlora.batching.nano_batches import TRIALS


@pytest.mark.slow
def test_a_tiny_job_is_timed_and_searched(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    nano_batches.main(["--rounds", "2", "--searches", "1", "--lengths", "4", "6", "--commit", "abc", "--json", str(out)])
    found = json.loads(out.read_text())
    assert list(found["step_seconds"]) == [str(count) for count in range(1, 9)]
    assert all(of["median"] > 0 for of in found["step_seconds"].values())
    (search,) = found["searches"]
    assert 1 <= search["slices"] <= 8 and search["steps"] <= TRIALS + 1 and str(search["slices"]) in search["tried"]
    assert 0 < found["found_over_best"]["median"] <= 1


@pytest.mark.parametrize("arguments", [["--rounds", "1"], ["--rounds", "3", "--searches", "4"]])
def test_too_little_to_measure_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        nano_batches.main(arguments)
    assert "Give 2 rounds or more" in capsys.readouterr().err
