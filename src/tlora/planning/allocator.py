"""How torch's allocator holds a GPU's memory for a process that trains there alone: in segments that grow and shrink by pages, and below an
ordered `memory_limit`.

By default the allocator keeps blocks of all sizes that it has ever given out: 65.7 GiB where an 8B's tensors had 35.2 at their peak, and
35.6 with such segments (bench/results/h100_de0977a_sm80_r16_8b.json, h100_de0977a_allocator_sm80_r16_8b.json). A streamed 70B ran out of
memory between 6.4 GiB of free blocks. Ranks keep the default: where they cannot have symmetric memory, they give each other handles to
whole blocks (`sharing/peer_memory.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_FREE_SHARE = 16  # the part of an ordered limit that blocks which are free may take beyond it; 2.7 and 3.1 % were seen at 6 and 3 GiB


@contextmanager
def tight_allocator(device: torch.device, ordered: int | Literal["auto"]) -> Iterator[None]:
    """`tighten_allocator` while the block runs."""
    if not _is_here(device):
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction(_index(device))
    tighten_allocator(device, ordered)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, _index(device))
        _expand(False)


def tighten_allocator(device: torch.device, ordered: int | Literal["auto"]) -> None:
    """From now on. Of an `ordered` limit, in bytes, torch takes at most 1/16 more, besides what it holds now; before it says that memory is
    out, it gives back all pages that are free. Nothing on a CPU.
    """
    if not _is_here(device):
        return
    _expand(True)
    if ordered != "auto":
        torch.cuda.empty_cache()  # or the run could have blocks that are free on top
        allowed = torch.cuda.memory_reserved(_index(device)) + ordered + ordered // _FREE_SHARE
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / torch.cuda.mem_get_info(_index(device))[1]), _index(device))


def _is_here(device: torch.device) -> bool:
    """A plan may also be made for a GPU where there is none."""
    return device.type == "cuda" and torch.cuda.is_available()


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _expand(on: bool) -> None:
    """Unless the environment has settings for the allocator."""
    if not any(name in os.environ for name in _SETTINGS):
        binding: Any = torch._C
        binding._accelerator_setAllocatorSettings(f"expandable_segments:{on}")
