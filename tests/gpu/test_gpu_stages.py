"""Two stages: the bytes of one GPU, by copies between two GPUs and through the host's memory.

Where there is one GPU, both ranks compute on it: their kernels take turns, and hidden states go through pinned memory all the same.
Shown on two H200s (both links), and with both ranks on one H100.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tlora
from tests.engine.conftest import save_base
from tests.engine.ranks.test_stage_runs import write_preferences
from tests.engine.tiny_runs import job, run_spec, sha256, write_rows
from tlora.engine import train
from tlora.engine.watcher import Watcher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TWO = torch.cuda.device_count() > 1
DEVICES = ("cuda:0", "cuda:1" if TWO else "cuda:0")
NAMES = ("dropout", "evaluates", "long", "dpo")


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the devices of this machine, which `--gpus` names each once."""
    monkeypatch.setattr(train, "rank_devices", lambda gpus, device: DEVICES if gpus == "0,1" else ("cuda:0",))


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("precision", [None, "nf4"])
@pytest.mark.parametrize("links", [pytest.param("auto", marks=pytest.mark.skipif(not TWO, reason="needs two GPUs")), "host"])
def test_two_stages_give_the_bytes_of_one_gpu(precision: str | None, links: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", num_hidden_layers=4, hidden_size=128, intermediate_size=256, dtype=torch.bfloat16)
    data = str(write_rows(tmp_path / "a.jsonl", 24, high=6))
    pairs, _ = write_preferences(tmp_path, 12)
    orders = [
        job("dropout", data, lora_dropout=0.1, max_steps=6, batch_size=2),
        job("evaluates", data, max_steps=5, batch_size=2, eval_size=2, eval_steps=2, seed=3),
        job("long", data, max_steps=12, batch_size=8, seed=4, layers_to_transform=[0, 3]),
        job("dpo", {"path": pairs, "eval_size": 3}, objective="dpo", lora_dropout=0.1, eval_steps=2, batch_size=3),
    ]
    settings = {"deterministic": True, "base_precision": precision, "token_budget": 128, "memory_limit": "8GiB"}
    assert tlora.train(run_spec(base, tmp_path / "whole", orders, **settings), gpus="0").status == "done"
    out, lines = tmp_path / "stages", list[str]()
    spec = run_spec(base, out, orders, layout="stages", links=links, **settings)
    results = tlora.train(spec, gpus="0,1", watcher=Watcher(note=lines.append))
    assert {result.name: result.status for result in results.values()} == dict.fromkeys(NAMES, "done"), lines
    assert {name: sha256(out / name) for name in NAMES} == {name: sha256(tmp_path / "whole" / name) for name in NAMES}
