"""Files that another program cuts or writes over while a run uses them: no process may die of it (SIGBUS), and no neighbour notice."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny_runs import job, sha256, train, write_rows
from tlora.data.prepare import prepare
from tlora.group.job_run import JobRun
from tlora.planning import job_plan


def cut(file: Path) -> None:
    os.truncate(file, 0)


def overwrite(file: Path) -> None:
    file.write_bytes(b"\x7f" * file.stat().st_size)


def at_step(monkeypatch: pytest.MonkeyPatch, name: str, step: int, act: Callable[[JobRun], object]) -> None:
    """Call `act` when the job `name` has taken so many steps."""
    step_queued = JobRun.step_queued

    def hooked(run: JobRun) -> None:
        step_queued(run)
        if (run.spec.name, run.progress.step) == (name, step):
            act(run)

    monkeypatch.setattr(JobRun, "step_queued", hooked)


def use_cache(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Each run looks for its data in `cache`, as runs of other processes do."""
    monkeypatch.setenv("TLORA_CACHE", str(cache))
    monkeypatch.setattr(job_plan, "prepare", prepare)


def neighbours(data: Path) -> list[dict[str, Any]]:
    return [job("left", {"path": str(data / "a.jsonl"), "eval_size": 0.2}, eval_steps=2), job("right", str(data / "c.jsonl"), max_steps=4)]


@pytest.fixture(scope="module")
def untouched(wide_base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("untouched")
    return {name: sha256(Path(r.path)) for name, r in train(wide_base, out, neighbours(data), deterministic=True).items()}


def write_own(path: Path, objective: str) -> Path:
    """What `objective` learns from."""
    rows = [json.loads(line) for line in write_rows(path, 24, seed=7).read_text().splitlines()]
    if objective == "kto":
        path.write_text("".join(json.dumps(row | {"label": bool(i % 2)}) + "\n" for i, row in enumerate(rows)))
    return path


@pytest.mark.parametrize("damage", [cut, pytest.param(overwrite, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "objective", [pytest.param("sft", marks=pytest.mark.slow), "kto"]
)  # kto reads its data when the next batch is put on offer, too
def test_tokens_that_are_cut_fail_their_job_alone_and_resume_makes_them_again(
    objective: str, damage: Callable[[Path], None], wide_base: Path, data: Path, tmp_path: Path, untouched: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    own = write_own(tmp_path / "own.jsonl", objective)
    left, right = neighbours(data)
    victim = job("victim", str(own), objective=objective, max_steps=6)
    use_cache(monkeypatch, tmp_path / "cache")
    at_step(monkeypatch, "victim", 3, lambda run: damage(run.train.directory / "tokens.bin"))
    results = train(wide_base, tmp_path / "out", [left, victim, right], deterministic=True)
    assert (results["victim"].status, results["victim"].steps) == ("failed", 3), results["victim"].reason
    assert "tokens.bin: another program has cut or changed this file" in results["victim"].reason
    assert {name: sha256(Path(results[name].path)) for name in untouched} == untouched
    monkeypatch.undo()
    use_cache(monkeypatch, tmp_path / "cache")
    again = train(wide_base, tmp_path / "out", [left, victim, right], deterministic=True, resume=True)
    train(wide_base, tmp_path / "whole", [left, victim, right], deterministic=True)
    assert again["victim"].status == "done" and sha256(tmp_path / "out" / "victim") == sha256(tmp_path / "whole" / "victim")


@pytest.mark.parametrize("damage", [cut, pytest.param(overwrite, marks=pytest.mark.slow)])
def test_a_base_that_is_cut_has_been_read(
    damage: Callable[[Path], None], wide_base: Path, data: Path, tmp_path: Path, untouched: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(shutil.copytree(wide_base, tmp_path / "base"))
    at_step(monkeypatch, "right", 1, lambda _: damage(base / "model.safetensors"))
    results = train(base, tmp_path / "out", neighbours(data), deterministic=True)
    assert {name: sha256(Path(r.path)) for name, r in results.items()} == untouched


def test_a_checkpoint_that_is_cut_has_been_read(wide_base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its optimizer's moments are in use until the first step after it."""
    short, long = (job("one", str(data / "a.jsonl"), max_steps=steps, lr_scheduler_type="constant") for steps in (2, 4))
    out = tmp_path / "out"
    train(wide_base, out, [short], deterministic=True)
    offer = JobRun.offer

    def cut_before_the_first_step(run: JobRun) -> None:
        if run.progress.step == 2:
            cut(out / "one" / "checkpoint-2" / "optimizer.safetensors")
        offer(run)

    monkeypatch.setattr(JobRun, "offer", cut_before_the_first_step)
    train(wide_base, out, [long], deterministic=True, resume=True)
    train(wide_base, tmp_path / "whole", [long], deterministic=True)
    assert sha256(out / "one") == sha256(tmp_path / "whole" / "one")
