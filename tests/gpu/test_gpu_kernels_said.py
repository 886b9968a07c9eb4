"""A run on a GPU says which kernels it takes, at its start and in `run.json`: those of the card's class, or of the one that is forced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tlora
from tests.engine.tiny_runs import job, run_spec, save_base, write_rows
from tlora.engine.watcher import Watcher
from tlora.kernels.device import card_of, describe_class

pytestmark = pytest.mark.gpu


def test_a_run_says_its_kernels(tmp_path: Path) -> None:
    data, notes = write_rows(tmp_path / "d.jsonl", 16), list[str]()
    run = run_spec(save_base(tmp_path / "base"), tmp_path / "out", [job("a", str(data))])
    tlora.train(run, device="cuda", watcher=Watcher(note=notes.append))
    card = card_of(torch.device("cuda"))
    assert card is not None
    expected = f"fused, {describe_class(card, torch.device('cuda'))}"
    assert f"kernels: {expected}" in notes
    assert json.loads((tmp_path / "out" / "run.json").read_text())["kernels"] == expected
