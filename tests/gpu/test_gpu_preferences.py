"""Jobs that learn from pairs beside jobs that imitate answers, on a GPU: what they learn, and the bits that they have alone."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import tlora
from tests.engine.conftest import save_base
from tests.engine.tiny_runs import job, rows, sentence, sha256, write_rows
from tlora.registry import OBJECTIVES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PREFERENCES = [name for name in OBJECTIVES if name != "sft"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, pairs.jsonl (the chosen answer says "green", the rejected one "red"), labelled.jsonl (one by one), samples.jsonl."""
    directory = tmp_path_factory.mktemp("files")
    save_base(directory / "base", hidden_size=256, intermediate_size=512)
    rng = random.Random(5)
    pairs = [
        {"prompt": sentence(rng, 1, 9), "chosen": f" green {sentence(rng, 1, 9)}", "rejected": f" red {sentence(rng, 2, 40)}"}
        for _ in range(24)
    ]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    labelled = [{"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"} for row in pairs for name in list(row)[1:]]
    (directory / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    write_rows(directory / "samples.jsonl", 24, high=30)
    return directory


def train(files: Path, out: Path, jobs: list[dict[str, Any]], **settings: Any) -> dict[str, str]:
    """The adapters' hashes, by job."""
    specs = [tlora.JobSpec.model_validate(fields) for fields in jobs]
    results = tlora.train(specs, base_model=str(files / "base"), output_dir=str(out), dtype="bfloat16", device="cuda", **settings)
    assert all(result.status == "done" for result in results.values()), results
    return {name: sha256(out / name) for name in results}


def test_together_is_alone_bitwise(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    jobs = [
        job(name, str(files / f"{OBJECTIVES[name].learns_from}.jsonl"), objective=name, lora_dropout=0.1, batch_size=3)
        for name in PREFERENCES
    ]
    jobs.append(job("sft", str(files / "samples.jsonl"), r=16))
    together = train(files, tmp_path / "together", jobs, deterministic=True)
    for order in jobs:
        alone = train(files, tmp_path / f"alone-{order['name']}", [order], deterministic=True)
        assert alone[order["name"]] == together[order["name"]], order["name"]


def test_a_job_that_starts_from_an_adapter_compares_with_it(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step has learned nothing yet, also beside jobs that compare with the base; and together is alone in bits."""
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    train(files, tmp_path / "sft", [job("j", str(files / "samples.jsonl"), r=8)])
    start = str(tmp_path / "sft" / "j")
    first = {"dpo": math.log(2), "kto": 0.5}
    jobs = [
        job(name, str(files / f"{OBJECTIVES[name].learns_from}.jsonl"), objective=name, adapter_path=start, batch_size=3) for name in first
    ]
    jobs.append(job("fresh", str(files / "pairs.jsonl"), objective="dpo", batch_size=3))
    together = train(files, tmp_path / "together", jobs, deterministic=True)
    for name, loss in {**first, "fresh": math.log(2)}.items():
        row = rows(tmp_path / "together" / name / "metrics.jsonl")[0]
        assert row["loss"] == pytest.approx(loss, abs=1e-3), (name, row)
    for order in jobs:
        alone = train(files, tmp_path / f"alone-{order['name']}", [order], deterministic=True)
        assert alone[order["name"]] == together[order["name"]], order["name"]


@pytest.mark.parametrize("objective", PREFERENCES)
def test_a_job_learns_to_tell_the_answers_apart(objective: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    order = job(
        "a",
        {"path": str(files / f"{OBJECTIVES[objective].learns_from}.jsonl"), "eval_size": 4},
        objective=objective,
        beta=0.2,
        max_steps=24,
        logging_steps=2,
    )
    train(files, tmp_path / "out", [order, job("b", str(files / "samples.jsonl"))])
    found = [row for row in rows(tmp_path / "out/a/metrics.jsonl") if "loss" in row]
    assert max(row["rewards/margins"] for row in found[1:]) > found[0]["rewards/margins"]
