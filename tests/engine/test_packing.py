"""`packing: true`: a step trains what PEFT trains on packed rows, as TRL's users know them; said, evaluated and resumed as any job."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engine.tiny_runs import job, rows, run_spec, sha256, train
from tests.tolerances import TRAINED, assert_close
from tlora.data.dataset import Dataset
from tlora.data.order import PackedRows, global_batch
from tlora.data.prepare import Prepared, prepare
from tlora.data.request import prepare_requests
from tlora.engine.check import check
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError
from tlora.job import JobSpec

PACKED: dict[str, Any] = {"packing": True, "max_length": 400, "batch_size": 2, "lr_scheduler_type": "constant"}


def opened(base: Path, out: Path, order: dict[str, Any]) -> Prepared:
    spec = run_spec(base, out, [order])
    vocab_size = AutoModelForCausalLM.from_pretrained(base).config.vocab_size
    found = prepare(prepare_requests(spec, vocab_size))[order["name"]]
    assert isinstance(found, Prepared)
    return found


def packed_loss(model: Any, data: Dataset, row: list[int]) -> Tensor:
    """Of one packed row, its samples one after another: transformers keeps them apart by the positions that start over."""
    samples = [data[i] for i in row]
    ids = torch.cat([torch.from_numpy(sample.input_ids).long() for sample in samples])
    positions = torch.cat([torch.arange(len(sample.input_ids)) for sample in samples])
    weights = torch.cat([torch.from_numpy(sample.loss_weights) for sample in samples]) * (positions > 0)
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    return (torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none") * weights[1:]).sum()


def trained_by_peft(base: Path, start: Path, data: Dataset, spec: JobSpec, steps: int) -> dict[str, Tensor]:
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), start, is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, spec.learning_rate, weight_decay=spec.weight_decay)
    assert isinstance(data.epoch, PackedRows)
    starts = {int(data.epoch.samples[start]) for start in data.epoch.starts[:-1]}
    for step in range(steps):
        batch = global_batch(step, data.epoch, spec.batch_size, spec.seed)
        edges = [i for i, sample in enumerate(batch) if sample in starts]
        packed = [batch[a:b] for a, b in zip(edges, [*edges[1:], len(batch)], strict=True)]
        assert len(packed) == spec.batch_size and max(map(len, packed)) > 1
        normalizer = sum(float(data.trained[i]) for i in batch)
        for row in packed:
            (packed_loss(model, data, row) / normalizer).backward()
        torch.nn.utils.clip_grad_norm_(trained, spec.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return peft.get_peft_model_state_dict(model)


def test_a_step_is_that_of_peft_over_packed_rows(base: Path, data: Path, tmp_path: Path) -> None:
    order = job("first", str(data / "c.jsonl"), **PACKED, max_steps=3)
    train(base, tmp_path / "start", [order])
    start = tmp_path / "start" / "first"
    order = job("second", str(data / "c.jsonl"), **PACKED, max_steps=3, adapter_path=str(start), learning_rate=1e-3)
    train(base, tmp_path / "out", [order, job("other", str(data / "a.jsonl"))])
    expected = trained_by_peft(base, start, opened(base, tmp_path, order).train, JobSpec.model_validate(order), 3)
    found, before = (load_file(place / "adapter_model.safetensors") for place in (tmp_path / "out" / "second", start))
    for name, values in found.items():
        assert_close(values - before[name], expected[name] - before[name], TRAINED[torch.float32], name)


def test_a_step_counts_rows_and_says_so_once(base: Path, data: Path, tmp_path: Path) -> None:
    packed = job("packed", {"path": str(data / "c.jsonl"), "eval_size": 0.2}, **PACKED, max_steps=None, num_train_epochs=2)
    plain = job("plain", {"path": str(data / "c.jsonl"), "eval_size": 0.2}, max_length=400)
    packed.pop("max_steps")
    train_set = opened(base, tmp_path, packed).train
    assert isinstance(train_set.epoch, PackedRows) and isinstance(train_set.epoch.rows, int)
    steps = 2 * math.ceil(train_set.epoch.rows / 2)
    notes: list[str] = []
    results = train(base, tmp_path / "out", [packed, plain], watcher=Watcher(lambda _: None, notes.append))
    assert (results["packed"].status, results["packed"].steps) == ("done", steps) and steps < 2 * 32 // 2
    assert results["packed"].num_tokens == 2 * train_set.lengths.sum()
    assert results["packed"].eval_loss_first == results["plain"].eval_loss_first  # evaluations are not packed
    said = [note for note in notes if "samples make" in note]
    assert len(said) == 1 and f"32 samples make {train_set.epoch.rows} rows of up to 400 tokens" in said[0], notes
    found = check(run_spec(base, tmp_path / "out2", [packed]), device="cpu")
    assert found.jobs[0].total_steps == steps and any("samples make" in warning for warning in found.jobs[0].warnings)


def test_sources_of_a_mixture_are_drawn_by_rows(base: Path, data: Path, tmp_path: Path) -> None:
    sources = [{"path": str(data / "a.jsonl"), "weight": 1}, {"path": str(data / "c.jsonl"), "weight": 3}]
    order = job("mixed", sources, **PACKED)
    prepared = opened(base, tmp_path, order)
    epoch = prepared.train.epoch
    assert isinstance(epoch, PackedRows) and not isinstance(epoch.rows, int)
    assert len(prepared.train) == 64 and sum(epoch.rows.sizes) == len(epoch.starts) - 1
    assert train(base, tmp_path / "out", [order])["mixed"].status == "done"


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_resumed_job_stays_packed_or_not(base: Path, data: Path, tmp_path: Path, packing: bool) -> None:
    order = job("a", str(data / "c.jsonl"), **{**PACKED, "packing": packing}, save_steps=2, max_steps=4)
    whole = sha256(Path(train(base, tmp_path / "whole", [order | {"max_steps": 6}], deterministic=True)["a"].path))
    train(base, tmp_path / "out", [order], deterministic=True)
    with pytest.raises(ConfigError, match=f"data.packing was {packing} and is {not packing}"):
        train(base, tmp_path / "out", [order | {"max_steps": 6, "packing": not packing}], deterministic=True, resume=True)
    resumed = train(base, tmp_path / "out", [order | {"max_steps": 6}], deterministic=True, resume=True)["a"]
    assert resumed.status == "done" and sha256(Path(resumed.path)) == whole
    assert [row["step"] for row in rows(tmp_path / "out" / "a" / "metrics.jsonl") if "loss" in row] == [1, 2, 3, 4, 5, 6]
