"""Jobs that learn from pairs, through `tlora.train`: what they learn and report, beside other jobs as alone, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tests.engine.tiny_runs import TWO_LINEARS, job, rows, run_spec, sentence, sha256, train
from tlora.data.prepare import Prepared, prepare
from tlora.data.request import prepare_requests
from tlora.job import JobSpec
from tlora.registry import OBJECTIVES

PAIR = ("chosen", "rejected")
PREFERENCES = [name for name in OBJECTIVES if name != "sft"]
METRICS = {"pairs": {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}, "labelled": {"kl"}}


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


@pytest.fixture(scope="module")
def answers(pairs: Path) -> Path:
    """The same answers one by one, labelled."""
    path = pairs.parent / "answers.jsonl"
    found = [json.loads(line) for line in pairs.read_text().splitlines()]
    labelled = [{"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"} for row in found for name in PAIR]
    random.Random(7).shuffle(labelled)
    path.write_text("".join(json.dumps(row) + "\n" for row in labelled))
    return path


def data_of(objective: str, pairs: Path) -> Path:
    """What `objective` learns from."""
    return pairs if OBJECTIVES[objective].learns_from == "pairs" else pairs.parent / "answers.jsonl"


@pytest.mark.parametrize(
    "objective", [pytest.param(name, marks=[] if name in ("dpo", "kto") else pytest.mark.slow) for name in PREFERENCES]
)
@pytest.mark.usefixtures("answers")
def test_a_job_learns_to_tell_the_answers_apart(objective: str, base: Path, pairs: Path, tmp_path: Path) -> None:
    metrics = METRICS[OBJECTIVES[objective].learns_from]
    order = job(
        "a",
        {"path": str(data_of(objective, pairs)), "eval_size": 4},
        objective=objective,
        beta=0.2,
        max_steps=12,
        eval_steps=6,
        logging_steps=2,
    )
    result = train(base, tmp_path / "out", [order])["a"]
    assert result.status == "done", result
    train_rows = [row for row in rows(tmp_path / "out/a/metrics.jsonl") if "loss" in row]
    evaluations = [row for row in rows(tmp_path / "out/a/metrics.jsonl") if "eval_loss" in row]
    assert len(train_rows) == 6 and all(set(row) >= metrics for row in train_rows)
    assert train_rows[-1]["rewards/margins"] > train_rows[0]["rewards/margins"]
    assert train_rows[-1].get("rewards/accuracies", 1) == 1
    assert [row["step"] for row in evaluations] == [0, 6, 12]
    assert all({f"eval_{name}" for name in metrics} <= set(row) for row in evaluations)
    page = (tmp_path / "out/report.html").read_text()
    assert "Reward margin" in page and ("Reward accuracy" in page, "KL of the global batch" in page) == (
        objective != "kto",
        objective == "kto",
    )
    if objective == "dpo":
        assert evaluations[0]["eval_loss"] == pytest.approx(math.log(2)) and evaluations[-1]["eval_loss"] < 0.5


def orders(data: Path, pairs: Path) -> list[dict[str, Any]]:
    return [
        job("dpo", {"path": str(pairs), "eval_size": 3}, objective="dpo", lora_dropout=0.1, eval_steps=2, batch_size=3, gpus=2),
        job("sft", str(data / "a.jsonl")),
        job("orpo", str(pairs), objective="orpo", r=8, batch_size=2),
        job(
            "kto",
            {"path": str(data_of("kto", pairs)), "eval_size": 5},
            objective="kto",
            lora_dropout=0.1,
            eval_steps=2,
            batch_size=2,
            gpus=2,
            logging_steps=3,
        ),
    ]


@pytest.mark.usefixtures("answers")
def test_alone_is_together_and_what_is_resumed(wide_base: Path, data: Path, pairs: Path, tmp_path: Path) -> None:
    few = {"lr_scheduler_type": "constant", "max_steps": 4, "target_modules": TWO_LINEARS}
    jobs = [order | few for order in orders(data, pairs)]
    alone: dict[str, str] = {}
    for order in jobs:
        train(wide_base, tmp_path / order["name"], [order], deterministic=True)
        alone[order["name"]] = sha256(tmp_path / order["name"] / order["name"])
    train(wide_base, tmp_path / "together", jobs[::-1], deterministic=True, token_budget=96)
    assert {name: sha256(tmp_path / "together" / name) for name in alone} == alone
    out = tmp_path / "resumed"
    train(wide_base, out, [{**order, "max_steps": 2} for order in jobs], deterministic=True)
    train(wide_base, out, jobs, deterministic=True, resume=True)
    assert {name: sha256(out / name) for name in alone} == alone


def test_a_pair_longer_than_the_budget_is_a_micro_batch_by_itself(base: Path, pairs: Path, tmp_path: Path) -> None:
    """A unit is never split, as a sample is not."""
    results = train(base, tmp_path / "out", [job("a", str(pairs), objective="dpo")], token_budget=16)
    assert results["a"].status == "done"
    assert json.loads((tmp_path / "out/run.json").read_text())["token_budget"] == 16
    computed = [(row["micro_batches"], row["tokens"]) for row in rows(tmp_path / "out/run.jsonl") if row.get("micro_batches")]
    assert computed and all(tokens > 16 * count for count, tokens in computed)


@pytest.mark.parametrize(
    ("objective", "name", "words"),
    [
        ("sft", "pairs", "Set objective: dpo or orpo"),
        ("dpo", "samples", "needs the columns 'chosen' and 'rejected'"),
        ("sft", "answers", "Set objective: kto"),
        ("kto", "samples", "a column 'label' with true or false"),
        ("kto", "pairs", "Set objective: dpo or orpo"),
    ],
)
def test_data_of_the_other_kind_fails_its_job_alone(
    objective: str, name: str, words: str, base: Path, data: Path, pairs: Path, answers: Path, tmp_path: Path
) -> None:
    path = {"pairs": pairs, "answers": answers, "samples": data / "a.jsonl"}[name]
    results = train(base, tmp_path / "out", [job("wrong", str(path), objective=objective), job("right", str(data / "b.jsonl"))])
    assert results["wrong"].status == "failed" and words in results["wrong"].reason and results["right"].status == "done"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"objective": "dpo", "data": {"path": "x", "train_on": "all"}}, "train_on: all has no meaning"),
        ({"objective": "kto", "data": {"path": "x", "packing": True}}, "Take packing out"),
        ({"objective": "dpo", "data": {"path": "x", "format": "chat"}}, "does not learn from format chat"),
        ({"data": {"path": "x", "format": "preference"}}, "does not learn from format preference"),
        ({"objective": "dpo", "beta": 0}, "beta"),
        ({"objective": "ppo"}, "objective"),
        ({"objective": "kto", "data": {"path": "x", "format": "text"}}, "does not learn from format text"),
        ({"objective": "kto", "batch_size": 1}, "batch_size is 1"),
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


@pytest.mark.parametrize("wanted", [True, False])
def test_answers_of_one_kind_alone(wanted: bool, base: Path, answers: Path, tmp_path: Path) -> None:
    """Their metrics are of that kind alone, and the answers become likelier, or less likely."""
    rows_of_kind = [line for line in answers.read_text().splitlines() if json.loads(line)["label"] is wanted]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(rows_of_kind))
    train(base, tmp_path / "out", [job("a", str(path), objective="kto", max_steps=8)])
    found = [row for row in rows(tmp_path / "out/a/metrics.jsonl") if "loss" in row]
    mine, other = ("rewards/chosen", "rewards/rejected") if wanted else ("rewards/rejected", "rewards/chosen")
    assert all(mine in row and other not in row and "rewards/margins" not in row for row in found)
    assert (found[-1][mine] > 0.01) if wanted else (found[-1][mine] < -0.01)


def test_what_a_label_says_of_a_chat_is_of_its_last_answer(base: Path, tmp_path: Path) -> None:
    turns = [("user", "red?"), ("assistant", "green boat"), ("user", "blue?"), ("assistant", "small stone")]
    chat = [{"role": role, "content": content} for role, content in turns]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat, "label": label}) + "\n" for label in (True, False) * 3))
    requests = prepare_requests(run_spec(base, tmp_path, [job("a", str(path), objective="kto")]), 500)
    prepared = prepare(requests)["a"]
    assert isinstance(prepared, Prepared)
    first, second = prepared.train[0], prepared.train[1]
    assert (first.loss_weights == -second.loss_weights).all() and (first.loss_weights >= 0).all() and first.loss_weights.any()
    trained = first.loss_weights.nonzero()[0]
    assert (np.diff(trained) == 1).all() and trained[0] > len(first.input_ids) / 2
