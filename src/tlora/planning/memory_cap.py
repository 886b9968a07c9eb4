"""Keeps torch's allocator on a GPU below an ordered `memory_limit`, with the blocks that are free: nvidia-smi shows no more than that and
CUDA's own context.

Otherwise the allocator keeps blocks of all sizes that it has ever given out (1.2 times the peak was seen), and each block is up to 1 MiB
larger than its tensor (0.1 GiB of an 8B's activations), which no count of tensors knows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch

from tlora.planning.memory import MemoryModel

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_FREE_BLOCKS = 64  # the part of the limit that is left to pages which are in part free


@contextmanager
def capped_allocator(device: torch.device, ordered: int | Literal["auto"]) -> Iterator[None]:
    """Within it `device` gives no more than `ordered` bytes to this process besides what it holds now."""
    if device.type != "cuda" or ordered == "auto" or not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction(device)
    cap_allocator(device, ordered)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
        _expand(False)


def cap_allocator(device: torch.device, limit_bytes: int) -> None:
    """From now on. Where the limit is reached, torch frees all blocks that are free before it says that memory is out. Blocks are cut from
    segments that grow and shrink by pages, so that nearly none are in the way of others. Nothing where there is no GPU.
    """
    if not torch.cuda.is_available():
        return
    _expand(True)
    allowed = torch.cuda.memory_reserved(device) + limit_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / torch.cuda.mem_get_info(device)[1]), device)


def with_free_blocks(memory: MemoryModel, device: torch.device, ordered: int | Literal["auto"]) -> MemoryModel:
    """`memory` for a run whose allocator is capped: what its tensors cannot have."""
    if device.type != "cuda" or ordered == "auto":
        return memory
    return replace(memory, base_bytes=memory.base_bytes + ordered // _FREE_BLOCKS)


def _expand(on: bool) -> None:
    """Unless the user has settings of his own."""
    if not any(name in os.environ for name in _SETTINGS):
        binding: Any = torch._C
        binding._accelerator_setAllocatorSettings(f"expandable_segments:{on}")
