"""What the links between stages take where GPUs read each other's memory is counted in a stage's memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.engine.tiny_runs import job
from tests.shape.test_base_parts import LAYERS, PARTS
from tlora.batching.pipeline_model import PADDING
from tlora.engine.ranks import stage_links
from tlora.engine.ranks.stage_links import StageLinks, StageSizes
from tlora.job import JobSpec
from tlora.planning.job_work import counting_jobs
from tlora.planning.planned_job import PlannedJob
from tlora.shape.stages import cut_layers
from tlora.sharing.peer_memory import open_peer_memory
from tlora.sharing.peers import Peers, Sharing

TOKENS = 384


def opened(stages: int, sizes: StageSizes, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes in the memory of each stage's device."""
    found = list[int]()

    def count(num_bytes: int, peers: Peers, device: torch.device) -> Any:
        found.append(num_bytes)
        return open_peer_memory(num_bytes, peers, device)

    monkeypatch.setattr(stage_links, "open_peer_memory", count)
    store, cpu = HashStore(), torch.device("cpu")
    meet = [
        threading.Thread(target=lambda rank=rank: StageLinks(Peers(Sharing(store, rank, stages)), sizes, cpu, through_host=False))
        for rank in range(stages)
    ]
    for thread in meet:
        thread.start()
    for thread in meet:
        thread.join()
    return found


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_rings_that_peers_read_count_on_each_stage(stages: int, objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of stages + 2 boundaries each, for a reference twice as long; nothing was counted of them."""
    jobs = [PlannedJob(JobSpec.model_validate(job("a", "none.jsonl", objective=objective)))]
    passes = 2 if objective == "dpo" else 1
    sizes = StageSizes(passes * (TOKENS + PADDING), PARTS.hidden_size, 1, torch.bfloat16, torch.float32)
    found = opened(stages, sizes, monkeypatch)
    assert found == [2 * (stages + 2) * passes * (TOKENS + PADDING) * PARTS.hidden_size * 2] * stages
    cuts = cut_layers([1.0] * LAYERS, 0.0, [1.0] * stages)
    beside = [[counting_jobs(each, jobs, deterministic=True) for each in PARTS.memories(cuts, reads)] for reads in (True, False)]
    for with_rings, without, ring_bytes in zip(*beside, found, strict=True):
        for depth in (0, LAYERS):
            assert with_rings.activation_bytes(TOKENS, depth) - without.activation_bytes(TOKENS, depth) == ring_bytes
            room = with_rings.activation_bytes(TOKENS, depth)
            assert with_rings.most_tokens(room, depth) == TOKENS < without.most_tokens(room, depth)
