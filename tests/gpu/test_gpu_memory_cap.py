"""`memory_limit` on a GPU: all that torch holds, free blocks included, stays below it, and nothing runs out of memory that was planned."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

import tlora
from tests.engine.tiny_runs import job, run_spec, save_base
from tlora.engine.watcher import Watcher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LIMIT = 3 << 30


def test_what_torch_holds_stays_below_the_limit_and_no_micro_batch_is_halved(tmp_path: Path) -> None:
    """Samples of all lengths up to 2,048, so that micro-batches, and blocks, have many sizes."""
    base, dice = save_base(tmp_path / "base", hidden_size=2048, intermediate_size=8192, num_hidden_layers=12), random.Random(0)
    rows = [{"input_ids": [dice.randrange(3, 50) for _ in range(dice.randrange(100, 2000))]} for _ in range(96)]
    (tmp_path / "ids.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": str(tmp_path / "ids.jsonl"), "max_length": 2048}
    jobs = [job(name, data, r=16, batch_size=8, max_steps=12) for name in "abcd"]
    torch.cuda.empty_cache()
    before, fraction, said = torch.cuda.memory_reserved(), torch.cuda.get_per_process_memory_fraction(), list[str]()
    torch.cuda.reset_peak_memory_stats()
    run = run_spec(base, tmp_path / "out", jobs, memory_limit=LIMIT, dtype="bfloat16")
    results = tlora.train(run, device="cuda", watcher=Watcher(note=said.append))
    assert all(result.status == "done" for result in results.values())
    assert torch.cuda.max_memory_reserved() - before <= LIMIT
    assert torch.cuda.max_memory_allocated() > 0.6 * LIMIT, "the limit did not matter"
    assert not [line for line in said if "out of memory" in line]
    assert torch.cuda.get_per_process_memory_fraction() == fraction
