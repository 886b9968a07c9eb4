"""A measurement next to a job on a GPU: its CUDA graphs, its memory pool and its kernels leave the job's bytes as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.test_background_calibration import joins, load_of, stop_at, work
from tests.engine.tiny_runs import job, sha256, steps_taken
from tlora.engine import background_calibration, calibration
from tlora.engine import trainer as trainer_room
from tlora.worker_protocol import Finished, Measured, Stepped

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_a_job_has_the_same_bytes_and_its_first_step_comes_before(
    wide_base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(trainer_room, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(background_calibration, "SHARE", 1.0)  # a turn after each micro-batch
    monkeypatch.setattr(calibration, "_MOST_TURNS", {"cuda": 2})
    evaluated = {"path": str(data / "c.jsonl"), "eval_path": str(data / "held-out.jsonl")}
    first = joins(wide_base, tmp_path, [job("a", evaluated, lora_dropout=0.1, eval_steps=20, save_steps=30, max_steps=120)])
    load = replace(load_of(wide_base, tmp_path / "plain"), device="cuda")
    work(replace(load, calibrate=False), first, stop_at(Finished))
    told = work(replace(load, output_dir=str(tmp_path / "out")), first, stop_at(Finished))
    kinds = [type(report) for report in told]
    assert kinds.index(Stepped) < kinds.index(Measured) < kinds.index(Finished)
    assert sha256(tmp_path / "out" / "a") == sha256(tmp_path / "plain" / "a")
    assert steps_taken(tmp_path / "out" / "a") == steps_taken(tmp_path / "plain" / "a")
