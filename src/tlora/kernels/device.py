"""Which devices run the fused kernels, and how small tables are copied to and from them. Does not import triton."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

CAPABILITY = (9, 0)  # Hopper, the first with bulk tensor copies
SHARED_MEMORY = 227 * 1024  # bytes for one block: three stages of a 128 x 256 tile, and its adapter's rows


def runs_kernels(device: torch.device) -> bool:
    """Whether `device` runs the kernels: a Hopper or newer GPU (H100, H200, B200), or a CPU under Triton's interpreter."""
    if device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= SHARED_MEMORY


def capability_of(device: torch.device) -> int:
    """Compute capability of a GPU: 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def is_hopper(capability: int) -> bool:
    """Whether it is a GPU like those that sizes of tiles and prices of padding were measured on, and bits compared."""
    return 90 <= capability < 100


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """To a GPU through pinned memory: from pageable memory the copy would wait for all that the GPU still has to do."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class ToHost:
    """A small tensor on its way to the host: `read` waits for what was queued before it, and for nothing behind. Any thread may read."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        if tensor.device.type == "cuda":
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.current_stream(tensor.device).record_event()
        else:
            self._values = tensor.clone()

    @property
    def done(self) -> bool:
        """`read` does not wait."""
        return self._event is None or self._event.query()

    def read(self) -> Any:
        """Nested lists of numbers, as `Tensor.tolist`."""
        if self._event is not None:
            with torch.cuda.device(self._event.device):  # else a thread of its own would begin to use the first GPU
                self._event.synchronize()
        return self._values.tolist()


def mark_on(device: torch.device) -> ToHost:
    """Nothing, that is there when the device has done all that it was given."""
    return ToHost(torch.empty(0, device=device))
