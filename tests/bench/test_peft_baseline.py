"""The baseline trains on the same targets in every setting, and the best of what ran is what counts."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import peft_baseline
from bench.peft_baseline import IGNORED, Setting, Target, measure
from bench.shapes import make_model
from bench.workload import Job, Order, make_jobs
from tlora.data.dataset import Dataset, Sample, Writer

CPU = torch.device("cpu")


def _samples(lengths: tuple[int, ...]) -> list[Sample]:
    rng, found = np.random.default_rng(0), []
    for length in lengths:
        weights = np.ones(length, np.float32)
        weights[: length // 3] = 0
        found.append(Sample(rng.integers(3, 512, length).astype(np.int32), weights))
    return found


def _loss(batch: dict[str, torch.Tensor]) -> float:
    with torch.no_grad():
        return float(make_model("tiny", CPU, torch.float32)(**batch, use_cache=False).loss)


def test_packed_and_padded_batches_have_the_loss_of_the_samples_alone():
    samples = _samples((13, 5, 21, 2))
    padded, useful = peft_baseline._collate(samples, Setting(), CPU)
    packed, same = peft_baseline._collate(samples, Setting(packed=True), CPU)
    assert useful == same == 13 + 5 + 21 + 2
    assert padded["input_ids"].shape == (4, 24) and packed["input_ids"].shape == (1, useful)
    alone, targets = 0.0, 0
    for sample in samples:
        one, _ = peft_baseline._collate([sample], Setting(), CPU)
        count = int((one["labels"][:, 1:] != IGNORED).sum())
        alone, targets = alone + _loss(one) * count, targets + count
    assert _loss(padded) == pytest.approx(alone / targets, rel=1e-5)
    assert _loss(packed) == pytest.approx(alone / targets, rel=1e-5)


def _target(seconds: float = 1e6) -> Target:
    return Target("tiny", CPU, torch.float32, 2, time.perf_counter() + seconds)


def _made(setting: Setting, *_: Any) -> dict[str, Any]:
    if setting.graphs:
        raise RuntimeError("capture failed\nmore of it")
    return {"tokens_per_second": 3.0 if setting.compiled else 2.0, "activations_gib": None}


def test_the_best_is_marked_and_a_setting_that_breaks_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peft_baseline, "_train", _made)
    monkeypatch.setattr(peft_baseline.importlib.util, "find_spec", lambda _name: None)
    rows = measure(make_jobs(Order(1, (4,), 2, 16), 512, None, tmp_path), _target(), {"job0": 1})
    assert [row["setting"] for row in rows if row.get("best")] == ["compiled"]
    assert [row["error"] for row in rows if "error" in row] == ["RuntimeError: capture failed"]
    assert all("not installed" in row["skipped"] for row in rows if row["liger"])


def test_different_jobs_are_each_measured_and_weighed_by_their_tokens(tmp_path: Path):
    jobs = [*_job(tmp_path, "long", 32), *_job(tmp_path, "short", 8)]
    found = peft_baseline._measure_setting(Setting(), jobs, _target(), {"long": 900, "short": 100})
    speeds = found["tokens_per_second_of_jobs"]
    assert set(speeds) == {"long", "short"}
    assert found["tokens_per_second"] == pytest.approx(1000 / (900 / speeds["long"] + 100 / speeds["short"]))


def _job(tmp_path: Path, name: str, length: int) -> list[Job]:
    (job,) = make_jobs(Order(1, (4,), 2, length), 512, None, tmp_path / name)
    return [Job(job.spec.model_copy(update={"name": name}), job.data)]


def test_every_shape_is_trained_once_before_any_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A job whose batches are padded to different lengths: none of its shapes is new when the clock runs, and the result says so."""
    job = _mixed_job(tmp_path)
    target, order = replace(_target(), steps=6), list[str]()
    step, speed = peft_baseline._step, peft_baseline._speed

    def stepping(*arguments: Any) -> None:
        order.append(str(tuple(arguments[-1]["input_ids"].shape)))
        step(*arguments)

    def timing(*arguments: Any) -> float:
        order.append("timed from here")
        return speed(*arguments)

    monkeypatch.setattr(peft_baseline, "_step", stepping)
    monkeypatch.setattr(peft_baseline, "_speed", timing)
    found = peft_baseline._measure_setting(Setting(), [job], target, {"mixed": 1})
    warmed, timed = order[: order.index("timed from here")], order[order.index("timed from here") + 1 :]
    assert len(timed) == found["steps_per_job"] == 6 and len(set(timed)) > 1
    assert set(timed) <= set(warmed) and found["shapes_warmed"] == len(set(timed))


def _mixed_job(tmp_path: Path) -> Job:
    """Samples of 4 to 60 tokens."""
    (job,) = make_jobs(Order(1, (4,), 2, 60), 512, None, tmp_path / "plain")
    writer = Writer(tmp_path / "mixed")
    for index in range(12):
        sample = job.data[index]
        writer.add(Sample(sample.input_ids[: 4 + 5 * index], sample.loss_weights[: 4 + 5 * index]))
    writer.finish({})
    return Job(job.spec.model_copy(update={"name": "mixed"}), Dataset(tmp_path / "mixed"))
