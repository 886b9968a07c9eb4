"""Launches of the kernel that unpacks a weight of 4 bits."""

# Triton's own annotations say nothing of launch options:
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora.kernels.triton_packed import dequantize_kernel

if TYPE_CHECKING:
    from tlora.kernels.packed_weight import PackedWeight

_BYTES = 1024  # of a program: each of its threads loads 8 and stores 32
_VALUES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def dequantize(packed: PackedWeight, table: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype`. The allocator gives its memory to the next one of its size: one scratch serves all layers, in a CUDA graph too."""
    out = torch.empty(packed.shape, dtype=dtype, device=packed.weight.device)
    launch_dequantize(packed, table, out)
    return out


def launch_dequantize(packed: PackedWeight, table: Tensor, out: Tensor) -> None:
    """The same into a contiguous `out` [N, K]."""
    count = out.numel()
    assert count < 1 << 31, f"{packed.shape}: {count} numbers, and 32 bits count them"
    value = _VALUES[packed.value_dtype]
    dequantize_kernel[(triton.cdiv(len(packed.weight), _BYTES),)](
        packed.weight, packed.scale, packed.zero, table, out, count, GROUP=packed.group, VALUE=value, BLOCK=_BYTES, num_warps=4
    )
