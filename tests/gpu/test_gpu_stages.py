"""Two stages on two GPUs: the bytes of one GPU, by copies between the GPUs and through the host's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tlora
from tests.engine.conftest import save_base
from tests.engine.tiny_runs import job, run_spec, sha256, write_rows
from tlora.engine.watcher import Watcher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
NAMES = ("dropout", "evaluates", "long")


@pytest.mark.parametrize("precision", [None, "nf4"])
def test_two_stages_give_the_bytes_of_one_gpu(precision: str | None, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", num_hidden_layers=4, hidden_size=128, intermediate_size=256, dtype=torch.bfloat16)
    data = str(write_rows(tmp_path / "a.jsonl", 24, high=6))
    orders = [
        job("dropout", data, lora_dropout=0.1, max_steps=6, batch_size=2),
        job("evaluates", data, max_steps=5, batch_size=2, eval_size=2, eval_steps=2, seed=3),
        job("long", data, max_steps=12, batch_size=8, seed=4, layers_to_transform=[0, 3]),
    ]
    settings = {"deterministic": True, "base_precision": precision, "token_budget": 128}
    assert tlora.train(run_spec(base, tmp_path / "whole", orders, **settings), gpus="0").status == "done"
    for links in ("auto", "host"):
        out, lines = tmp_path / links, list[str]()
        spec = run_spec(base, out, orders, layout="stages", links=links, **settings)
        results = tlora.train(spec, gpus="0,1", watcher=Watcher(note=lines.append))
        assert {result.name: result.status for result in results.values()} == dict.fromkeys(NAMES, "done"), lines
        assert {name: sha256(out / name) for name in NAMES} == {name: sha256(tmp_path / "whole" / name) for name in NAMES}
