"""Tasks in LobRA's setting: the same samples with and without padding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from bench import lobra, long_tasks


def _rows(work: str, directory: Path) -> dict[str, list[dict[str, list[int]]]]:
    directory.mkdir()
    path, facts = long_tasks.write_jobs(work, 500, directory)
    jobs = yaml.safe_load(path.read_text())["jobs"]
    rows = {job["name"]: [json.loads(line) for line in Path(job["data"]).read_text().splitlines()] for job in jobs}
    for job in jobs:
        held = sum(len(row["input_ids"]) for row in rows[job["name"]]) / len(rows[job["name"]])
        assert facts[job["name"]]["tokens_a_step"] == pytest.approx(job["batch_size"] * held)
    return rows


def test_padding_adds_tokens_without_loss_and_nothing_else(tmp_path: Path) -> None:
    plain, padded = _rows("few-long", tmp_path / "plain"), _rows("few-long-padded", tmp_path / "padded")
    assert list(plain) == list(padded) == list(lobra.TASKS)
    for name, rows in plain.items():
        for row, other in zip(rows, padded[name], strict=True):
            length, size = len(row["input_ids"]), len(other["input_ids"])
            assert size == lobra.bucket_of(length) and len(other.get("labels", other["input_ids"])) == size
            assert set(other.get("labels", [])[length:]) <= {-100} and -100 not in other.get("labels", [])[:length]


def test_two_gpus_have_an_eighth_of_the_samples_of_sixteen() -> None:
    assert [task.batch_size * 8 for task in long_tasks.tasks_of("many-long")] == [128, 128, 128, 128, 64, lobra.MIXES["many long samples"]]
