"""A base that two GPUs share: the bits of one that each holds, and both ways of reading the other's memory. By `bench.shared_base`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench.test_shared_base_bench import run
from tests.sharing.ranks import start_ranks, store_path
from tlora.sharing import peer_memory
from tlora.sharing.peers import Peers, Sharing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def test_streamed_layers_have_the_bits_of_resident_ones(tmp_path: Path) -> None:
    found = run(tmp_path, "--device", "cuda", "--gpus", "2", "--parts", "bits,early", "--total-seconds", "500")
    for rank in found["bits"]:
        assert "error" not in rank, rank
        compared = {key: value for key, value in rank.items() if key.endswith("recomputed")}
        assert len(compared) == 6 and set(compared.values()) == {"equal"}, compared
    assert found["early"][1] == {"memory of a rank that has ended": "is still there"}


def read(rank: int, store: str, way: str) -> bool:
    device, num_bytes = torch.device("cuda", rank), 10_000_000
    peers = Peers(Sharing(torch.distributed.FileStore(store, 2), rank, 2))
    connect: Any = getattr(peer_memory, way)
    memory = connect(num_bytes, peers, device)
    memory.own.fill_(rank + 1)
    torch.cuda.synchronize(device)
    peers.exchange("filled", True)
    target, side = torch.empty(num_bytes, dtype=torch.uint8, device=device), torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        memory.read(1 - rank, 0, target)
    torch.cuda.current_stream(device).wait_stream(side)
    found = bool((target == 2 - rank).all())
    peers.exchange("read", True)
    return found


@pytest.mark.parametrize("way", ["_connect_symmetric", "_connect_ipc"])
def test_each_way_of_reading_brings_the_peers_bytes(way: str, tmp_path: Path) -> None:
    with start_ranks(2, fresh=True) as ranks:
        assert ranks.run(read, store_path(tmp_path), way) == [True, True]
