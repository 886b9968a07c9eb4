"""`load_best_model_at_end` where the best checkpoint is gone, or nothing trained is better than the start; and what an early stop says."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny_runs import job, rows, run_spec, sha256, train
from tlora.engine.results import Results
from tlora.engine.watcher import Watcher
from tlora.store.best_checkpoint import settle_best
from tlora.store.checkpoint import read_progress

WEIGHTS = "adapter_model.safetensors"


def order(data: Path, **fields: Any) -> dict[str, Any]:
    """A learning rate that soon does harm, evaluated and saved at each step."""
    own = {"path": str(data / "a.jsonl"), "eval_path": str(data / "held-out.jsonl")}
    harmful = {"learning_rate": 0.3, "lr_scheduler_type": "constant", "eval_steps": 1, "load_best_model_at_end": True}
    return job("a", own, **{**harmful, "max_steps": 12, "save_steps": 1, "save_total_limit": None, **fields})


def run(base: Path, out: Path, orders: dict[str, Any], **settings: Any) -> tuple[Results, list[str]]:
    lines: list[str] = []
    return train(base, out, [orders], deterministic=True, watcher=Watcher(note=lines.append), **settings), lines


def eval_losses(out: Path) -> dict[int, float]:
    return {row["step"]: row["eval_loss"] for row in rows(out / "a" / "metrics.jsonl") if "eval_loss" in row}


@pytest.fixture(scope="module")
def first(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A finished job whose best step is neither its first nor its last, and that step."""
    out = tmp_path_factory.mktemp("first") / "out"
    results, _ = run(base, out, order(data))
    best = results["a"].best_step
    assert best is not None and 1 < best < 12
    return out, best


@pytest.fixture
def copied(first: tuple[Path, int], tmp_path: Path) -> tuple[Path, int]:
    return Path(shutil.copytree(first[0], tmp_path / "out")), first[1]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["gone", "damaged"])
def test_a_lost_best_checkpoint_gets_its_adapter_back_from_the_exported_one(
    base: Path, data: Path, copied: tuple[Path, int], loss: str
) -> None:
    out, best = copied
    exported = sha256(out / "a")
    if loss == "gone":
        shutil.rmtree(out / "a" / f"checkpoint-{best}")
    else:
        (out / "a" / f"checkpoint-{best}" / WEIGHTS).unlink()
    results, said = run(base, out, order(data, max_steps=14), resume=True)
    assert (results["a"].status, results["a"].steps, results["a"].best_step) == ("done", 14, best)
    assert sha256(out / "a") == exported
    about = [line for line in said if "its best evaluation" in line]
    assert len(about) == 1 and f"its adapter is still in {out / 'a'}, and stays the best" in about[0]
    assert said.index(about[0]) < said.index(f"a: goes on from {out / 'a' / 'checkpoint-12'}") + 2, "at the start"


def test_where_the_adapter_is_gone_too_the_best_of_what_is_left_takes_its_place(base: Path, data: Path, copied: tuple[Path, int]) -> None:
    out, best = copied
    losses = eval_losses(out)
    shutil.rmtree(out / "a" / f"checkpoint-{best}")
    (out / "a" / "result.json").unlink()  # nothing says whose the exported adapter is
    results, said = run(base, out, order(data, max_steps=14), resume=True)
    second = min((step for step in losses if step not in (0, best)), key=losses.__getitem__)
    assert any(f"the best of what is left is checkpoint-{second}" in line for line in said)
    later = eval_losses(out)
    expected = min((step for step in later if step not in (0, best)), key=later.__getitem__)
    assert results["a"].status == "done" and results["a"].best_step == expected
    assert sha256(out / "a") == sha256(out / "a" / f"checkpoint-{expected}")


def test_the_best_is_one_that_was_trained_and_a_line_says_that_none_beats_the_start(base: Path, data: Path, tmp_path: Path) -> None:
    results, said = run(base, tmp_path / "out", order(data, learning_rate=100.0, eval_steps=2, max_steps=4))
    losses = eval_losses(tmp_path / "out")
    best = min((step for step in losses if step), key=losses.__getitem__)
    assert min(losses, key=losses.__getitem__) == 0, "a learning rate of 100 does harm"
    assert results["a"].best_step == best > 0 and results["a"].eval_loss == losses[best]
    assert sha256(tmp_path / "out" / "a") == sha256(tmp_path / "out" / "a" / f"checkpoint-{best}")
    assert not (tmp_path / "out" / "a" / "checkpoint-0").exists()
    (line,) = [line for line in said if "none of its evaluations is better" in line]
    assert f"(loss {losses[0]:.6g})" in line and f"of step {best}" in line


def test_patience_counts_from_the_first_evaluation_that_was_trained_and_the_stop_is_said(base: Path, data: Path, tmp_path: Path) -> None:
    results, said = run(base, tmp_path / "out", order(data, learning_rate=0.0, early_stopping_patience=2, load_best_model_at_end=False))
    losses = eval_losses(tmp_path / "out")
    assert max(losses) == 3 and len(set(losses.values())) == 1
    reason = f"stopped early at step 3/12: 2 evaluations in a row without a loss lower than {losses[1]:.6g}, at step 1"
    assert (results["a"].status, results["a"].reason) == ("done", reason) and f"a: {reason}" in said
    assert json.loads((tmp_path / "out" / "a" / "result.json").read_text())["reason"] == reason


def test_an_earlier_version_whose_best_was_the_start_chooses_anew(base: Path, data: Path, copied: tuple[Path, int]) -> None:
    """It counted the evaluation before the first step."""
    out, best = copied
    (spec,) = run_spec(base, out, [order(data)]).jobs
    p = replace(read_progress(out / "a" / "checkpoint-12"), best_step=0, best_eval=0.0, evals_without_gain=12)
    settled = settle_best(spec, out / "a", p, pytest.fail)
    assert (settled.best_step, settled.best_eval, settled.evals_without_gain) == (best, eval_losses(out)[best], 12 - best)
