"""Figures of our own systems: what is counted, and that nothing that went wrong becomes a figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import peft_baseline, throughput
from bench.shapes import make_model
from bench.together import Plan, train_one_by_one, train_together
from bench.workload import Job, Order, make_jobs
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

CPU = torch.device("cpu")


@pytest.fixture
def model() -> SuperModel:
    return SuperModel(make_base(make_model("tiny", CPU, torch.float32), "tiny"))


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    return make_jobs(Order(4, (4, 8), 2, 16), 512, None, tmp_path)


def test_together_counts_useful_tokens_of_equal_jobs_equally(model: SuperModel, jobs: list[Job]):
    run = train_together(model, jobs, Plan(64, 0.0))
    assert len(run.windows) == 3
    assert sum(run.tokens.values()) == sum(tokens for tokens, _ in run.windows) == run.computed_tokens
    assert len(set(run.tokens.values())) == 1, run.tokens
    assert run.steps == sum(run.tokens.values()) // (2 * 16)
    assert run.tokens_per_second > 0 and run.first_step_seconds > 0
    assert not model.bank.jobs(), "jobs were left behind for the next measurement"


@pytest.mark.slow
def test_one_by_one_runs_each_job_with_nobody_else(model: SuperModel, jobs: list[Job], monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    original = model.forward_backward
    monkeypatch.setattr(model, "forward_backward", lambda batch, *more: (seen.append(len(batch.spans)), original(batch, *more))[1])
    assert set(train_one_by_one(model, jobs, Plan(64, 0.0))) == {job.spec.name for job in jobs}
    assert set(seen) == {1}


def test_a_job_that_fails_ends_the_benchmark(model: SuperModel, jobs: list[Job], monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(model, "forward_backward", broken)
    with pytest.raises(RuntimeError, match="no such kernel"):
        train_together(model, jobs, Plan(64, 0.0))


@pytest.mark.slow
def test_the_whole_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peft_baseline, "settings_for", lambda _jobs: [peft_baseline.Setting()])
    arguments = "--shape tiny --device cpu --jobs 2 --ranks 4 --batch-size 2 --lengths 16 --token-budget 64 --seconds 0 --peft-steps 2"
    out = tmp_path / "out.json"
    options = throughput.read_options([*arguments.split(), "--out", str(out), "--commit", "a copy"])
    torch.set_float32_matmul_precision("high")
    found: dict[str, Any] = throughput.run_benchmark(options)
    assert found["setup"]["float32_matmul_precision"] == torch.get_float32_matmul_precision() == "highest", "fp32 would be TF32 on a GPU"
    assert json.loads(out.read_text()) == found
    assert [row["system"] for row in found["rows"]] == ["together", "one-by-one", "peft"]
    assert found["rows"][2]["best"] and found["commit"] == "a copy"
    table = throughput.format_table(found)
    ratio = found["rows"][0]["tokens_per_second"] / found["rows"][2]["tokens_per_second"]
    assert f"{ratio:.2f}" in table and "a copy" in table and "PEFT plain (best)" in table
