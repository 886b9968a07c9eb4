"""States that are made beside the launch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.tiny_runs import job
from tlora.adapters.layout import make_layout
from tlora.adapters.state import init_state
from tlora.errors import ModelError
from tlora.job import JobSpec, LoraConfig
from tlora.planning.job_plan import start_ahead
from tlora.planning.planned_job import PlannedJob

LAYOUT = make_layout(LoraConfig(r=4), {"q_proj": (64, 32), "v_proj": (64, 16)})


def test_starts_made_ahead_are_those_that_each_job_would_make_itself(tmp_path: Path) -> None:
    """One that cannot be made raises when it is asked for; a job that will not run has none."""
    specs = [JobSpec.model_validate(job(name, "x.jsonl", seed=seed)) for name, seed in (("a", 1), ("b", 2), ("bad", 3), ("lost", 4))]
    lost = specs[3].model_copy(update={"adapter_path": str(tmp_path)})
    starts = start_ahead(
        [*(PlannedJob(s, layout=LAYOUT) for s in (specs[0], specs[1], lost)), PlannedJob(specs[2], problems=["no"])], torch.float32
    )
    assert starts.keys() == {"a", "b", "lost"}
    for name, seed in (("a", 1), ("b", 2)):
        made, own = starts[name].result(), init_state(LAYOUT, seed, torch.float32)
        assert torch.equal(made.params, own.params) and made.params.any() and not made.exp_avg.any() and not made.exp_avg_sq.any()
    with pytest.raises(ModelError, match="adapter_config"):
        starts["lost"].result()


def test_a_fresh_adapter_takes_memory_for_what_is_not_zero() -> None:
    """A of 100 numbers and B of 100 million: 1.2 GB with its moments, were the zeros written."""
    layout = make_layout(LoraConfig(r=100), {"q_proj": (1, 1_000_000)})
    before = resident_bytes()
    state = init_state(layout, 0, torch.float32)
    assert resident_bytes() - before < 100 << 20 and state.params.numel() == layout.numel == 100_000_100


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
