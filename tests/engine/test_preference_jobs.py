"""Jobs that learn from pairs, through `tlora.train`: what they learn and report, beside other jobs as alone, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import math
import random
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from tests.engine.tiny_runs import job, rows, sentence, sha256, train
from tlora.job import JobSpec, ObjectiveName
from tlora.objectives import OBJECTIVES

METRICS = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chosen answer says "green", the rejected one "red": easy to tell apart."""
    rng = random.Random(5)
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    found = [
        {"prompt": sentence(rng, 1, 3), "chosen": f" green {sentence(rng, 1, 3)}", "rejected": f" red {sentence(rng, 2, 6)}"}
        for _ in range(18)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def test_every_name_of_an_objective_has_one() -> None:
    assert {"sft", *OBJECTIVES} == set(get_args(ObjectiveName))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_job_learns_to_tell_the_answers_apart(objective: str, base: Path, pairs: Path, tmp_path: Path) -> None:
    order = job("a", {"path": str(pairs), "eval_size": 4}, objective=objective, beta=0.2, max_steps=12, eval_steps=6, logging_steps=2)
    result = train(base, tmp_path / "out", [order])["a"]
    assert result.status == "done", result
    train_rows = [row for row in rows(tmp_path / "out/a/metrics.jsonl") if "loss" in row]
    evaluations = [row for row in rows(tmp_path / "out/a/metrics.jsonl") if "eval_loss" in row]
    assert len(train_rows) == 6 and all(set(row) >= METRICS for row in train_rows)
    assert train_rows[-1]["rewards/accuracies"] == 1 and train_rows[-1]["rewards/margins"] > train_rows[0]["rewards/margins"]
    assert [row["step"] for row in evaluations] == [0, 6, 12]
    assert all({f"eval_{name}" for name in METRICS} <= set(row) for row in evaluations)
    page = (tmp_path / "out/report.html").read_text()
    assert "Reward margin" in page and "Reward accuracy" in page
    if objective == "dpo":
        assert evaluations[0]["eval_loss"] == pytest.approx(math.log(2)) and evaluations[-1]["eval_loss"] < 0.5


def orders(data: Path, pairs: Path) -> list[dict[str, Any]]:
    return [
        job("dpo", {"path": str(pairs), "eval_size": 3}, objective="dpo", lora_dropout=0.1, eval_steps=2, batch_size=3),
        job("sft", str(data / "a.jsonl")),
        job("orpo", str(pairs), objective="orpo", r=8, batch_size=2),
    ]


def test_alone_is_together_and_what_is_resumed(wide_base: Path, data: Path, pairs: Path, tmp_path: Path) -> None:
    jobs = [{**order, "lr_scheduler_type": "constant"} for order in orders(data, pairs)]
    alone: dict[str, str] = {}
    for order in jobs:
        train(wide_base, tmp_path / order["name"], [order], deterministic=True)
        alone[order["name"]] = sha256(tmp_path / order["name"] / order["name"])
    for i, budget in enumerate(("auto", 96)):
        out = tmp_path / f"together-{i}"
        train(wide_base, out, jobs if i else jobs[::-1], deterministic=True, token_budget=budget)
        assert {name: sha256(out / name) for name in alone} == alone
    out = tmp_path / "resumed"
    train(wide_base, out, [{**order, "max_steps": 3} for order in jobs], deterministic=True)
    train(wide_base, out, jobs, deterministic=True, resume=True)
    assert {name: sha256(out / name) for name in alone} == alone


def test_a_pair_longer_than_the_budget_raises_it(base: Path, pairs: Path, tmp_path: Path) -> None:
    """A unit is never split, as a sample is not."""
    results = train(base, tmp_path / "out", [job("a", str(pairs), objective="dpo")], token_budget=16)
    assert results["a"].status == "done"
    budgets = [row["token_budget"] for row in rows(tmp_path / "out/run.jsonl") if "token_budget" in row]
    assert all(budget > 16 for budget in budgets)


@pytest.mark.parametrize(
    ("objective", "name", "words"),
    [("sft", "pairs", "Set objective: dpo or orpo"), ("dpo", "samples", "needs the columns 'chosen' and 'rejected'")],
)
def test_data_of_the_other_kind_fails_its_job_alone(
    objective: str, name: str, words: str, base: Path, data: Path, pairs: Path, tmp_path: Path
) -> None:
    path = pairs if name == "pairs" else data / "a.jsonl"
    results = train(base, tmp_path / "out", [job("wrong", str(path), objective=objective), job("right", str(data / "b.jsonl"))])
    assert results["wrong"].status == "failed" and words in results["wrong"].reason and results["right"].status == "done"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"objective": "dpo", "data": {"path": "x", "train_on": "all"}}, "train_on: all has no meaning"),
        ({"objective": "dpo", "data": {"path": "x", "format": "chat"}}, "does not learn from format chat"),
        ({"data": {"path": "x", "format": "preference"}}, "does not learn from format preference"),
        ({"objective": "dpo", "beta": 0}, "beta"),
        ({"objective": "ppo"}, "objective"),
    ],
)
def test_what_an_objective_does_not_take(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        JobSpec.model_validate({"name": "a", "data": "x", **fields})


def test_the_example_of_an_own_loop_with_pairs(base: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(__file__).parents[2] / "examples" / "own_loop_dpo.py"
    found = importlib.util.spec_from_file_location("own_loop_dpo", source)
    assert found and found.loader
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    metrics = example.main(str(base), str(tmp_path / "adapter"), str(pairs), steps=15)
    assert metrics["rewards/accuracies"] == 1 and metrics["loss"] < 0.6 and (tmp_path / "adapter/adapter_model.safetensors").is_file()
    assert capsys.readouterr().out.count("loss") == 15
