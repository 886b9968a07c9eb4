"""`--resume` with other lengths and more jobs: what goes on, at which learning rate, what is said and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from tests.engine.tiny_runs import job, rows, sha256, steps_taken, train
from tlora.engine import train as front_door
from tlora.engine.job_length import _describe
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError
from tlora.job import JobSpec
from tlora.wording.card_seal import CARD_FILE


def order(data: Path, name: str = "a", **fields: Any) -> dict[str, Any]:
    return job(name, str(data / "a.jsonl"), **{"max_steps": 4, "save_steps": 2, "lora_dropout": 0.1} | fields)


def resume(base: Path, out: Path, jobs: list[dict[str, Any]], **settings: Any) -> tuple[Any, list[str]]:
    lines: list[str] = []
    return train(base, out, jobs, resume=True, watcher=Watcher(note=lines.append), **settings), lines


def rates(directory: Path) -> list[float]:
    return [row["learning_rate"] for row in rows(directory / "metrics.jsonl") if "loss" in row]


def trainers_rates(kind: str, warmup: float, total: int) -> list[float]:
    """Learning rates of a run of `total` steps by transformers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=int(warmup * total), num_training_steps=total)
    found: list[float] = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_a_job_that_has_taken_no_step_is_that_of_its_new_length() -> None:
    """Stopped before its first step: no step followed the old schedule, so there is nothing to warn of."""
    spec = JobSpec.model_validate({"name": "a", "data": "a.jsonl", "max_steps": 8})
    assert _describe(spec, 4, 8, done=0) == "8 steps instead of 4"
    assert "Steps up to 1 followed the one over 4" in _describe(spec, 4, 8, done=1)


@pytest.mark.slow
def test_more_steps_at_a_constant_rate_are_those_of_a_longer_run(base: Path, data: Path, tmp_path: Path) -> None:
    """To the last byte; and so is the job that the resume adds."""
    longer = [order(data, max_steps=7, lr_scheduler_type="constant"), order(data, "added", seed=1)]
    train(base, tmp_path / "whole", longer, deterministic=True)
    train(base, tmp_path / "out", [order(data, lr_scheduler_type="constant")], deterministic=True)
    assert "| steps | 4 |" in (tmp_path / "out" / "a" / CARD_FILE).read_text()
    results, lines = resume(base, tmp_path / "out", longer, deterministic=True)
    assert results.status == "done" and (results["a"].steps, results["a"].total_steps) == (7, 7)
    for name in ("a", "added"):
        assert sha256(tmp_path / "out" / name) == sha256(tmp_path / "whole" / name)
    assert steps_taken(tmp_path / "out" / "a") == list(range(1, 8))
    assert [line for line in lines if "instead of" in line] == ["a: 7 steps instead of 4"]
    assert "| steps | 7 |" in (tmp_path / "out" / "a" / CARD_FILE).read_text()


@pytest.mark.parametrize(("kind", "warmup"), [("linear", 0.0), ("cosine", 0.25)])
def test_from_there_on_the_rate_is_that_of_the_longer_schedule(base: Path, data: Path, tmp_path: Path, kind: str, warmup: float) -> None:
    """As transformers' Trainer makes its scheduler anew with the new number of steps; and that is said once for all jobs."""
    names = ("a", "b")
    settings: dict[str, Any] = {"lr_scheduler_type": kind, "warmup_steps": warmup}
    train(base, tmp_path / "out", [order(data, name, **settings) for name in names])
    longer = [order(data, name, max_steps=8, **settings) for name in names]
    results, lines = resume(base, tmp_path / "out", longer)
    assert [result.steps for result in results.values()] == [8, 8]
    before, after = trainers_rates(kind, warmup, 4), trainers_rates(kind, warmup, 8)
    for name in names:
        assert rates(tmp_path / "out" / name) == pytest.approx(before + after[4:], rel=1e-12)
    (said,) = [line for line in lines if "schedule" in line]
    assert "a, b" in said or "a and b" in said
    assert (
        f"8 steps instead of 4: from step 5 on the learning rate follows the {kind} schedule over 8 steps ({after[4]:.3g} there; 0 " in said
    )
    assert "the result is not that of 8 steps from the start" in said
    assert not any("instead of" in line for line in resume(base, tmp_path / "out", longer)[1]), "and not again"


