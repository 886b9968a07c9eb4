"""What TRL is measured on, and what is made of its figures. TRL itself is not among the packages that the tests need."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import trl_baseline
from bench.base_files import write_tokenizer
from bench.trl_baseline import SETTINGS, Setting, Target, Task

PADDED = next(setting for setting in SETTINGS if setting.name == "padded")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    directory = tmp_path_factory.mktemp("tasks")
    write_tokenizer("tiny", directory / "tokenizer")
    options = trl_baseline.read_options(["--shape", "tiny", "--jobs", "conversations,identity", "--max-length", "48", "--max-steps", "44"])
    return trl_baseline.make_tasks(options, directory / "tokenizer", directory)


def test_tasks_are_jobs_of_the_file_with_the_tokens_of_their_steps(tasks: list[Task]):
    assert [(task.spec.name, task.spec.r, task.spec.batch_size) for task in tasks] == [("identity", 8, 4), ("conversations", 8, 2)]
    identity = tasks[0]
    assert -(-len(identity.data) // 4) == 22, "44 steps are two epochs, the last batch of each a smaller one"
    assert identity.tokens == 2 * int(identity.data.lengths.sum())


def test_a_row_trains_the_tokens_that_have_a_weight(tasks: list[Task]):
    sample = tasks[0].data[0]
    row = trl_baseline._row(sample)
    assert row["input_ids"] == sample.input_ids.tolist()
    assert [label != -100 for label in row["labels"]] == (sample.loss_weights > 0).tolist()


def test_tokens_are_counted_without_padding():
    counts: list[int] = []
    padded = trl_baseline._counting(
        lambda _: {"input_ids": torch.zeros(2, 4), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}, counts
    )
    flat = trl_baseline._counting(lambda _: {"input_ids": torch.zeros(1, 7)}, counts)
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

    monkeypatch.setattr(trl_baseline, "_train", train)
    assert trl_baseline.measure(PADDED, tasks[0], target) == {"checkpointing": True}

    def never(*_: Any) -> dict[str, Any]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(trl_baseline, "_train", never)
    assert "out of memory" in trl_baseline.measure(PADDED, tasks[0], target)["error"]


def test_what_is_missing_or_unknown_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        trl_baseline.read_options(["--settings", "packed,fast"])
    assert "'fast'" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="pip install trl"):
        trl_baseline.run_benchmark(trl_baseline.read_options([]))
