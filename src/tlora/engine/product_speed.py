"""How fast a device multiplies: one large product, repeated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tlora.sharing.link_speed import Repeated, repeat

_SIZE = {"cuda": 8192, "cpu": 256}  # rows, columns and inner size
REPEATS = 20


@dataclass(frozen=True)
class ProductSpeed:
    """`flops`: floating-point operations a second, of the best repeat."""

    flops: float
    repeated: Repeated


def measure_product(device: torch.device, dtype: torch.dtype, repeats: int = REPEATS) -> ProductSpeed:
    size = _SIZE[device.type]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    found = repeat(lambda: torch.mm(a, b, out=out), [device], repeats)
    return ProductSpeed(2 * size**3 / found.best, found)


def half_precision(device: torch.device) -> torch.dtype:
    """The 16 bits that a GPU trains in."""
    return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
