"""Two stages: the bytes of one GPU, by copies between two GPUs and through the host's memory.

Where there is one GPU, both ranks compute on it: their kernels take turns, and hidden states go through pinned memory all the same.
Shown on two H200s (both links), and with both ranks on one H100.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import tlora
from tests.engine.conftest import save_base
from tests.engine.ranks.test_stage_runs import write_preferences
from tests.engine.tiny_runs import job, run_spec, sha256, write_rows
from tlora.engine import train
from tlora.engine.watcher import Watcher
from tlora.job import LoraConfig, TrainConfig
from tlora.shape.stages import LayerRange
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.supermodel import SuperModel

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


def test_passes_that_are_open_at_a_time_are_graphs_with_the_bits_of_launches(tmp_path: Path) -> None:
    """A stage between two others, in this process: a second pass goes forward before the first one's gradient has come."""
    base = save_base(tmp_path / "base", num_hidden_layers=3, hidden_size=128, intermediate_size=256, dtype=torch.bfloat16)
    found = [middle_stage(base, graphs) for graphs in (False, True)]
    assert [count for _, count in found] == [0, 2], "each of the two passes that are open has graphs of its own"
    assert all(torch.equal(*both) for both in zip(found[0][0], found[1][0], strict=True))


def middle_stage(base: Path, graphs: bool) -> tuple[list[Tensor], int]:
    """Outputs and gradients of x and of the adapter in six rounds of two passes, and how many graphs there are in the end."""
    model, ids = (
        SuperModel.from_pretrained(str(base), device="cuda", deterministic=True, shared=LayerRange(1, 2, 3)),
        np.arange(3, 67, dtype=np.int32),
    )
    assert model.fast_path is not None
    if not graphs:
        model.fast_path._graphs.clear()
    model.join("a", LoraConfig(r=8, lora_dropout=0.1), TrainConfig(seed=1, max_steps=9))
    model.state("a").params += 0.05
    model.rewrite("a")
    sent, made = torch.Generator("cuda").manual_seed(0), list[Tensor]()

    class Before:
        def receive(self, tokens: int) -> Tensor:
            return torch.randn(tokens, 128, generator=sent, device="cuda").to(torch.bfloat16)

        def send_back(self, gradient_TH: Tensor) -> None:
            made.append(gradient_TH.clone())

    model.passes.upstream = Before()
    for number in range(6):
        rows = [BatchRow("a", ids, np.ones(64, np.float32), 64.0, (7, number, each)) for each in range(2)]
        opened: list[tuple[Tensor, Callable[[Tensor], object]]] = []
        for row in rows:
            [each] = model.stage_passes(collate([row], model.device), (), train=True)
            hidden_TH, back = each.run()
            assert back is not None
            made.append(hidden_TH.clone())
            opened.append((hidden_TH, back))
        for hidden_TH, back in opened:
            back(torch.randn(hidden_TH.shape, generator=sent, device="cuda").to(torch.bfloat16))
        made.append(model.gradient("a").clone())
        model.zero_grad_of("a")
    return made, sum(each.num_captured for each in model.fast_path._graphs)
