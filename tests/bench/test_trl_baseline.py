"""What TRL is measured on, and what is made of its figures. TRL itself is not among the packages that the tests need: transformers' Trainer
stands in for it, as for users without TRL.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import trainers, trl_baseline
from bench.base_files import write_tokenizer
from bench.trainers import Setting, Target, Task
from bench.trl_baseline import SETTINGS

PADDED = next(setting for setting in SETTINGS if setting.name == "padded")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    directory = tmp_path_factory.mktemp("tasks")
    write_tokenizer("tiny", directory / "tokenizer")
    options = trl_baseline.read_options(["--shape", "tiny", "--jobs", "conversations,identity", "--max-length", "48", "--max-steps", "44"])
    return trl_baseline.make_tasks(options, directory / "tokenizer", directory)


@pytest.mark.slow
def test_a_row_trains_the_tokens_that_have_a_weight(tasks: list[Task]):
    sample = tasks[0].data[0]
    row = trainers.row_of(sample)
    assert row["input_ids"] == sample.input_ids.tolist()
    assert [label != -100 for label in row["labels"]] == (sample.loss_weights > 0).tolist()


def test_tokens_are_counted_without_padding():
    counts: list[int] = []
    padded = trainers._counting(
        lambda _: {"input_ids": torch.zeros(2, 4), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}, counts
    )
    flat = trainers._counting(lambda _: {"input_ids": torch.zeros(1, 7)}, counts)
    padded(None), flat(None)
    assert counts == [6, 7]


def test_the_speed_of_all_is_that_of_one_job_after_another(tasks: list[Task]):
    ten, thirty = (replace(task, tokens=tokens) for task, tokens in zip(tasks, (10, 30), strict=True))
    speeds = {"identity": {"tokens_per_second": 10.0}, "conversations": {"tokens_per_second": 30.0}}
    assert trl_baseline.speed_of([ten, thirty], speeds) == pytest.approx(20.0)
    assert trl_baseline.speed_of([ten, thirty], speeds | {"identity": {"error": "no kernel"}}) is None


def test_a_job_that_does_not_fit_is_tried_with_checkpointing(tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = Target("tiny", torch.device("cpu"), tmp_path, 5, 1.0, tmp_path)

    def train(setting: Setting, *_: Any) -> dict[str, Any]:
        if not setting.checkpointing:
            raise torch.OutOfMemoryError
        return {"checkpointing": setting.checkpointing}

    monkeypatch.setattr(trainers, "train", train)
    assert trl_baseline.measure(PADDED, tasks[0], target) == {"checkpointing": True}

    def never(*_: Any) -> dict[str, Any]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(trainers, "train", never)
    assert "out of memory" in trl_baseline.measure(PADDED, tasks[0], target)["error"]


CPU = torch.device("cpu")


def chosen(tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[dict[str, Any]]:
    """Rows where padding-free is the fastest."""
    options = trl_baseline.read_options(["--shape", "tiny", "--device", "cpu", "--settings", "padded,padding-free,documented", *arguments])
    monkeypatch.setattr(trainers, "train", lambda setting, *_: {"tokens_per_second": 20.0 if setting.padding_free else 10.0})
    found: dict[str, Any] = {"rows": []}
    target = Target("tiny", CPU, tmp_path, 0, 1.0, tmp_path)
    trl_baseline._measure_settings(options, tasks, target, 0.0, found)
    return found["rows"]


def test_the_setting_is_chosen_on_the_jobs_of_the_most_tokens(tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = chosen(tasks, tmp_path, monkeypatch, "--pilot", "1")
    most = max(tasks, key=lambda task: task.tokens).spec.name
    assert list(rows[0]["jobs"]) == [most] and set(rows[1]["jobs"]) == {task.spec.name for task in tasks}
    assert [row["best"] for row in rows if "best" in row] == [True] and rows[1]["best"]
    assert [row["tokens_per_second"] for row in rows] == [None, 20.0, None]
