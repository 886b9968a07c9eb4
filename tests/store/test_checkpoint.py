"""What a checkpoint keeps beside tensors: progress, and the counters of the optimizer, each from its one owner."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tlora.adapters import peft
from tlora.adapters.layout import make_layout
from tlora.adapters.state import AdapterState, init_state
from tlora.errors import CheckpointError
from tlora.group.reports import TrainingProgress
from tlora.job import LoraConfig
from tlora.store import checkpoint

LORA = LoraConfig(r=3)
LAYOUT = make_layout(LORA, {"model.layers.0.q_proj": (8, 12)})


def saved(directory: Path) -> AdapterState:
    state = init_state(LAYOUT, 1, torch.float32)
    state.exp_avg.normal_()
    state.exp_avg_sq.uniform_()
    state.step, state.updates, state.skipped = 9, 6, 2
    checkpoint.save(directory, state, TrainingProgress(step=9, losses=(1.5,)), LORA, "base")
    return state


def test_counters_come_back_with_the_state(tmp_path: Path) -> None:
    """Two steps in a row were skipped: one more after a resume must be the third, or a broken job would go on for ever."""
    state = saved(tmp_path / "checkpoint-9")
    again, progress = checkpoint.load(tmp_path / "checkpoint-9", LAYOUT, torch.float32)
    assert (again.step, again.updates, again.skipped) == (9, 6, 2) and (progress.step, progress.losses) == (9, (1.5,))
    for name in ("params", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(again, name), getattr(state, name)), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tensor_files_are_those_of_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(peft, "_PIECE_BYTES", 100)
    tensors = {name: torch.randn(7, 5).to(dtype) for name in ("b", "a", "ä")} | {"none": torch.empty(0, 3, dtype=dtype)}
    for number, metadata in enumerate((None, {"format": "pt"})):
        ours, theirs = tmp_path / f"ours{number}", tmp_path / f"theirs{number}"
        digest = peft.write_tensors(ours, {"turned": torch.randn(3, 4).to(dtype).t(), **tensors}, metadata)
        save_file({"turned": load_file(ours)["turned"], **tensors}, theirs, metadata)
        assert ours.read_bytes() == theirs.read_bytes() and digest == hashlib.sha256(theirs.read_bytes()).hexdigest()


@pytest.mark.parametrize("change", [{"updates": None}, {"skipped": "x"}, {"unknown": 1}])
def test_a_state_of_another_version_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    saved(tmp_path / "checkpoint-9")
    path = tmp_path / "checkpoint-9" / checkpoint.STATE_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=r"state.json: is not of this version"):
        checkpoint.read_progress(tmp_path / "checkpoint-9")


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    """What a reserve is made of: never less than what is written, and not much more."""
    saved(tmp_path / "checkpoint-9")
    taken = sum(path.stat().st_blocks * 512 for path in (tmp_path / "checkpoint-9").iterdir())
    assert 0 <= checkpoint.checkpoint_bytes(LAYOUT, 4) - taken < 64 << 10
    weights = (tmp_path / "checkpoint-9" / "adapter_model.safetensors").stat().st_size
    assert weights < checkpoint.adapter_bytes(LAYOUT, 4) < checkpoint.export_bytes(tmp_path / "checkpoint-9") < weights + (66 << 10)
