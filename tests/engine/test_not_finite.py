"""A base that gives NaN for one rare token: steps that change nothing are counted and told, evaluations without a number decide nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.tiny_runs import job, rows, train, write_rows
from tlora.engine.watcher import Watcher
from tlora.json_file import read_object
from tlora.store.metrics import finite_mean, means

_RARE = "~"


@pytest.fixture(scope="module")
def rare(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base, clean.jsonl of 12 rows, and odd.jsonl: 7 like them and one with the rare token, whose prompt it is."""
    directory = tmp_path_factory.mktemp("rare")
    tokenizer = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer(_RARE, add_special_tokens=False)["input_ids"][-1]] = math.nan
    model.save_pretrained(directory / "base")
    tokenizer.save_pretrained(directory / "base")
    write_rows(directory / "clean.jsonl", 12)
    write_rows(directory / "odd.jsonl", 7, seed=1)
    with (directory / "odd.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": _RARE, "completion": " green"}) + "\n")
    return directory


def run(rare: Path, out: Path, order: dict[str, Any], **settings: Any) -> tuple[Any, list[str]]:
    lines: list[str] = []
    return train(rare / "base", out, [order], watcher=Watcher(note=lines.append), **settings)[order["name"]], lines


def about(lines: list[str], words: str) -> list[str]:
    return [line for line in lines if words in line]


def test_steps_that_change_nothing_are_counted_and_told(rare: Path, tmp_path: Path) -> None:
    """Also over a resume: told once as the first of them, and as the sum at the end."""
    order = job("a", str(rare / "odd.jsonl"), max_steps=8, logging_steps=2, lr_scheduler_type="constant")
    half, said_first = run(rare, tmp_path, {**order, "max_steps": 4})
    result, said = run(rare, tmp_path, order, resume=True)
    logged = [row for row in rows(tmp_path / "a/metrics.jsonl") if "loss" in row]
    assert (half.skipped_steps, result.skipped_steps) == (2, 4)  # one of the two steps of each epoch
    assert result.status == "done" and math.isfinite(result.train_loss) and all(row["loss"] is not None for row in logged)
    first, sums = about(said_first, "changed nothing: its loss is not finite"), about([*said_first, *said], "steps changed nothing")
    assert len(first) == 1 and not about(said, "its loss is not finite")
    assert [line[: line.index(" steps")] for line in sums] == ["a: 2 of 4", "a: 4 of 8"]
    step = int(first[0].split()[2])
    assert all(line.startswith(f"a: {count} of") and f"first at step {step}" in line for line, count in zip(sums, (2, 4), strict=True))
    assert read_object(tmp_path / "a/result.json")["skipped_steps"] == 4


def test_a_clean_job_says_none_of_it(rare: Path, tmp_path: Path) -> None:
    result, said = run(rare, tmp_path, job("a", {"path": str(rare / "clean.jsonl"), "eval_size": 3}, eval_steps=2))
    assert result.skipped_steps == 0 and not about(said, "finite")


def test_an_evaluation_without_a_number_is_never_the_best(rare: Path, tmp_path: Path) -> None:
    data = {"path": str(rare / "clean.jsonl"), "eval_path": str(rare / "odd.jsonl")}
    result, said = run(rare, tmp_path, job("a", data, eval_steps=2, load_best_model_at_end=True))
    assert result.status == "done" and result.best_step is None and result.steps == 6
    assert about(said, "a: the evaluation at step 0 has no finite loss: it is never the best")
    assert len(about(said, "has no finite loss")) == 1 and about(said, "no evaluation had a finite loss, so none is the best")


def test_an_evaluation_without_a_number_stops_nothing(rare: Path, tmp_path: Path) -> None:
    data = {"path": str(rare / "clean.jsonl"), "eval_path": str(rare / "odd.jsonl")}
    result, said = run(rare, tmp_path, job("a", data, eval_steps=1, early_stopping_patience=2))
    assert result.status == "done" and result.steps == 6
    assert about(said, "the evaluation at step 0 has no finite loss: early_stopping_patience does not count it")


def test_means_are_over_what_is_finite() -> None:
    assert finite_mean([1.0, math.nan, 3.0, math.inf]) == 2.0 and math.isnan(finite_mean([math.nan])) and math.isnan(finite_mean([]))
    found = means([{"kl": 1.0, "margin": math.nan}, {"kl": math.nan}, {"kl": 2.0}])
    assert found["kl"] == 1.5 and math.isnan(found["margin"])
