"""What the benchmark of `dispatch` says, of few samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import dispatch


def test_it_tells_time_and_distance_of_each_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "SIZES", ((20, 2), (30, 4)))
    file = tmp_path / "dispatch.json"
    dispatch.main(["--repeats", "2", "--commit", "abc", "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["benchmark"] == "dispatch" and found["commit"] == "abc" and len(found["rows"]) == 4
    for row, line in zip(found["rows"], capsys.readouterr().out.splitlines(), strict=True):
        assert 0 < row["milliseconds_median"] <= row["milliseconds_worst"] and 0 <= row["excess_median"] <= row["excess_worst"]
        assert f"{row['items']} items" in line and f"{row['ranks']} ranks" in line


def test_no_repeats_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dispatch.main(["--repeats", "0"])
    assert "0 repeats measure nothing" in capsys.readouterr().err
