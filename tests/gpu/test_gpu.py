"""The promises on a GPU: together equals alone (bitwise in deterministic mode), and a run end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tlora
from tests.engine.conftest import save_base
from tests.engine.tiny_runs import write_rows
from tests.tiny import make_model, make_samples
from tlora.job import JobSpec, LoraConfig, TrainConfig
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
RANKS = {"a": 4, "b": 16, "c": 64}


def batch_of(job_ids: list[str], step: int) -> PackedBatch:
    rows: list[BatchRow] = []
    for job_id in job_ids:
        own = make_samples(3, seed=100 * step + ord(job_id), low=3, high=90)
        normalizer = float(sum(s.loss_weights[1:].sum() for s in own))
        rows += [BatchRow(job_id, s.input_ids, s.loss_weights, normalizer, (7, step, i)) for i, s in enumerate(own)]
    return collate(rows, "cuda", pad_to=1024)


def train_adapters(job_ids: list[str], dtype: torch.dtype, deterministic: bool) -> dict[str, torch.Tensor]:
    """Adapters after five steps."""
    model = make_model("llama", dtype, hidden_size=256, intermediate_size=512).to("cuda")
    shared = SuperModel(make_base(model, "llama"), deterministic)
    for job_id in job_ids:
        lora = LoraConfig(r=RANKS[job_id], lora_dropout=0.1 if job_id == "b" else 0.0)
        train = TrainConfig(learning_rate=1e-3, max_steps=10, seed=ord(job_id))
        shared.join(job_id, lora, train)
    applied: list[bool] = []
    for step in range(5):
        shared.forward_backward(batch_of(job_ids, step))
        stats = shared.optim_step(job_ids)
        applied += [stats[job_id].applied for job_id in job_ids]
        assert all(bool(shared.state(job_id).params.isfinite().all()) for job_id in job_ids)
    assert all(applied)
    return {job_id: shared.leave(job_id).params.cpu() for job_id in job_ids}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_together_is_alone_bitwise_in_deterministic_mode(dtype: torch.dtype) -> None:
    together = train_adapters(["a", "b", "c"], dtype, deterministic=True)
    for job_id in RANKS:
        assert torch.equal(together[job_id], train_adapters([job_id], dtype, deterministic=True)[job_id]), job_id


def test_a_run_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    base = save_base(tmp_path / "base")
    jobs = []
    for number, rank in enumerate((4, 16, 64)):
        path = tmp_path / f"{number}.jsonl"
        write_rows(path, 24, number, high=30)
        data = {"path": str(path), "eval_size": 4}
        jobs.append(JobSpec.model_validate({"name": f"job{number}", "data": data, "r": rank, "learning_rate": 1e-3, "num_train_epochs": 3}))
    results = tlora.train(jobs, base_model=str(base), output_dir=str(tmp_path / "out"), dtype="bfloat16", device="cuda")
    assert all(result.status == "done" for result in results.values()), results
    for result in results.values():
        assert result.eval_loss is not None and result.eval_loss_first is not None
        assert result.eval_loss < result.eval_loss_first


@pytest.mark.parametrize("normalizer", [100.0, 65_000.0, 1e6])
def test_a_float16_base_loses_no_gradient_in_a_large_batch(normalizer: float) -> None:
    """Two micro-batches and a step, on the kernels, against fp32 with the same weights; and the norm that the device's optimizer sees."""
    found: dict[torch.dtype, torch.Tensor] = {}
    norms: dict[torch.dtype, float] = {}
    for dtype in (torch.float16, torch.float32):
        model = SuperModel(make_base(make_model("llama", hidden_size=256, intermediate_size=512).half().to("cuda", dtype), "llama"))
        assert model.num_layers
        model.join("a", LoraConfig(r=8), TrainConfig(lr_scheduler_type="constant", max_grad_norm=0))
        for seed in range(2):
            rows = [BatchRow("a", s.input_ids, s.loss_weights, normalizer) for s in make_samples(4, seed=seed)]
            model.forward_backward(collate(rows, "cuda"))
        found[dtype] = model.gradient("a").double()
        norms[dtype] = model.optim_step(["a"])["a"].grad_norm
        assert not model.gradient("a").any()
    assert float(torch.cosine_similarity(found[torch.float16], found[torch.float32], dim=0)) > 0.999
    assert norms[torch.float16] == pytest.approx(norms[torch.float32], rel=1e-2)
    assert norms[torch.float32] == pytest.approx(float(found[torch.float32].norm()), rel=1e-4)
