"""One rank of one part of `bench.shared_base`: how it meets the others, what it trains, and what it keeps."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from bench.shapes import shape_of
from tlora.adapters.state import init_state
from tlora.job import LoraConfig, TrainConfig
from tlora.sharing.peers import Sharing
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.load import Base
from tlora.supermodel.supermodel import SuperModel

TRAIN = TrainConfig(learning_rate=1e-4, lr_scheduler_type="constant")
STD = 0.01  # of random weights: with 0.02, 80 layers of a 70B's width would blow up what rounding does
JOBS = {name: LoraConfig(r=r) for name, r in zip("abcd", (8, 16, 32, 64), strict=True)}


def open_process_group(rank: Rank, key: str) -> bool:
    """Whether there is one of all ranks (NCCL, gloo without GPUs); why there is none is noted under `key`. The first call opens it."""
    if dist.is_initialized():
        return True
    try:
        store = dist.FileStore(str(rank.options.directory / "gather"), rank.count)
        backend = "nccl" if rank.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank.number, world_size=rank.count, timeout=timedelta(seconds=60))
        dist.all_reduce(torch.zeros(1, device=rank.device))
    except Exception as error:
        rank.note(key, f"cannot be had: {error}")
        return False
    return True


class Rank:
    """One rank of one part: its options, device and ways to meet the others, and what it has found."""

    def __init__(self, options: argparse.Namespace, found: dict[str, Any], keep: Callable[[], None]) -> None:
        self.options, self.found, self.keep = options, found, keep
        self.number, self.count = options.rank, options.gpus
        self.device = torch.device(options.device, options.rank) if options.device == "cuda" else torch.device("cpu")
        self.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)

    def sharing(self, name: str) -> Sharing:
        store = dist.FileStore(str(self.options.directory / name), self.count)
        return Sharing(store, self.number, self.count, self.options.slots, 120.0)

    def say(self, what: str) -> None:
        print(f"[{time.strftime('%X')} rank {self.number}] {what}", flush=True)

    def note(self, key: str, value: Any) -> None:
        """Keep it, whatever comes after."""
        self.found[key] = value
        self.keep()
        self.say(f"{key}: {value}")

    def model(self, shape: str, layers: int | None, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        with self.device:
            config = shape_of(shape, layers)
            return AutoModelForCausalLM.from_config(config, dtype=self.dtype, attn_implementation="sdpa").eval()

    def super_model(self, base: Base, jobs: Mapping[str, LoraConfig] = JOBS, deterministic: bool = False) -> SuperModel:
        found = SuperModel(base, deterministic)
        for name, lora in jobs.items():
            state = init_state(found.layout(lora), ord(name), torch.float32, self.device)
            noise = torch.randn(state.params.shape, generator=torch.Generator().manual_seed(ord(name))).to(self.device)
            found.join(name, lora, TRAIN, state=replace(state, params=state.params + 0.01 * noise))
        return found

    def batch(self, tokens: int, vocab_size: int, seed: int = 0) -> PackedBatch:
        """One sample of each job."""
        ids = torch.randint(
            3, vocab_size, (len(JOBS), tokens // len(JOBS)), generator=torch.Generator().manual_seed(seed + 10 * self.number)
        )
        rows = [
            BatchRow(name, row.int().numpy(), torch.ones(len(row)).numpy(), float(len(row))) for name, row in zip(JOBS, ids, strict=True)
        ]
        return collate(rows, self.device)
