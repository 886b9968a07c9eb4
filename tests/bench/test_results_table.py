"""The keys that pages cite, and the table of speeds."""

from __future__ import annotations

from typing import Any

import pytest

from bench.result_keys import RESULTS, number_at
from bench.results_table import WORKS, format_table

DOCUMENT: dict[str, Any] = {
    "rows": [{"system": "ours", "speed": 30.0}, {"system": "peft", "speed": 10.0, "best": True}, {"system": "peft", "speed": 8.0}],
    "by job": {"a": 2.0},
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rows[0].speed", 30.0),
        ("rows[system=peft][best=true].speed", 10.0),
        ("by job.a", 2.0),
        ("median rows[].speed", 10.0),
        ("rows[0].speed / rows[best=true].speed", 3.0),
        ("rows[0].speed / 15", 2.0),
    ],
)
def test_a_key_finds_its_value(key: str, value: float) -> None:
    assert number_at(DOCUMENT, key) == value


def test_each_row_of_the_table_links_to_its_file() -> None:
    lines = format_table("bench/results").splitlines()[2:]
    systems = [system for _, _, systems in WORKS for system in systems]
    assert len(lines) == len(systems)
    for line, (name, file, key) in zip(lines, systems, strict=True):
        assert f"| {name} | [" in line and f'](bench/results/{file} "{key}") |' in line and (RESULTS / file).is_file()
