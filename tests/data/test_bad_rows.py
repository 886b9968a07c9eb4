"""All bad rows of a set are listed, or left out and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tlora.data.build import BadRows
from tlora.data.prepare import Prepared, prepare
from tlora.data.request import PrepareRequest
from tlora.errors import DataError
from tlora.job import DataConfig

pytestmark = pytest.mark.usefixtures("forked_children")
GOOD = [json.dumps({"prompt": f"What is {i}?", "completion": f" It is {i}."}) for i in range(300)]
BAD = {  # by line: what is there, and what is said of it
    3: ("{broken", "broken JSON"),
    8: ("[1, 2]", r"[1, 2] is no JSON object"),
    141: ('{"prompt": "Nothing else"}', "column 'completion' is missing"),
    150: ('{"prompt": "a", "completion": "\\ud800"}', "text with a lone surrogate"),
    151: ('{"prompt": "b", "completion": "\\ud800"}', "text with a lone surrogate"),
    300: ("nothing", "broken JSON"),
}


def made(place: Path, tokenizer_path: Path, data: dict[str, Any]) -> Prepared | DataError:
    request = PrepareRequest("job", DataConfig.model_validate(data), str(tokenizer_path), 1000, place / "cache", place)
    return prepare([request])["job"]


def write(path: Path, bad: dict[int, tuple[str, str]]) -> Path:
    lines = list(GOOD)
    for number, (line, _) in bad.items():
        lines[number - 1] = line
    path.write_text("\n".join(lines) + "\n")
    return path


def test_all_are_listed_in_the_order_of_the_file(tmp_path: Path, tokenizer_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", BAD)
    found = made(tmp_path, tokenizer_path, {"path": "x.jsonl"})
    assert isinstance(found, DataError)
    head, *listed, end = str(found).splitlines()
    assert head == f"{file}: 6 of 300 rows are bad:" and end == "Mend them, or leave them out with on_bad_rows: drop"
    for line, (number, (_, said)) in zip(listed, BAD.items(), strict=True):
        assert line.startswith(f"  {file}, line {number}: ") and said in line


def test_a_single_one_has_the_same_remedy(tmp_path: Path, tokenizer_path: Path) -> None:
    """But not where it is the only row."""
    number, (line, said) = next(iter(BAD.items()))
    file = write(tmp_path / "x.jsonl", {number: (line, said)})
    found = str(made(tmp_path, tokenizer_path, {"path": "x.jsonl"}))
    assert found.startswith(f"{file}, line {number}: ") and said in found
    assert found.endswith(". Mend the row, or leave it out with on_bad_rows: drop")
    (tmp_path / "lone.jsonl").write_text(line + "\n")
    assert "on_bad_rows" not in str(made(tmp_path, tokenizer_path, {"path": "lone.jsonl"}))


def test_drop_trains_the_others(tmp_path: Path, tokenizer_path: Path) -> None:
    """Their set is that of a file without the bad rows."""
    write(tmp_path / "x.jsonl", BAD)
    rest = [line for number, line in enumerate(GOOD, 1) if number not in BAD]
    (tmp_path / "rest.jsonl").write_text("\n".join(rest) + "\n")
    found = made(tmp_path, tokenizer_path, {"path": "x.jsonl", "on_bad_rows": "drop"})
    expected = made(tmp_path, tokenizer_path, {"path": "rest.jsonl"})
    assert isinstance(found, Prepared) and isinstance(expected, Prepared)
    assert [sample.input_ids.tolist() for sample in map(found.train.__getitem__, range(294))] == [
        sample.input_ids.tolist() for sample in map(expected.train.__getitem__, range(294))
    ]
    assert len(found.train) == len(expected.train) == 294
    (warning,) = (line for line in found.warnings() if "are bad" in line)
    assert warning.startswith(f"6 of 300 rows are bad and left out ({tmp_path / 'x.jsonl'}):\n  ") and warning.count("\n") == 6
    assert not any("are bad" in line for line in expected.warnings())


def test_a_file_of_bad_rows_alone_is_refused_in_either_way(tmp_path: Path, tokenizer_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{broken\n[1]\n")
    for data in ({}, {"on_bad_rows": "drop"}):
        found = made(tmp_path, tokenizer_path, {"path": "x.jsonl"} | data)
        assert isinstance(found, DataError) and "2 of 2 rows are bad" in str(found)


def test_one_bad_row_is_told_by_itself(tmp_path: Path, tokenizer_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", {3: BAD[3]})
    assert str(made(tmp_path, tokenizer_path, {"path": "x.jsonl"})).startswith(f"{file}, line 3: broken JSON")


def test_a_table_with_bad_lines(tmp_path: Path, tokenizer_path: Path) -> None:
    (tmp_path / "x.csv").write_text("prompt,completion\na,b\nc\nd,e\nf,g,h\n")
    found = made(tmp_path, tokenizer_path, {"path": "x.csv", "on_bad_rows": "drop"})
    assert isinstance(found, Prepared) and (len(found.train), found.report.dropped, found.report.rows) == (2, 2, 4)


def test_the_first_twenty_in_order_however_they_are_found() -> None:
    bad = BadRows([Path("a"), Path("b")])
    for file, number in [("b", 1), *(("a", number) for number in range(40, 0, -1))]:
        bad.add(DataError(f"{file}, line {number}: wrong {number}"))
    head, *listed, end = str(bad.error("a + b", 100)).splitlines()
    assert head == "a + b: 41 of 100 rows are bad:" and end.startswith("Mend them")
    assert listed == [f"  a, line {number}: wrong {number}" for number in range(1, 21)] + ["  and 21 more"]
