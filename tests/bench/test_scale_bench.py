"""`bench.scale`: its table, and a small cluster of fake workers whose rack and whose controller are lost."""

from __future__ import annotations

from typing import Any

import pytest

from bench import scale_table
from bench.scale import measure, spread


def test_percentiles_are_of_the_ordered_values() -> None:
    assert spread([float(number) for number in range(100, -1, -1)]) == {
        "count": 101,
        "median_milliseconds": 50.0,
        "p99_milliseconds": 99.0,
        "worst_milliseconds": 100.0,
    }


def test_the_table_has_a_column_for_each_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {
        "clock": {"median_milliseconds": 1.0, "p99_milliseconds": 40.0},
        "processor": {"median_milliseconds": 0.5, "p99_milliseconds": 2.0},
    }
    seconds = ("first_start", "first_start_processor", "rack_lost", "rack_lost_processor", "restart", "restart_processor")
    row: dict[str, Any] = {"hosts": 1000, "gpus": 8000, "jobs": 10000, "hosts_of_the_lost_rack": 8, "decided": times, "answered": times}
    row |= {f"{name}_seconds": 3.25 for name in seconds} | {"messages_per_second": 1234.5, "processor_share": 0.5, "peak_gigabytes": 0.25}
    row |= {"load_average_before": 1.0, "load_average_after": 2.0}
    facts = {"commit": "abc", "cores": 2, "device": "a CPU"}
    documents = {"first": facts | {"rows": [row, row | {"hosts": 10}]}, "last": facts | {"rows": [row | {"jobs": 77}], "commit": "def"}}
    monkeypatch.setattr(scale_table, "document_of", documents.__getitem__)
    monkeypatch.setattr(scale_table, "RESULTS", ("first", "last"))
    lines = scale_table.format_table("results").splitlines()
    assert lines[0] == "| | 10 hosts | 1,000 hosts |" and all(line.count("|") == 4 for line in lines if line.startswith("|"))
    assert "| until it is carried out, by the clock: median, p99 (ms) | 1.0, 40.0 | 1.0, 40.0 |" in lines
    assert "| jobs | 10,000 | 77 |" in lines and "| measured | [abc](results/first) | [def](results/last) |" in lines


@pytest.mark.slow
def test_a_small_cluster_settles_after_each_loss() -> None:
    row = measure(2, 20, 0.5)
    assert row["gpus"] == 16 and row["messages_per_second"] > 0 and row["peak_gigabytes"] < 1
    assert 0 < row["rack_lost_seconds"] < 60 and 0 < row["restart_seconds"] < 120
    assert row["answered"]["processor"]["count"] >= 20 and not row["log"]
