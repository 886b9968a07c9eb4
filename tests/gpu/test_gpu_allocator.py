"""`memory_limit` on a GPU: all that torch holds, free blocks included, stays within 1/16 of it, and nothing that was planned runs out of
memory.
"""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path

import pytest
import torch

import tlora
from tests.engine.tiny_runs import job, run_spec, save_base
from tlora.engine.watcher import Watcher
from tlora.job import RunSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LIMIT = 3 << 30
SIZE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 8}


def orders(directory: Path) -> RunSpec:
    """Samples of all lengths up to 2,048, so that micro-batches, and blocks, have many sizes."""
    base, dice = save_base(directory / "base", **SIZE), random.Random(0)
    rows = [{"input_ids": [dice.randrange(3, 50) for _ in range(dice.randrange(100, 2000))]} for _ in range(96)]
    (directory / "ids.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": str(directory / "ids.jsonl"), "max_length": 2048}
    jobs = [job(name, data, r=16, batch_size=8, max_steps=12, learning_rate=1e-4) for name in "abcd"]
    return run_spec(base, directory / "out", jobs, memory_limit=LIMIT, dtype="bfloat16")


def train(run: RunSpec) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """How each job ended and why, and what was noted."""
    said = list[str]()
    results = tlora.train(run, device="cuda", watcher=Watcher(note=said.append))
    return {name: (result.status, result.reason) for name, result in results.items()}, said


def test_what_torch_holds_stays_near_the_limit_and_no_micro_batch_is_halved(tmp_path: Path) -> None:
    run = orders(tmp_path)
    torch.cuda.empty_cache()
    before, fraction = torch.cuda.memory_reserved(), torch.cuda.get_per_process_memory_fraction()
    torch.cuda.reset_peak_memory_stats()
    ends, said = train(run)
    assert ends == dict.fromkeys("abcd", ("done", "")), said
    assert torch.cuda.max_memory_reserved() - before <= LIMIT + LIMIT // 16
    assert torch.cuda.max_memory_allocated() > 0.6 * LIMIT, "the limit did not matter"
    assert not [line for line in said if "out of memory" in line]
    assert torch.cuda.get_per_process_memory_fraction() == fraction


def test_jobs_go_on_with_less_memory_than_was_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator gives 1/16 less than the limit, by which the plan goes. What passes hold is given back when memory has run out."""
    monkeypatch.setattr("tlora.planning.allocator._FREE_SHARE", -16)
    gc.collect()  # a model of another test would be counted as held, and collected meanwhile
    ends, said = train(orders(tmp_path))
    assert ends == dict.fromkeys("abcd", ("done", "")), said
    assert [line for line in said if "out of memory" in line], said
