"""The promises of whole runs as plain functions that raise AssertionError, over the shortest runs in which each can be broken.

They are checked in earnest by the tests of this directory and of `tests/engine`. Here they must catch what `test_engine_mutants.py` plants.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.engine.tiny_runs import job, rows, sha256, train
from tests.numerics.engine.test_engine_promises import _gradient, _loss_raises
from tests.numerics.peft_oracle import peft_train
from tests.numerics.world import Job
from tests.tiny import make_samples
from tests.tolerances import TRAINED, assert_close
from tlora.adapters.state import init_state
from tlora.data.dataset import Sample
from tlora.data.order import global_batch
from tlora.group.engine import Engine
from tlora.job import JobSpec
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

STEPS, BATCH, MARK = 3, 4, 50  # no sample but the raising one's holds the token MARK


def my_samples() -> list[Sample]:
    """Long and short ones."""
    return [*make_samples(4, seed=1, low=3, high=8, vocab=MARK), *make_samples(4, seed=3, low=20, high=30, vocab=MARK)]


def write_data(directory: Path) -> Path:
    """mine.jsonl, other.jsonl, and bad.jsonl with MARK in one sample: token ids and labels."""
    other, bad = (make_samples(8, seed=2, low=3, high=9, vocab=MARK) for _ in range(2))
    bad[0].input_ids[-1] = MARK
    for name, samples in (("mine", my_samples()), ("other", other), ("bad", bad)):
        pairs = [(s.input_ids.tolist(), s.loss_weights.tolist()) for s in samples]
        labelled = [{"input_ids": ids, "labels": [i if w else -100 for i, w in zip(ids, ws, strict=True)]} for ids, ws in pairs]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    return directory


@dataclass
class Runs:
    """Runs over one base, each in a directory of its own under `out`."""

    base: Path
    data: Path
    out: Path
    count: int = 0

    def mine(self, **fields: Any) -> dict[str, Any]:
        """A job with dropout and decay whose gradients are clipped."""
        given = {"lora_dropout": 0.1, "weight_decay": 0.3, "max_grad_norm": 0.05, **fields}
        return job("mine", str(self.data / "mine.jsonl"), r=3, batch_size=BATCH, max_steps=STEPS, logging_steps=1, **given)

    def neighbour(self, name: str = "other") -> dict[str, Any]:
        """A job by another rule."""
        given = {"learning_rate": 3e-2, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
        return job(name, str(self.data / f"{name}.jsonl"), r=5, batch_size=3, max_steps=STEPS, **given)

    def train(self, *jobs: dict[str, Any], **settings: Any) -> Path:
        self.count += 1
        mine = train(self.base, self.out / str(self.count), list(jobs), deterministic=True, **settings)["mine"]
        assert mine.status == "done", f"{mine.status}: {mine.reason}"
        return self.out / str(self.count) / "mine"

    def bytes_of(self, *jobs: dict[str, Any], **settings: Any) -> str:
        return sha256(self.train(*jobs, **settings))


def a_run_is_pefts(runs: Runs) -> None:
    """PEFT: weight change and losses of a job that trains by itself."""
    fields = runs.mine(lora_dropout=0.0)
    found, spec = runs.train(fields), JobSpec.model_validate(fields)
    base = AutoModelForCausalLM.from_pretrained(runs.base, dtype=torch.float32)
    layout = SuperModel(make_base(base, str(runs.base))).layout(spec)
    samples = my_samples()
    in_order = tuple(samples[i] for step in range(STEPS) for i in global_batch(step, len(samples), BATCH, spec.seed))
    start = init_state(layout, spec.seed, torch.float32).params
    plain = AutoModelForCausalLM.from_pretrained(runs.base, dtype=torch.float32)
    deltas, losses = peft_train(plain, Job("mine", spec, spec, in_order, STEPS), layout, start)
    tensors = load_file(found / "adapter_model.safetensors")
    a, b = ([tensors[f"base_model.model.{s.module}.lora_{which}.weight"].double() for s in layout.shapes] for which in "AB")
    mine = [s.scale * (y @ x) for s, x, y in zip(layout.shapes, a, b, strict=True)]
    assert_close(torch.cat([d.flatten() for d in mine]), torch.cat([d.flatten() for d in deltas]), TRAINED[torch.float32], "ΔW")
    assert [row["loss"] for row in rows(found / "metrics.jsonl") if "loss" in row] == pytest.approx(losses, rel=TRAINED[torch.float32])


def a_run_alone_is_one_together(runs: Runs) -> None:
    """L1: the same bytes behind a neighbour, with global batches cut into micro-batches."""
    alone = runs.bytes_of(runs.mine())
    assert runs.bytes_of(runs.neighbour(), runs.mine(), token_budget=48) == alone, "other bytes together than alone"


def a_neighbour_of_nan_changes_nothing(runs: Runs) -> None:
    """L2: one whose gradients are not finite."""
    alone = runs.bytes_of(runs.mine())
    with _gradient(math.nan):
        assert runs.bytes_of(runs.neighbour("bad"), runs.mine()) == alone, "other bytes beside NaN than alone"


def a_neighbour_that_raises_changes_nothing(runs: Runs) -> None:
    """L2: it is taken out in the midst of a global batch, and the others start theirs over."""
    alone = runs.bytes_of(runs.mine())
    with _loss_raises(MARK):
        assert runs.bytes_of(runs.neighbour("bad"), runs.mine(), token_budget=48) == alone, "other bytes than alone"


def a_run_that_is_resumed_is_the_same(runs: Runs) -> None:
    """Interrupted between two steps, it ends with the bytes of a run that was not."""
    whole = runs.bytes_of(runs.mine())
    run_micro_batch, calls = Engine.run_micro_batch, list[None]()

    def interrupted(engine: Engine) -> object:
        calls.append(None)
        if len(calls) == STEPS:
            raise RuntimeError("the cable was pulled")
        return run_micro_batch(engine)

    out = runs.out / "cut"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="the cable"):
        patch.setattr(Engine, "run_micro_batch", interrupted)
        train(runs.base, out, [runs.mine()], deterministic=True)
    train(runs.base, out, [runs.mine()], deterministic=True, resume=True)
    assert sha256(out / "mine") == whole, "other bytes than uninterrupted"
