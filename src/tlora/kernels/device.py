"""Which devices the fused kernels run on, and how small tables get there. No triton here: asking costs nothing."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

CAPABILITY = (9, 0)  # Hopper, the first with bulk tensor copies
_SHARED_MEMORY = 227 * 1024  # bytes for one block: three stages of a 128 x 256 tile, and its adapter's rows


def runs_kernels(device: torch.device) -> bool:
    """A GPU of Hopper's kind (H100, H200, B200), or a CPU under Triton's interpreter. Others take plain torch operations."""
    if device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= _SHARED_MEMORY


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """To a GPU through pinned memory: from pageable memory the copy would wait for all that the GPU still has to do."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