@pytest.fixture(scope="module")
def interrupted(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of 8 steps that was interrupted at step 4."""
    out = tmp_path_factory.mktemp("interrupted") / "out"
    train(base, out, [order(data, max_steps=8, save_total_limit=None)], deterministic=True)
    for path in (out / "a" / "checkpoint-6", out / "a" / "checkpoint-8"):
        shutil.rmtree(path)
    (out / "a" / "result.json").unlink()
    return out


@pytest.mark.parametrize("steps", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_a_shorter_job_ends_sooner(base: Path, data: Path, interrupted: Path, tmp_path: Path, steps: int) -> None:
    out = Path(shutil.copytree(interrupted, tmp_path / "out"))
    results, lines = resume(base, out, [order(data, max_steps=steps)], deterministic=True)
    assert (results["a"].status, results["a"].steps) == ("done", steps) and steps_taken(out / "a") == list(range(1, steps + 1))
    assert any(f"a: {steps} steps instead of 8" in line for line in lines)


def test_steps_are_not_taken_back(base: Path, data: Path, interrupted: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(interrupted, tmp_path / "out"))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"\ba\b.*step 4.*step 3.*max_steps"):
        train(base, out, [order(data, max_steps=3), order(data, "new")], deterministic=True, resume=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_where_jobs_come_and_go_the_job_alone_is_refused(
    base: Path, data: Path, interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker opens jobs one by one and has no look at all of them before."""
    monkeypatch.setattr(front_door, "check_lengths", lambda *_: [])
    out = Path(shutil.copytree(interrupted, tmp_path / "out"))
    results = train(base, out, [order(data, max_steps=3), order(data, "new", max_steps=1)], deterministic=True, resume=True)
    assert results["new"].status == "done" and results["a"].status == "failed"
    assert "checkpoint-4 has more than the 3 steps that a shall have, and steps cannot be taken back" in results["a"].reason


def test_a_job_that_stopped_early_stays_ended(base: Path, data: Path, tmp_path: Path) -> None:
    own = {"path": str(data / "a.jsonl"), "eval_path": str(data / "held-out.jsonl")}
    patient = {"eval_steps": 1, "early_stopping_patience": 1, "learning_rate": 1.0}
    first = train(base, tmp_path / "out", [job("a", own, max_steps=20, **patient)])["a"]
    assert first.status == "done" and first.steps < 20
    results, lines = resume(base, tmp_path / "out", [job("a", own, max_steps=30, **patient)])
    assert (results["a"].status, results["a"].steps) == ("done", first.steps)
    assert f"a: it stopped early at step {first.steps} and stays ended; 30 steps change nothing" in lines


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"r": 8}, "a: r was 4 and is 8"),
        ({"learning_rate": 0.5}, "a: learning_rate was 0.01 and is 0.5"),
        ({"seed": 7}, "a: seed was 42 and is 7"),
        ({"batch_size": 2}, "a: batch_size was 4 and is 2"),
        ({"gpus": 2}, "a: gpus was 1 and is 2"),
        ({"lr_scheduler_type": "cosine"}, "a: lr_scheduler_type was 'linear' and is 'cosine'"),
        ({"max_length": 64}, "a: data.max_length was 1024 and is 64"),
        ({"data": "b.jsonl"}, "a: data.path was '.*a.jsonl' and is '.*b.jsonl'"),
    ],
)
def test_all_else_that_would_change_the_training_is_refused(
    base: Path, data: Path, interrupted: Path, tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    out = Path(shutil.copytree(interrupted, tmp_path / "out"))
    changed = {**order(data, max_steps=9), **change}
    if "data" in change:
        changed["data"] = str(data / change["data"])
    with pytest.raises(ConfigError, match=rf"{why}\..*output_dir"):
        train(base, out, [changed], deterministic=True, resume=True)
