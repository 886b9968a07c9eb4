"""DPO and KTO jobs that start from an adapter compare with it: first numbers, resumes, moves between workers, and what is refused."""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_worker import when, work
from tests.engine.tiny_runs import job, rows, run_spec, sentence, sha256, train, write_rows
from tlora.engine import trainer
from tlora.engine.messages import Command, Leave, SetPlan
from tlora.engine.watcher import Watcher
from tlora.planning.job_profile import ProfiledJob, profile_jobs
from tlora.store.checkpoint import REFERENCE_DIRECTORY
from tlora.supermodel.supermodel import SuperModel
from tlora.worker_protocol import Join, Left, Load, Stepped

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")


def write_sets(directory: Path) -> Path:
    """pairs.jsonl, and the same answers one by one in answers.jsonl."""
    rng = random.Random(3)
    pairs = [{"prompt": sentence(rng, 1, 3), "chosen": " " + sentence(rng), "rejected": " " + sentence(rng)} for _ in range(12)]
    answers = [{"prompt": p["prompt"], "completion": p[key], "label": key == "chosen"} for p in pairs for key in ("chosen", "rejected")]
    for name, found in {"pairs": pairs, "answers": answers}.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return directory


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sets(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="module")
def tuned(wide_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that was trained before."""
    out = tmp_path_factory.mktemp("tuned")
    train(wide_base, out / "sft", [job("j", str(write_rows(out / "d.jsonl", 20)), max_steps=12)])
    return out / "sft" / "j"


def orders(sets: Path, tuned: Path, **fields: Any) -> list[dict[str, Any]]:
    """A job with each objective that compares, over an adapter; and one beside them that compares with the base."""
    shared = {"adapter_path": str(tuned), "max_steps": 6, "save_steps": 2, "lr_scheduler_type": "constant", **fields}
    return [
        job("dpo", str(sets / "pairs.jsonl"), objective="dpo", **shared),
        job("kto", str(sets / "answers.jsonl"), objective="kto", **shared),
        job("fresh", str(sets / "pairs.jsonl"), objective="dpo", max_steps=6, lr_scheduler_type="constant"),
    ]


def first_row(out: Path, name: str) -> dict[str, Any]:
    return rows(out / name / "metrics.jsonl")[0]


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["default", "deterministic"])
def test_the_first_step_has_learned_nothing_yet(wide_base: Path, sets: Path, tuned: Path, tmp_path: Path, deterministic: bool) -> None:
    """Policy and reference are one adapter: the margin is 0, so DPO's loss is ln 2 and KTO's 1/2."""
    results = train(wide_base, tmp_path, orders(sets, tuned, max_steps=1), deterministic=deterministic)
    assert results.status == "done"
    for name, loss in {"dpo": math.log(2), "kto": 0.5, "fresh": math.log(2)}.items():
        row = first_row(tmp_path, name)
        assert row["loss"] == pytest.approx(loss, abs=1e-6), name
        assert all(row[reward] == pytest.approx(0, abs=1e-5) for reward in REWARDS if reward in row), row


def test_the_bare_base_is_the_reference_of_those_who_say_so(wide_base: Path, sets: Path, tuned: Path, tmp_path: Path) -> None:
    train(wide_base, tmp_path, orders(sets, tuned, max_steps=1, reference="base"))
    assert abs(first_row(tmp_path, "dpo")["rewards/chosen"]) > 1e-3 and abs(first_row(tmp_path, "dpo")["loss"] - math.log(2)) > 1e-4
    assert abs(first_row(tmp_path, "kto")["loss"] - 0.5) > 1e-4
    assert not (tmp_path / "dpo" / REFERENCE_DIRECTORY).exists()


def test_a_job_that_moves_to_another_worker_takes_its_reference_along(
    wide_base: Path, sets: Path, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "REPORT_SECONDS", 0.0)  # else the job may be done before its second step is reported
    start = shutil.copytree(tuned, tmp_path / "start")
    order = orders(sets, start)[0]
    train(wide_base, tmp_path / "whole", [order], deterministic=True)
    run = run_spec(wide_base, tmp_path / "out", [order], deterministic=True)
    made = profile_jobs(run)["dpo"]
    assert isinstance(made, ProfiledJob)
    load = Load(str(wide_base), str(tmp_path / "out"), "cpu", time.time(), deterministic=True)
    join = Join(run.jobs[0], made.train_set, made.eval_set)
    first: list[Command] = [SetPlan(96), join]
    told = work(load, first, when(Stepped, "dpo", 2, Leave("dpo")))
    assert [report for report in told if isinstance(report, Left) and report.steps < 6]
    shutil.rmtree(start)
    work(load, first)
    assert sha256(tmp_path / "out" / "dpo") == sha256(tmp_path / "whole" / "dpo")


def interrupted(base: Path, out: Path, order: dict[str, Any]) -> dict[str, Any]:
    train(base, out, [{**order, "max_steps": 3}])
    return order


@pytest.mark.parametrize("damage", ["gone", "torn"])
def test_a_resume_without_its_reference_fails_and_says_why(wide_base: Path, sets: Path, tuned: Path, tmp_path: Path, damage: str) -> None:
    order = interrupted(wide_base, tmp_path, orders(sets, tuned)[0])
    kept = tmp_path / "dpo" / REFERENCE_DIRECTORY
    if damage == "gone":
        shutil.rmtree(kept)
    else:
        (kept / "adapter_model.safetensors").write_bytes(b"torn")
    result = train(wide_base, tmp_path, [order], resume=True)["dpo"]
    assert result.status == "failed" and str(kept) in result.reason and "Put it back" in result.reason


@pytest.mark.slow
def test_a_run_of_an_earlier_version_goes_on_with_the_bare_base(wide_base: Path, sets: Path, tuned: Path, tmp_path: Path) -> None:
    """As it began, twice over; `reference: base` says the same without a word."""
    order = orders(sets, tuned)[0]
    train(wide_base, tmp_path / "whole", [{**order, "reference": "base"}], deterministic=True)
    out = tmp_path / "out"
    train(wide_base, out, [{**order, "reference": "base", "max_steps": 2}], deterministic=True)
    for name in ("run.json", "dpo/job.json"):  # as an earlier version wrote them
        content = json.loads((out / name).read_text())
        for fields in content.get("jobs", [content]):
            fields.pop("reference")
        (out / name).write_text(json.dumps(content))
    lines: list[str] = []
    for steps in (4, 6):
        result = train(wide_base, out, [{**order, "max_steps": steps}], deterministic=True, resume=True, watcher=Watcher(note=lines.append))
        assert result.status == "done", result["dpo"]
    assert len([line for line in lines if "took the bare base as reference" in line]) == 2
    assert sha256(out / "dpo") == sha256(tmp_path / "whole" / "dpo")


def test_a_changed_reference_is_another_job(wide_base: Path, sets: Path, tuned: Path, tmp_path: Path) -> None:
    order = interrupted(wide_base, tmp_path, orders(sets, tuned)[0])
    with pytest.raises(Exception, match="reference was 'start' and is 'base'"):
        train(wide_base, tmp_path, [{**order, "reference": "base"}], resume=True)


def test_a_run_is_written_over_with_its_references(wide_base: Path, sets: Path, tuned: Path, tmp_path: Path) -> None:
    train(wide_base, tmp_path / "out", orders(sets, tuned, max_steps=1))
    lines: list[str] = []
    other = [job("fresh", str(sets / "pairs.jsonl"), objective="dpo", max_steps=1)]
    train(wide_base, tmp_path / "out", other, overwrite=True, watcher=Watcher(note=lines.append))
    assert not (tmp_path / "out/dpo").exists() and not [line for line in lines if "kept" in line]


def test_a_reference_takes_the_memory_of_its_weights_and_goes_with_its_job(wide_base: Path, tuned: Path) -> None:
    model = SuperModel.from_pretrained(str(wide_base))
    spec = run_spec(wide_base, tuned, [job("a", "x.jsonl")]).jobs[0]
    model.join("a", spec, spec)
    params = model.state("a").params.clone()
    model.set_reference("a", params)
    rows_of = [model.references.linear(shape.module) for shape in model.state("a").layout.shapes]
    assert sum(t.numel() for row in rows_of for t in (row.da_RK, row.db_RN)) == 0
    with pytest.raises(Exception, match="its reference holds NaN"):
        model.set_reference("a", torch.full_like(params, math.nan))
    with pytest.raises(Exception, match="it must be flat, of"):
        model.set_reference("a", params[:-1])
    model.leave("a")
    assert "a" not in model.references and not any(row.a_RK.any() or row.b_RN.any() for row in rows_of)
