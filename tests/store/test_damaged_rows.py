"""Damaged rows of a job's metrics are said when its run is taken up again."""

from __future__ import annotations

from pathlib import Path

from tlora.store.run_directory import cut_rows


def test_damaged_rows_are_counted_in_a_note(tmp_path: Path) -> None:
    path, notes = tmp_path / "metrics.jsonl", list[str]()
    path.write_bytes(b'{"step": 1}\n\xff\x00\n{"step": 2, "lo\n{"step": 3}\n{"step": 9}\n{"st')
    cut_rows(path, lambda row: row["step"] < 5, notes.append)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'
    expected = f"{path}: 2 rows are damaged and left out, 2 kept; the training is not touched by that, only its recorded metrics"
    assert notes == [expected]
    cut_rows(path, lambda row: True, notes.append)
    assert notes == [expected], "said once"
