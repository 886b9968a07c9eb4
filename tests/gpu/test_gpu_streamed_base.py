"""A base streamed from pinned host memory on a GPU: the bytes of a resident one, less memory, and waits that are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tlora
from tests.engine.tiny_runs import job, run_spec, same_bytes, save_base, write_rows
from tlora.kernels.device import capability_of, class_of
from tlora.sharing.host_memory import HostMemory, Streaming
from tlora.sharing.link_speed import measure_link
from tlora.supermodel.supermodel import SuperModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
JOBS = ("a", "b")


def save_wide_base(directory: Path) -> Path:
    base = save_base(directory, hidden_size=256, intermediate_size=512, num_hidden_layers=6)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(base)
    return base


def has_fp8() -> bool:
    card = class_of(capability_of(torch.device("cuda")))
    return card is not None and card.fp8


@pytest.mark.parametrize(("precision", "recompute"), [(None, "none"), (None, "all"), ("fp8", 3), ("nf4", "none")])
def test_adapters_have_the_bytes_of_those_over_a_resident_base(precision: str | None, recompute: Any, tmp_path: Path) -> None:
    if precision == "fp8" and not has_fp8():
        pytest.skip("needs a GPU with fp8")
    base, data = save_wide_base(tmp_path / "base"), write_rows(tmp_path / "d.jsonl", 24)
    jobs = [job("a", str(data), lora_dropout=0.1), job("b", str(data), r=24, target_modules=["q_proj", "down_proj"], seed=3)]
    for layout in ("auto", "streamed"):
        run = run_spec(base, tmp_path / layout, jobs, layout=layout, base_precision=precision, recompute=recompute, deterministic=True)
        assert all(result.status == "done" for result in tlora.train(run, device="cuda").values())
    same_bytes(tmp_path / "streamed", tmp_path / "auto", JOBS)
    facts = json.loads((tmp_path / "streamed" / "run.json").read_text())["streamed"]
    assert facts["slots"] == 2 and facts["link_gb_per_second"] > 0.5


def test_the_device_holds_slots_and_not_layers(tmp_path: Path) -> None:
    base, device = save_wide_base(tmp_path / "base"), torch.device("cuda")
    torch.ones(16, 16, device=device) @ torch.ones(16, 16, device=device)  # takes the workspace of torch's products, 32 MiB
    before = torch.cuda.memory_allocated(device)
    model = SuperModel.from_pretrained(str(base), device="cuda", shared=Streaming(2))
    layers = model.base.layers
    assert layers is not None and layers._memory.own.is_pinned() and layers._memory.own.device.type == "cpu"
    others = sum(p.nbytes for p in model.model.parameters() if not p.is_meta)
    assert layers.held_bytes == 2 * layers.layout.slot_bytes
    assert torch.cuda.memory_allocated(device) - before < others + layers.held_bytes + (4 << 20)
    assert model.fetches is not None and model.fetches.layers > 0 and model.fetches.exposed_seconds > 0


def test_memory_is_unpinned_with_its_object() -> None:
    device = torch.device("cuda")
    memory = HostMemory(1 << 20, device)
    own = memory.own
    assert own.is_pinned()
    del memory
    assert not own.is_pinned()
    assert measure_link(device) > 1e8
