"""Layers recomputed by the tokens of a micro-batch, on a GPU: a run below its memory limit, with long samples among short ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tlora
from tests.engine.tiny_runs import run_spec, save_base, sha256
from tlora.engine.watcher import Watcher
from tlora.supermodel.supermodel import SuperModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LONG, SHORT = 6000, (100, 500)  # tokens
SIZE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose activations outweigh its other memory."""
    return save_base(tmp_path_factory.mktemp("wide"), **SIZE)


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long sample for every dozen of short ones."""
    dice, file = random.Random(0), tmp_path_factory.mktemp("ids") / "ids.jsonl"
    lengths = [LONG if i % 13 == 5 else dice.randrange(*SHORT) for i in range(26)]
    file.write_text("\n".join(json.dumps({"input_ids": [dice.randrange(3, 100) for _ in range(n)]}) for n in lengths))
    return file


@pytest.fixture
def depths(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Tokens of each micro-batch that is trained, and the layers that it recomputes."""
    seen: list[tuple[int, int]] = []
    forward_backward = SuperModel.forward_backward

    def note(self: SuperModel, batch: Any, *rest: Any) -> Any:
        seen.append((len(batch.input_ids_T), self.recompute.layers(len(batch.input_ids_T))))
        return forward_backward(self, batch, *rest)

    monkeypatch.setattr(SuperModel, "forward_backward", note)
    yield seen


@pytest.mark.usefixtures("forked_children")
def test_long_samples_among_short_ones_stay_below_the_limit_with_the_same_bits(
    wide: Path, ids: Path, tmp_path: Path, depths: list[tuple[int, int]]
) -> None:
    jobs = [
        {"name": "plain", "data": str(ids), "max_length": LONG, "r": 16, "batch_size": 6, "max_steps": 5, "learning_rate": 1e-3},
        {"name": "dropped", "data": str(ids), "max_length": LONG, "r": 8, "batch_size": 4, "max_steps": 6, "lora_dropout": 0.1, "seed": 1},
    ]

    def run(name: str, **settings: Any) -> tuple[dict[str, str], dict[str, Any], int, list[str]]:
        depths.clear()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, notes = torch.cuda.memory_allocated(), list[str]()
        order = run_spec(wide, tmp_path / name, jobs, deterministic=True, dtype="bfloat16", token_budget=1024, **settings)
        tlora.train(order, device="cuda", watcher=Watcher(note=notes.append))
        peak = torch.cuda.max_memory_allocated() - before
        facts = json.loads((tmp_path / name / "run.json").read_text())
        return {job["name"]: sha256(tmp_path / name / job["name"]) for job in jobs}, facts, peak, notes

    expected, whole, peak, _ = run("whole", recompute="none")
    assert {layers for tokens, layers in depths if tokens >= LONG} == {0}
    limit = int(0.72 * peak)
    found, facts, below, notes = run("below", memory_limit=limit)
    assert found == expected, notes
    by_tokens = {int(tokens): layers for tokens, layers in facts["recomputed_by_tokens"].items()}
    assert len(by_tokens) == 2 and max(by_tokens) >= LONG > facts["token_budget"], (by_tokens, notes)
    assert by_tokens[facts["token_budget"]] < facts["recomputed_layers"] == by_tokens[max(by_tokens)], (by_tokens, notes)
    assert below <= limit, (below / limit, notes)
    assert not [line for line in notes if "out of memory" in line]
    long = {layers for tokens, layers in depths if tokens >= LONG}
    assert max(long) == facts["recomputed_layers"] and whole["recomputed_layers"] == 0
